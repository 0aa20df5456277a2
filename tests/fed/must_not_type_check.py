"""Mistakes that the type checker must find; no test imports this file.

Each `type: ignore` names the error of its line. `make lint` runs mypy with `warn_unused_ignores`, so a mistake that it
no longer sees, because somewhere the method has become `Any`, fails the build.
"""

from typing import cast

import jax

import priory
from priory.core.rng import Key
from priory.core.struct import struct
from priory.engine.prepared import Prepared
from priory.evaluate import EvaluationContext
from priory.fed.capabilities import Draws, Evidence, SharedModel
from priory.fed.method import Info, Message, Method, Task
from priory.fed.shard import Shard
from priory.methods.fedavg import FedAvg
from priory.models.model import Params

task, key, data = cast(Task, None), cast(Key, None), cast(Shard, None)


def a_misspelt_verb(method: Method) -> None:
    method.client_updat(task, None, (), data, key)  # type: ignore[attr-defined]


def a_forgotten_argument(method: Method) -> None:
    method.aggregate(task, None, key)  # type: ignore[call-arg]


def a_capability_that_was_not_asked_for(method: Method, down: Params) -> None:
    method.population(task, down, None, key)  # type: ignore[attr-defined]
    if isinstance(method, SharedModel):
        method.population(task, down, None, key)


def the_engine_knows_the_method(ready: Prepared, context: EvaluationContext) -> None:
    ready.method.enrol()  # type: ignore[attr-defined]
    context.method.enrol()  # type: ignore[attr-defined]


def a_result_of_another_type(method: FedAvg, down: Params) -> jax.Array:
    return method.personalise(task, down, (), data, key)  # type: ignore[return-value]


def a_method_that_is_none() -> Method:
    return object()  # type: ignore[return-value]


@struct
class WithoutVerbs(Method[Params, Params, tuple[()], Params, Params], Draws[Params]):
    pass


def a_method_that_lacks_verbs() -> Method:
    return WithoutVerbs()  # type: ignore[abstract]


@struct
class WithAnotherSignature(FedAvg, Evidence[Params, Params]):
    def client_update(  # type: ignore[override]
        self, task: Task, down: Params, data: Shard, key: Key
    ) -> tuple[tuple[()], Message[Params], Info]:
        raise NotImplementedError


def a_setting_of_a_public_method_that_does_not_exist() -> None:
    priory.FedAvg(step_sizes=0.1)  # type: ignore[call-arg]
    method: priory.FedAvg = priory.FedProx()  # type: ignore[assignment]
    del method


def a_public_name_that_does_not_exist() -> None:
    priory.FedAverage  # type: ignore[attr-defined]  # noqa: B018
