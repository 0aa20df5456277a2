"""The central protocol: what a federated method is, and the laws it obeys.

A method is a frozen dataclass of hyper-parameters with seven verbs; the problem (`Task`) is passed in. The runner,
whether simulator or network, meets a method only through these verbs:

    init            the server before the first round
    broadcast       exactly what leaves the server
    enrol           a client's state at first contact, `()` if it keeps none
    client_update   local work: new client state and one message
    aggregate       the next server from the stacked messages
    personalise     a client's posterior, from what was broadcast and what it kept
    predict         a finite mixture of outputs

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.core.struct import static, struct
from priory.fed.shard import Batch, Shard
from priory.fed.thin import Thin
from priory.models import columns
from priory.models.likelihood import Likelihood
from priory.models.model import Model, Params

Server = TypeVar("Server")
Down = TypeVar("Down")
Client = TypeVar("Client")
Up = TypeVar("Up")
Post = TypeVar("Post")
Memory = TypeVar("Memory")
DownIn = TypeVar("DownIn", contravariant=True)
UpIn = TypeVar("UpIn", contravariant=True)
PostIn = TypeVar("PostIn", contravariant=True)
ClientIn = TypeVar("ClientIn", contravariant=True)
PostOut = TypeVar("PostOut", covariant=True)
DownOut = TypeVar("DownOut", covariant=True)
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


class Method(Protocol[Server, Down, Client, Up, Post]):
    """The seven verbs. `linear` promises law 3: streaming, secure and hierarchical sums follow from it."""

    @property
    def linear(self) -> bool: ...

    def check(self) -> None:
        """Raise `UsageError` on a bad hyper-parameter; called once by the runner, before tracing."""

    def init(self, task: Task, key: Key) -> Server: ...

    def broadcast(self, server: Server) -> Down: ...

    def enrol(self, task: Task, down: Down, key: Key) -> Client: ...

    def client_update(
        self, task: Task, down: Down, client: Client, data: Shard, key: Key
    ) -> tuple[Client, Message[Up], Info]: ...

    def aggregate(self, task: Task, server: Server, messages: Message[Up], key: Key) -> tuple[Server, Info]: ...

    def personalise(self, task: Task, down: Down, client: Client, data: Shard, key: Key) -> Post: ...

    def predict(self, task: Task, posterior: Post, x: Array, key: Key) -> Predictive: ...


@runtime_checkable
class Population(Protocol[DownIn, PostOut]):
    """Optional: the method has a global predictor. Data may only *select* among what was broadcast."""

    def population(self, task: Task, down: DownIn, data: Shard | None, key: Key) -> PostOut: ...


@runtime_checkable
class Unlabelled(Protocol[DownIn, PostOut]):
    """Optional: a posterior from a client's inputs alone; the labels of the shard, if it has any, are not read."""

    def infer(self, task: Task, down: DownIn, data: Shard, key: Key) -> PostOut: ...


@runtime_checkable
class Divergence(Protocol[DownIn, PostIn]):
    """Optional: KL(posterior ‖ what was broadcast) in nats; certificates need it."""

    def divergence(self, task: Task, down: DownIn, posterior: PostIn) -> Array: ...


@runtime_checkable
class Draws(Protocol[PostIn]):
    """Optional: parameter draws from a posterior, stacked on axis 0."""

    def draws(self, task: Task, posterior: PostIn, key: Key, num: int) -> Params: ...


@dataclass(frozen=True)
class Certified:
    """What a certificate of a client's model speaks of; lives inside one trace.

    Attributes:
        draw: A network drawn from q, by a key.
        divergence: KL(q ‖ prior) in nats, or a bound on it.
    """

    draw: Callable[[Key], Params]
    divergence: Array


@runtime_checkable
class Uncertified(Protocol):
    """Optional: the method knows why a client's model can have no certificate."""

    def uncertified(self, task: Task) -> str | None:
        """The reason with its remedy, a clause without a full stop; None where nothing speaks against one."""


@runtime_checkable
class Certifies(Uncertified, Protocol[DownIn, PostIn]):
    """Optional: a client's model is a distribution q whose divergence from what was broadcast is known.

    All of the network that is not drawn must be as it was broadcast: what is fitted to a client without a price in the
    divergence voids the certificate.
    """

    @property
    def certifies(self) -> str:
        """What q is, in words that follow "a network drawn from"."""

    def certified(self, task: Task, down: DownIn, posterior: PostIn) -> Certified: ...


@runtime_checkable
class Reference(Protocol[DownIn, Up]):
    """Optional: what a client that learned nothing would send; zeros if a method does not say."""

    def reference(self, task: Task, down: DownIn, payload: Up) -> Up: ...


@runtime_checkable
class Evidence(Protocol[DownIn, UpIn]):
    """Optional: the method raises a lower bound on log p(D), which is `server_evidence` + Σ_k `client_evidence`."""

    def server_evidence(self, task: Task, down: DownIn) -> Array:
        """−KL(q(φ) ‖ p(φ)) in nats, with every constant."""

    def client_evidence(self, task: Task, down: DownIn, payload: UpIn, data: Shard, key: Key) -> Array:
        """E log p(D_k | θ_k) − E KL(q_k ‖ p(θ_k | φ)) in nats, q_k being what the payload says; the key draws θ_k."""


@runtime_checkable
class Thins(Protocol[DownIn, Up]):
    """Optional: only a part of a payload travels, and the receiver knows the rest."""

    def thin(self, payload: Up) -> Thin:
        """What travels of the payload."""

    def fill(self, task: Task, down: DownIn, thin: Thin) -> Up:
        """The payload that `thin` was taken from; numbers that did not travel are zero in it."""


@runtime_checkable
class Clusters(Protocol[ClientIn]):
    """Optional: the method sorts clients into clusters."""

    def cluster(self, client: ClientIn) -> Array:
        """The number of the cluster that the client is in, from what it keeps; negative while it has none."""


@runtime_checkable
class Compresses(Protocol):
    """Optional: only this part of a payload may be compressed."""

    def compressible(self, path: str) -> bool:
        """Whether the leaf at a "/"-joined path may be; no traced number may decide it."""


MOST_EFFECTS = 8  # random effects of a client that are read as numbers; more only serve to predict


@runtime_checkable
class Unbiased(Protocol):
    """Optional: the method's theory needs compression that is right in the mean."""

    @property
    def unbiased(self) -> str:
        """The theorem that needs it and its assumption, in words that precede "needs"."""


@runtime_checkable
class Effects(Protocol[DownIn, PostIn]):
    """Optional: a mixed-effects model, whose random effects differ between clients and come from one population."""

    def effects(self, task: Task, posterior: PostIn) -> Any:
        """Draws of a client's random effects: a tree whose leaves are (chains, draws, ...)."""

    def population_effects(self, task: Task, down: DownIn) -> tuple[Any, Any]:
        """Mean and standard deviation of the population, trees like one draw of the effects, with draws on axis 0.

        A point estimate is a single draw; all coordinates are told, even where they share one standard deviation.
        """

    def fixed_effects(self, task: Task, down: DownIn) -> Any:
        """The effects that all clients share: a tree, without leaves if there are none."""


@runtime_checkable
class Bounded(Protocol):
    """Optional: what a client sends is bounded by itself, so that differential privacy need not clip it."""

    def sensitivity(self, task: Task, replaces: bool = True) -> float:
        """Δ₂, how far a sum of payloads can move when one client changes, whatever its data.

        If a client `replaces` another, the largest distance ‖u − u′‖ of two payloads; if one is added or removed, the
        largest norm ‖u − r‖, with r what a client that learned nothing would send (`Reference`, otherwise 0).
        """


@runtime_checkable
class Alone(Protocol):
    """Optional: the method can be run so that no client learns of the others, to see what the federation adds."""

    def alone(self) -> Any:
        """The same training of every client by itself."""


@runtime_checkable
class Knows(Protocol[DownOut]):
    """Optional: the broadcast has a form for a population that is known, so that posteriors can be put to the test."""

    def knowing(self, task: Task, mean: Params, sd: Any) -> DownOut:
        """What the server would broadcast if it knew that clients' weights are independent N(mean, sd²)."""


@runtime_checkable
class Calibrates(Protocol):
    """Optional: the method has a setting under which its posteriors are Bayes' where everything is Gaussian."""

    def calibrated(self, prior_sd: float, posterior_sd: float) -> Any:
        """That setting, all clients having one population and one posterior width; the rest stays as it is."""


@runtime_checkable
class Parted(Protocol):
    """Optional: what a client sends has parts of different scale, which differential privacy clips apart."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Their "/"-joined paths in a payload, in the order of `--dp-clip`; all numbers are at or below one of them."""


class AdviceWarning(UserWarning):
    """What the figures of a run tell its user to look at."""


@runtime_checkable
class Advice(Protocol):
    """Optional: the method reads the figures of a round, and says what its user should know."""

    def advice(self, task: Task, info: dict[str, float]) -> dict[str, str]:
        """Sentences by kind, each with the value, what it means and the remedy; called on the host, untraced.

        A kind is told once a run, however its numbers change. `info["progress"]` is the share of the rounds that are
        done, which is 1 at the end.
        """


class Channel(Protocol[Up, Memory]):
    """Optional uplink transform, composed outside the method.

    The runner hands it payload − reference and adds the reference back before `aggregate`, so that clipping,
    compression and screening see the difference. Statistics of a batch norm bypass it.
    """

    def check(self) -> None: ...

    def init(self, payload: Up) -> Memory: ...

    def send(self, payload: Up, memory: Memory, key: Key) -> tuple[Up, Memory, Array]:
        """What arrives, the sender's new memory, and the bits that travelled."""
