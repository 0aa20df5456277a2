"""Local: every client trains alone; what a federation has to beat.

Server keeps   nothing
Client keeps   w_k   its own weights, trained on in every round it is active
Client sends   nothing
"""

from typing import ClassVar

import jax.numpy as jnp

from priory.core.rng import Key
from priory.core.struct import struct
from priory.fed.about import About
from priory.fed.local import Optimiser, Work, fit
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.models.model import Params


@struct
class Local(Method[tuple[()], tuple[()], Params, tuple[()], Params]):
    """Local training without a federation.

    Attributes:
        optimiser: Local solver; its state starts anew each round, as in the methods it is compared with.
        work: Local work of a round.
    """

    optimiser: Optimiser = Optimiser()
    work: Work = Work()

    about: ClassVar[About] = About(paper="baseline", keeps="its weights", sends="nothing")
    linear: ClassVar[bool] = True

    def init_server(self, task: Task, key: Key) -> tuple[()]:
        del task, key
        return ()

    def init_client(self, task: Task, down: tuple[()], key: Key) -> Params:
        del down
        return task.init(key)

    def client_update(
        self, task: Task, down: tuple[()], client: Params, data: Shard, key: Key
    ) -> tuple[Params, Message[tuple[()]], Info]:
        params, loss = fit(task.nll, client, data, self.optimiser, self.work, key)
        return params, Message((), weight=jnp.float32(1)), {"loss": loss}

    def aggregate(
        self, task: Task, server: tuple[()], messages: Message[tuple[()]], key: Key
    ) -> tuple[tuple[()], Info]:
        del task, messages, key
        return server, {}

    def personalise(self, task: Task, down: tuple[()], client: Params, data: Shard, key: Key) -> Params:
        del task, down, data, key
        return client
