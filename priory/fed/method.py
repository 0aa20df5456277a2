"""The central protocol: what a federated method is, and the laws it obeys.

A method is a frozen dataclass of hyper-parameters that derives from `Method`; the problem (`Task`) is passed in. The
runner, whether simulator or network, meets a method only through these verbs:

    init_server     the server before the first round; by default fresh parameters
    broadcast       exactly what leaves the server; by default the server itself
    init_client     a client's state at first contact; by default `()`: it keeps nothing
    client_update   local work: new client state and one message; always written
    aggregate       the next server from the stacked messages; by default their weighted mean
    personalise     a client's posterior, from what was broadcast and what it kept; always written
    predict         a finite mixture of outputs; by default the outputs of one network

What only some methods can do is in `priory/fed/capabilities.py`.

Laws, checked for every registered method by `tests/methods/test_laws.py`:

1. order       permuting the stacked messages changes nothing
2. absence     a message of weight 0 changes nothing, whatever it holds; a round without messages leaves the server
3. one stack   `linear` methods: a stack and its weighted mean with the total weight give the same server
4. position    a client's result depends on (root key, round, client id), not on its place in the cohort
5. wire        what travels survives packing and unpacking
6. one truth   simulator and wire give the same server
7. one trace   a new value of a traced hyper-parameter compiles nothing
8. statistics  batch-norm statistics are averaged plainly and nothing else touches them
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.about import About
from priory.fed.checks import check_fields
from priory.fed.shard import Batch, Shard
from priory.models import columns
from priory.models.likelihood import Likelihood
from priory.models.model import Model, Params

Server = TypeVar("Server")
Down = TypeVar("Down")
Client = TypeVar("Client")
Up = TypeVar("Up")
Post = TypeVar("Post")
Memory = TypeVar("Memory")
Info = dict[str, Array]


@struct
class Task:
    """The problem: passed to every verb, so that a method holds hyper-parameters only.

    Attributes:
        model: The network, a hashable description.
        likelihood: p(y | outputs).
        input_shape: Shape of one input.
        num_clients: N, the clients that take part (newcomers not counted).
        num_examples: |D|, the training examples of all of them together.
        is_head: Which parameter paths belong to the head; by default the last layer.
        public: Unlabelled inputs known to all, or None.
    """

    model: Model = static()
    likelihood: Likelihood = static()
    input_shape: tuple[int, ...] = static()
    num_clients: int = static()
    num_examples: int = static()
    is_head: Callable[[str], bool] = static()
    public: Array | None = None

    def init(self, key: Key) -> Params:
        """Freshly drawn parameters."""
        return self.model.init(key, self.input_shape)

    def frozen_and_learned(self, weights: Any, update: Literal["full", "body"]) -> tuple[Any, Any]:
        """The part that is only shared, and the part that is learned together: nothing and all, or head and body."""
        frozen, learned = trees.partition(weights, self.is_head if update == "body" else lambda path: False)
        if not jax.tree.leaves(learned):
            raise UsageError(
                f"update={update} leaves nothing to learn together, for the head is the whole network; choose "
                "update=full or a model with hidden layers."
            )
        return frozen, learned

    def nll(self, params: Params, batch: Batch, key: Key | None = None, masks: Any = None) -> tuple[Array, Any]:
        """The mean negative log-likelihood of the rows that count, and the new statistics.

        A key means training; masks say which columns of the weights stay (see `models.columns`).
        """
        if masks is None:
            outputs, stats = self.model.apply(params, batch.x, key=key)
        else:
            outputs, stats = columns.apply_without(self.model, params, masks, batch.x, key=key)
        return self.mean_nll(outputs, batch), stats

    def mean_nll(self, outputs: Array, batch: Batch) -> Array:
        """The mean negative log-likelihood, given the outputs, of the rows that count; 0 if none does."""
        return -jnp.sum(batch.mask * self.log_prob(outputs, batch)) / jnp.maximum(jnp.sum(batch.mask), 1.0)

    def log_prob(self, outputs: Array, batch: Batch) -> Array:
        """The log-likelihood of every row, given the outputs, (..., batch)."""
        assert batch.y is not None, "unlabelled data have no likelihood"
        return self.likelihood.log_prob(outputs, batch.y, batch.scale)


@struct
class Message(Generic[Up]):
    """One client's uplink; stacked on axis 0 when it reaches `aggregate`.

    Attributes:
        payload: What the method sends.
        weight: Scalar ≥ 0; 0 means absent.
        sender: Client id, filled in by the runner; only a non-linear `aggregate` may read it.
    """

    payload: Up
    weight: Array
    sender: Array | None = None


@struct
class Predictive:
    """A finite mixture of outputs: a point has S = 1, Monte Carlo S = samples, a gate S = K.

    Attributes:
        outputs: Model outputs of each component, (S, batch, ...).
        log_weights: (S, batch); each column log-sums to 0.
    """

    outputs: Array
    log_weights: Array


def point(outputs: Array) -> Predictive:
    """The predictive of a point estimate: one component of weight 1."""
    return Predictive(outputs[None], jnp.zeros((1, outputs.shape[0])))


def equally(task: Task, networks: Params, x: Array) -> Predictive:
    """The predictive of networks on axis 0 that count equally."""
    return even_mixture(jax.lax.map(lambda params: task.model.apply(params, x)[0], networks))


def even_mixture(outputs: Array) -> Predictive:
    """The predictive of components (axis 0) that count equally."""
    return Predictive(outputs, jnp.full(outputs.shape[:2], -jnp.log(outputs.shape[0])))


@struct
class Method(ABC, Generic[Server, Down, Client, Up, Post]):
    """A federated method. Methods are final: none derives from another one."""

    about: ClassVar[About] = About("baseline", keeps="", sends="")

    @property
    def linear(self) -> bool:
        """Whether law 3 holds: `aggregate` needs only the weighted mean; sums then stream instead of being stacked."""
        return False

    @property
    def pools(self) -> bool:
        """Whether one `client_update` gets the examples of the whole cohort, which only a simulation can do."""
        return False

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a payload that differential privacy clips apart, since their scales differ; () for one norm.

        They are "/"-joined paths in the order of `--dp-clip`, and every number is at or below one of them.
        """
        return ()

    @property
    def unbiased(self) -> str:
        """The theorem that needs compression without bias, and its assumption, in words that precede "needs"."""
        return ""

    def check(self) -> None:
        """Raise `UsageError` on a bad hyper-parameter; called once by the runner, before tracing."""
        check_fields(self)

    def init_server(self, task: Task, key: Key) -> Server:
        """Return the server before the first round."""
        return cast(Server, task.init(key))

    def broadcast(self, server: Server) -> Down:
        """Return exactly what leaves the server."""
        return cast(Down, server)

    def init_client(self, task: Task, down: Down, key: Key) -> Client:
        """Return the state of a client at its first contact."""
        del task, down, key
        return cast(Client, ())

    @abstractmethod
    def client_update(
        self, task: Task, down: Down, client: Client, data: Shard, key: Key
    ) -> tuple[Client, Message[Up], Info]:
        """Return the new state of a client, its message and its figures, after the local work of a round."""

    def aggregate(self, task: Task, server: Server, messages: Message[Up], key: Key) -> tuple[Server, Info]:
        """Return the next server and its figures; by default the weighted mean of the payloads is the server."""
        del task, key
        if not trees.same_form(jax.tree.map(lambda leaf: leaf[0], messages.payload), server):
            raise UsageError(
                f"{type(self).__name__} sends something else than its server keeps, so their weighted mean is no "
                "server; write its `aggregate`."
            )
        return trees.weighted_mean(messages.payload, messages.weight, otherwise=server), {}

    @abstractmethod
    def personalise(self, task: Task, down: Down, client: Client, data: Shard, key: Key) -> Post:
        """Return a client's posterior; `priory.fed.local.finetune` is one way."""

    def predict(self, task: Task, posterior: Post, x: Array, key: Key) -> Predictive:
        """Return the predictive for inputs; by default that of the one network that the posterior is."""
        del key
        return point(task.model.apply(cast(Params, posterior), x)[0])

    def reference(self, task: Task, down: Down, payload: Up) -> Up:
        """Return what a client that learned nothing would send: what was broadcast if it has that form, else zeros."""
        del task
        if trees.same_form(down, payload):
            return cast(Up, down)
        return jax.tree.map(jnp.zeros_like, payload)

    @property
    def bounded(self) -> bool:
        """Whether payloads have a finite `sensitivity`; differential privacy clips those that have not."""
        return False

    def sensitivity(self, task: Task, replaces: bool = True) -> float:
        """Return Δ₂, how far a sum of payloads can move when one client changes, whatever its data.

        If a client `replaces` another, the largest distance ‖u − u′‖ of two payloads; if one is added or removed, the
        largest norm ‖u − r‖, with r the `reference`.
        """
        del task, replaces
        return math.inf

    def uncertified(self, task: Task) -> str | None:
        """Return why a model has no certificate on this problem, with the remedy and no full stop; None if it has."""
        del task
        return None

    def compressible(self, path: str) -> bool:
        """Return whether the leaf of a payload at a "/"-joined path may be compressed; no traced number decides it."""
        del path
        return True

    def local_baseline(self) -> Self | None:
        """Return the same training of each client by itself, to see what the federation adds; None if there is none."""
        return None


class Channel(Protocol[Up, Memory]):
    """Optional uplink transform, composed outside the method.

    The runner hands it payload − reference and adds the reference back before `aggregate`, so that clipping,
    compression and screening see the difference. Statistics of a batch norm bypass it.
    """

    def check(self) -> None: ...

    def init(self, payload: Up) -> Memory: ...

    def send(self, payload: Up, memory: Memory, key: Key) -> tuple[Up, Memory, Array]:
        """What arrives, the sender's new memory, and the bits that travelled."""
