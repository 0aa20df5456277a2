"""A method put to the test: its posteriors for clients whose truth is known.

Twice: under the population that the truths really come from, handed over as a broadcast (`Knows`), and plug-in, under
what a federation of the same clients learns from scratch. The first is about the posterior alone; the second adds what
is learned of the prior.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory import methods
from priory.calibration import problem as problems
from priory.calibration.problem import Problem
from priory.calibration.ranks import Verdict, judge
from priory.core import memory, rng
from priory.core.errors import UsageError
from priory.core.rng import Key, Stream
from priory.core.struct import replace
from priory.engine import demand, devices, simulate
from priory.engine.settings import Settings
from priory.evaluate import EvaluationContext, personal_posterior
from priory.fed import schedule
from priory.fed.capabilities import Draws, PosteriorCheck
from priory.fed.checks import countable
from priory.fed.local import Optimiser, Work
from priory.fed.method import Method, Task
from priory.fed.shard import Shards
from priory.models.model import Params

DRAWS = 99
CLIENT_BYTES = 8 * (3 * problems.EXAMPLES + DRAWS)  # columns of its examples, and draws of one weight
FEW = 10  # draws that tell which weights are random
# What a client that keeps its posterior does in a visit, of which there are many, and one that begins anew does in all.
KEEPS, BEGINS = (Work(epochs=epochs, batch_size=problems.EXAMPLES) for epochs in (10, 100))
# Local work that has converged on the problem, by the names that methods give it: a verdict should be about the
# posterior that a method aims at, and not about steps that it was not given.
ENOUGH: dict[str, Any] = {
    "work": KEEPS,
    "optimiser": Optimiser("sgd", 0.05, clip=1.0),  # a narrow prior is steep
    "finetune_epochs": 1000,
    "warm_up": 100,
    "samples": 200,
    "thin": 10,
    "prior_step_size": 0.1,
    "server_step_size": 1.0,
    "server_momentum": 0.0,
    "width": 16,
}


@dataclass(frozen=True)
class Options:
    """How a method is checked.

    Attributes:
        clients: Clients with a known truth; with more of them smaller faults are found.
        visits: Local updates of a client under the true population.
        rounds: Rounds in which the federation learns the prior, for the plug-in verdict; 0 leaves it out.
        seed: Root of all randomness.
    """

    clients: int = 1000
    visits: int = 100
    rounds: int = 300
    seed: int = 0

    def check(self) -> None:
        """Raise on numbers that cannot be meant."""
        for name, least in (("clients", 100), ("visits", 1), ("rounds", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)} is too small; choose {least} or more.")
        for name in ("visits", "rounds"):
            countable(name, getattr(self, name))
        if self.seed >= 1 << 32:
            raise UsageError(f"seed={self.seed} is out of range; choose a whole number from 0 to 2^32 - 1.")
        memory.check(f"clients={self.clients}", self.clients * CLIENT_BYTES, "choose fewer clients")


@dataclass(frozen=True)
class Checked:
    """The verdicts on a method; None where there is none to give."""

    method: Method
    problem: Problem
    true: Verdict | None
    plug_in: Verdict | None

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By what the clients knew of the population."""
        both = {"at true hyper-parameters": self.true, "plug-in": self.plug_in}
        return {name: verdict for name, verdict in both.items() if verdict is not None}

    @property
    def passes(self) -> bool:
        return all(verdict.passes for verdict in self.verdicts.values())


def enough(method: Method) -> Method:
    """The method with local work that has converged on the problem."""
    fields = {field.name for field in dataclasses.fields(method)}
    return replace(method, **{name: value for name, value in ENOUGH.items() if name in fields})


def with_work(method: Method, task: Task) -> Method:
    """The method with the local work for one that keeps its posterior or not, unless it was given some other."""
    if getattr(method, "work", None) != KEEPS or keeps(method, task):
        return method
    return schedule.put(method, ("work",), BEGINS)


def keeps(method: Method, task: Task) -> bool:
    """Whether a client keeps numbers from one visit to the next."""

    def kept(key: Key) -> Any:
        key_init, key_enrol = jax.random.split(key)
        return method.init_client(task, method.broadcast(method.init_server(task, key_init)), key_enrol)

    leaves = jax.tree.leaves(jax.eval_shape(kept, jax.eval_shape(rng.root, 0)))
    return any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def passing(method: Method) -> Any:
    """The method with the setting under which its posteriors should be right; None if it has no other."""
    if not isinstance(method, PosteriorCheck):
        return None
    other = method.calibrated(problems.PRIOR_SD, problems.POSTERIOR_SD)
    return None if other == method else other


def check(method: Method, options: Options) -> Checked:
    """The verdicts on a method, with the local work that it is given."""
    options.check()
    name = methods.name_of(method)
    method.check()
    demand.check_numbers(method, Settings())
    if not isinstance(method, Draws):
        raise UsageError(f"{name} claims no posterior over weights, so there is nothing to check; {_those_that_do()}.")
    with demand.counting(method):
        problem = problem_for(method, options)
    fitted = with_work(method, problem.task)
    drawn = under_truth(fitted, problem, options)
    true = None if drawn is None else judge(drawn, problem.truth, problem.exact_sd, options.seed)
    plug_in = None
    if options.rounds:
        plug_in = judge(after_training(fitted, problem, options), problem.truth, problem.exact_sd, options.seed)
    return Checked(method, problem, true, plug_in)


def problem_for(method: Method, options: Options) -> Problem:
    """The problem that a method can be given: classes if it refuses a regression, random where its draws differ."""
    try:
        given = problems.make(options.clients, options.seed)
        random = random_weights(method, given)
    except UsageError:  # what it refuses for another reason, it refuses again
        given = problems.make(options.clients, options.seed, has_classes=True)
        random = random_weights(method, given)
    if random == given.random:
        return given
    return problems.make(options.clients, options.seed, random, given.has_classes)


def random_weights(method: Method, problem: Problem) -> tuple[bool, ...]:
    """In which weights the networks of a client's posterior differ, before anything is learned; all, if in none."""
    (shards,) = devices.shards_of(problem.federation, devices.mesh_of_all(), "train")
    drawn = read(problem, _first_draws(method, problem.task, shards, rng.root(0)))[0]
    differ = np.std(drawn, axis=0) > 0
    return tuple(map(bool, differ if differ.any() else ~differ))


def under_truth(method: Method, problem: Problem, options: Options) -> np.ndarray | None:
    """Return draws (clients, draws, weights) of posteriors under the true population; None if it has no broadcast."""
    if not (isinstance(method, PosteriorCheck) and all(problem.random)):
        return None
    down = method.knowing(problem.task, *problem.population())
    if down is None:
        return None
    (shards,) = devices.shards_of(problem.federation, devices.mesh_of_all(), "train")
    visits = options.visits if keeps(method, problem.task) else 0  # of which nothing would be left
    drawn = _posteriors(method, problem.task, down, shards, rng.root(options.seed), visits=visits)
    return read(problem, drawn)


def after_training(method: Method, problem: Problem, options: Options) -> np.ndarray:
    """Draws (clients, draws, weights) of the participants' posteriors after a federation has learned from scratch."""
    how: dict[str, Any] = {"rounds": options.rounds, "seed": options.seed, "eval_every": 0}
    run = simulate(method, problem.federation, model="linear", client_batch=options.clients, **how)
    return read(problem, run.evaluator.draws(DRAWS))


def read(problem: Problem, drawn: Params) -> np.ndarray:
    """The weights of networks with leaves (clients, draws, ...) as numbers, (clients, draws, weights)."""
    how = {"random": problem.random, "has_classes": problem.has_classes}
    return np.asarray(_weights(problem.task, drawn, **how), np.float64)


@jax.jit
def _first_draws(method: Method, task: Task, shards: Shards, key: Key) -> Params:
    """Networks (1, draws, ...) of the first client's posterior before anything is learned."""
    key_init, key_enrol, key_post, key_draw = jax.random.split(key, 4)
    down = method.broadcast(method.init_server(task, key_init))
    state = method.init_client(task, down, key_enrol)
    posterior = method.personalise(task, down, state, shards.of(jnp.int32(0)), key_post)
    assert isinstance(method, Draws)
    drawn: Params = method.draws(task, posterior, key_draw, FEW)
    return jax.tree.map(lambda leaf: leaf[None], drawn)


@partial(jax.jit, static_argnames=("random", "has_classes"))
def _weights(task: Task, drawn: Params, *, random: tuple[bool, ...], has_classes: bool) -> Array:
    return jax.vmap(lambda params: problems.weights_of(task, params, random, has_classes))(drawn)


@partial(jax.jit, static_argnames="visits")
def _posteriors(method: Method, task: Task, down: Any, shards: Shards, root: Key, *, visits: int) -> Params:
    assert isinstance(method, Draws)
    context = EvaluationContext(method, method, task, down, root, jnp.int32(0))

    def one(client: Array) -> Params:
        key_post, key_draw = jax.random.split(rng.key(root, Stream.CLIENT, client))
        state = method.init_client(task, down, rng.key(root, Stream.ENROL, client))
        posterior = personal_posterior(context, state, shards.of(client), key_post, visits=visits)
        drawn: Params = method.draws(task, posterior, key_draw, DRAWS)
        return drawn

    return jax.vmap(one)(jnp.arange(shards.start.shape[0]))


def _those_that_do() -> str:
    names = [name for name, kind in methods.REGISTRY.items() if isinstance(kind(), Draws)]
    return f"choose {', '.join(names[:-1])} or {names[-1]}"
