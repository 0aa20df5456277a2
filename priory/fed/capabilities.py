"""What only some methods can do: classes that a method derives from besides `Method`.

The engine asks `isinstance(method, Draws)`; a class that names a capability and does not write it cannot be made.

    SharedModel      24 methods       a global predictor
    Unlabelled       FedVI            needs no labels: what makes a newcomer with inputs alone possible
    Draws            8 methods        networks drawn from a posterior
    Certifies        7 methods        a distribution whose divergence from what was broadcast is known
    PosteriorCheck   8 methods        a setting in which the posteriors are known
    Evidence         2 methods        a lower bound on log p(D)
    MixedEffects     FedPop           the table of `priory effects`, which no other capability can fill
    SparseUplink     sFedBayes        law 5 needs the receiver's side of it
    Clustered        4 methods        clients that are sorted
    Advises          2 methods        sentences for the user
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from jax import Array

from priory.core.rng import Key
from priory.fed.method import Task
from priory.fed.shard import Shard
from priory.fed.thin import Thin
from priory.models.model import Params

Down = TypeVar("Down")
Client = TypeVar("Client")
Up = TypeVar("Up")
Post = TypeVar("Post")

MOST_EFFECTS = 8  # random effects of a client that are read as numbers; more only serve to predict


class SharedModel(ABC, Generic[Down, Post]):
    """A method with a global predictor."""

    def population(self, task: Task, down: Down, data: Shard | None, key: Key) -> Post:
        """Return the global predictor, by default what was broadcast; data may only *select* among that."""
        del task, data, key
        return cast(Post, down)


class Unlabelled(ABC, Generic[Down, Post]):
    """A method that finds a posterior from a client's inputs alone."""

    @abstractmethod
    def infer(self, task: Task, down: Down, data: Shard, key: Key) -> Post:
        """Return the posterior; the labels of the shard, if it has any, are not read."""


class Draws(ABC, Generic[Post]):
    """A method whose posteriors networks can be drawn from."""

    @abstractmethod
    def draws(self, task: Task, posterior: Post, key: Key, num: int) -> Params:
        """Return so many networks, stacked on axis 0."""


@dataclass(frozen=True)
class Certified:
    """What a certificate of a client's model is about; lives inside one trace.

    Attributes:
        draw: A network drawn from q, by a key.
        divergence: KL(q ‖ prior) in nats, or a bound on it.
    """

    draw: Callable[[Key], Params]
    divergence: Array


class Certifies(ABC, Generic[Down, Post]):
    """A method that makes of a client's model a distribution q whose divergence from what was broadcast is known.

    All of the network that is not drawn must be as it was broadcast: what is fitted to a client without a price in the
    divergence voids the certificate.
    """

    @property
    @abstractmethod
    def certifies(self) -> str:
        """What q is, in words that follow "a network drawn from"."""

    @abstractmethod
    def certified(self, task: Task, down: Down, posterior: Post) -> Certified:
        """Return q as its draws and its divergence."""


class PosteriorCheck(ABC, Generic[Down]):
    """A method whose posteriors `priory check` can compare with those of a problem that is known."""

    def knowing(self, task: Task, mean: Params, sd: Any) -> Down | None:
        """Return what the server would broadcast if it knew that clients' weights are independent N(mean, sd²).

        None if the method has no broadcast of that form.
        """
        del task, mean, sd
        return None

    def calibrated(self, prior_sd: float, posterior_sd: float) -> Any:
        """Return the setting whose posteriors are Bayes' where all is Gaussian; None if there is none.

        All clients have one population and one posterior width; other hyper-parameters stay.
        """
        del prior_sd, posterior_sd
        return None


class Evidence(ABC, Generic[Down, Up]):
    """A method that raises a lower bound on log p(D), which is `server_evidence` + Σ_k `client_evidence`."""

    @abstractmethod
    def server_evidence(self, task: Task, down: Down) -> Array:
        """Return −KL(q(φ) ‖ p(φ)) in nats, with every constant."""

    @abstractmethod
    def client_evidence(self, task: Task, down: Down, payload: Up, data: Shard, key: Key) -> Array:
        """Return E log p(D_k | θ_k) − E KL(q_k ‖ p(θ_k | φ)) in nats; the payload gives q_k, the key draws θ_k."""


class MixedEffects(ABC, Generic[Down, Post]):
    """A mixed-effects model, whose random effects differ between clients and come from one population."""

    @abstractmethod
    def effects(self, task: Task, posterior: Post) -> Any:
        """Return draws of a client's random effects: a tree whose leaves are (chains, draws, ...)."""

    @abstractmethod
    def population_effects(self, task: Task, down: Down) -> tuple[Any, Any]:
        """Return mean and standard deviation of the population, trees like one draw, with draws on axis 0.

        A point estimate is a single draw; all coordinates are given, even where they share one standard deviation.
        """

    @abstractmethod
    def fixed_effects(self, task: Task, down: Down) -> Any:
        """Return the effects that all clients share: a tree, without leaves if there are none."""


class SparseUplink(ABC, Generic[Down, Up]):
    """A method of whose payload only a part travels, while the receiver knows the rest."""

    @abstractmethod
    def thin(self, payload: Up) -> Thin:
        """Return what travels of the payload."""

    @abstractmethod
    def fill(self, task: Task, down: Down, thin: Thin) -> Up:
        """Return the payload that `thin` was taken from; numbers that did not travel are zero in it."""


class Clustered(ABC, Generic[Client]):
    """A method that sorts clients into clusters."""

    def cluster(self, client: Client) -> Array:
        """Return the number of the cluster that the client is in, by default its state; negative while it has none."""
        return cast(Array, client)


class AdviceWarning(UserWarning):
    """The figures of a run suggest a change to its user."""


class Advises(ABC):
    """A method that reads the figures of a round and says what its user should know."""

    @abstractmethod
    def advice(self, task: Task, info: dict[str, float]) -> dict[str, str]:
        """Return sentences by kind, each with the value, what it means and the remedy; called on the host, untraced.

        A kind is shown once per run, however its numbers change. `info["progress"]` is the share of the rounds that
        are done, which is 1 at the end.
        """
