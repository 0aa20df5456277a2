"""A finished run: its scores, its clients' personal models, and the way in for a client that never took part."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory import uncertainty
from priory.certificate import DELTA, DRAWS, TOOK_PART, Certificate
from priory.core import rng
from priory.core.errors import UsageError
from priory.core.rng import Key, Stream
from priory.data import Federation
from priory.effects import Effects, arviz, check_effects, inference_data
from priory.engine import certified
from priory.engine.certified import Basis
from priory.engine.divergence import DIVERGED
from priory.engine.personal import PersonalModel, Source, Verb, shard_of
from priory.engine.prediction import Prediction
from priory.engine.settings import Settings
from priory.evaluate import current_client, personal_posterior
from priory.fed.capabilities import AdviceWarning, Evidence, SharedModel, Unlabelled
from priory.fed.method import Method, Task
from priory.fed.shard import Shard, Shards
from priory.metrics import RegressionScores, Scores
from priory.store import RunDirectory
from priory.uncertainty import Uncertainty

NEWCOMERS = ("newcomers", "newcomers_unlabelled", "newcomers_global")  # with labels, with inputs alone, with nothing


@dataclass(frozen=True)
class Elbo:
    """An estimate, from one draw of each client's weights, of a lower bound on log p(D); in nats.

    D are the training examples of all clients that take part. Where a method learns hyper-parameters of its prior
    (empirical Bayes), p is the prior with those in place: bounds under different ways of learning it do not compare.

    Attributes:
        total: The bound: Σ_k per_client − divergence.
        per_client: E log p(D_k | θ_k) − E KL(q_k ‖ p(θ_k | φ)), (clients,).
        divergence: KL(q(φ) ‖ p(φ)), which all clients share.
    """

    total: float
    per_client: np.ndarray = field(repr=False)
    divergence: float


@dataclass(frozen=True, repr=False)
class Run:
    """What a simulation leaves: scores, server, and a personal model for every client.

    Attributes:
        name: Registered name of the method.
        completed: Rounds done.
        personal: Scores of the clients' own models on their own test examples; None without any.
        population: Scores of the global model; None if the method has none.
        newcomers: Scores of held-out clients after onboarding with labels; None without any.
        newcomers_unlabelled: Of what their training inputs alone give; None if the method cannot use these.
        newcomers_global: Of the global model, which has seen nothing of them; None if the method has none.
        history: A line for each evaluation, as in metrics.jsonl; `list(run.history)` is what `json.dumps` takes.
        communication: Bytes down and up for each client and round.
        seconds: Spent compiling, training, evaluating.
        extra: What else is to be known, such as clients whose updates were not finite.
        path: The run directory, if there is one.
    """

    method: Method
    name: str
    federation: Federation
    task: Task
    settings: Settings
    server: Any = field(repr=False)
    completed: int
    personal: Scores | RegressionScores | None
    population: Scores | RegressionScores | None
    newcomers: Scores | RegressionScores | None
    newcomers_unlabelled: Scores | RegressionScores | None
    newcomers_global: Scores | RegressionScores | None
    history: Sequence[dict[str, Any]] = field(repr=False)
    communication: dict[str, int | None]
    seconds: dict[str, float]
    peak_rss_bytes: int
    extra: dict[str, Any]
    path: Path | None
    train: Shards = field(repr=False)
    root: Key = field(repr=False)
    session: Any = field(repr=False)

    def __repr__(self) -> str:
        done = f"{self.name}, {self.completed} rounds on {self.federation.name}"
        if self.personal is None:
            return f"<Run {done}>"
        name = "accuracy" if isinstance(self.personal, Scores) else "rmse"
        return f"<Run {done}, personal {name} {getattr(self.personal, name):.3f}>"

    @property
    def diverged(self) -> str | None:
        """What diverged, with the likely cause and the remedy; None where training did not."""
        return self.extra.get("advice", {}).get(DIVERGED)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Run":
        """The run itself: nothing in it changes, and a copy of its store would share open files with it."""
        return self

    def client(self, client: int | str) -> PersonalModel:
        """The personal model of a client of the federation, its sets calibrated on its validation rows."""
        index = self.check_client(client)
        joined, state = self.session.record_of(index)
        data = _shard(self.train, index)
        model = self._personalised(data, index, jnp.asarray(joined), state, TOOK_PART)
        if self.settings.exclude_uncertain:  # the rows have chosen who is heard
            return model
        held = _shard(uncertainty.validation_of(self.federation, self.session.test), index)
        return model.calibrated_on(held)

    def check_client(self, client: int | str) -> int:
        """The position of a client that took part; raises for any other."""
        index = self.federation.index(client)
        if index >= self.task.num_clients:
            raise UsageError(f"client={client} was held out as a newcomer; give its data to `onboard`.")
        return index

    def predict(self, client: int | str, x: Any, scale: Any = None, encoded: bool = False) -> Prediction:
        """What the personal model of a client says about raw inputs; arguments as for `PersonalModel.predict`."""
        return self.client(client).predict(x, scale, encoded)

    def onboard(
        self, x: Any = None, y: Any = None, scale: Any = None, encoded: bool = False, group: Any = None
    ) -> PersonalModel:
        """The personal model of a client that never took part, from what it has.

        With raw inputs and labels, as the data have them, it learns as a participant would. Inputs alone serve a method
        with `infer`; with any other, and without data, the client gets the model of the population.

        Args:
            group: The group of each row, where the run's data have groups; a certificate needs it.
        """
        if x is None:
            if y is not None:
                raise UsageError("y was given without x, and labels belong to inputs; give both, or neither.")
            return self._of_population("data", "x and y")
        data = shard_of(self.federation.form, x, y, None if y is None else scale, encoded)
        if y is None:
            return self._inferred(data)
        place = len(self.federation.clients)
        _, state = self.session.record_of(place % len(self.session.tasks))  # its shape, of a client with that network
        groups = None if group is None else np.asarray(group)
        if groups is not None and groups.shape != (int(data.count),):
            raise UsageError(f"group has shape {groups.shape} and y {int(data.count)} rows; give one value for each.")
        visits, basis = self.settings.onboard_visits, certified.basis_of(self, data, place, groups)
        return self._personalised(data, place, jnp.bool_(False), state, basis, visits)

    def elbo(self) -> Elbo:
        """The bound on log p(D) under the model's prior, with one draw of each client's weights.

        Each q_k is one local update from the final broadcast, whether or not the client took part in the last round.
        """
        if not isinstance(self.method, Evidence):
            raise UsageError(
                f"{self.name} has no bound on log p(D), since it has no `server_evidence` and `client_evidence`; "
                "choose a method with a prior over all clients, or give it both."
            )
        evidence, server = self.session.evidence()
        per_client = evidence.astype(np.float64)
        total = float(per_client.sum()) + server
        if not math.isfinite(total):
            bad = int(np.sum(~np.isfinite(per_client)))
            raise UsageError(
                f"The bound of {self.name} is {total}, with {bad} of {len(per_client)} clients not finite; a posterior "
                "of zero width has no density and a diverged one no likelihood, so choose a width above 0 or a smaller "
                "step size."
            )
        return Elbo(total, per_client, -server)

    def uncertainty(self, ood: Any = None, level: float = 0.9, bootstrap: int = 200) -> Uncertainty:
        """What the models know and do not know: calibration, doubt, prediction sets, by client and over all.

        Where the run has a directory the tables are kept in `uncertainty.json`, and a later call with the same
        arguments reads them. `docs/guide/uncertainty.md` says how to read each number.

        Args:
            ood: Inputs from elsewhere that the personal models should find foreign: a data set, an array or a data
                frame. At most 1000 of them are used.
            level: What prediction sets (for a regression, conformal intervals) should cover.
            bootstrap: Replicates for the standard errors; 0 for none.
        """
        uncertainty.check(level, bootstrap)
        inputs = None if ood is None else uncertainty.foreign_inputs(self.federation, ood)
        asked = (inputs, self.completed, level, bootstrap)
        kept = None if self.path is None else _kept_uncertainty(self.path)
        if kept is not None and uncertainty.stands_for(kept, *asked):
            return kept if inputs is not None else dataclasses.replace(kept, ood=None)
        found = uncertainty.measure(
            self.session.answers(inputs),
            inputs,
            classes=self.federation.classes,
            rounds=self.completed,
            level=level,
            bootstrap=bootstrap,
        )
        if self.path is not None and jax.process_index() == 0:
            try:
                RunDirectory(self.path).write_uncertainty(found.to_json())
            except OSError as error:
                warnings.warn(f"{self.path}/uncertainty.json was not written ({error.strerror}).", stacklevel=2)
        return found

    def certificates(self, delta: float = DELTA, draws: int = DRAWS) -> dict[str, Certificate]:
        """A bound on the error of each newcomer that has training rows, by name, at 1 − delta for each.

        Where the run has a directory they are kept in `certificates.json`. `docs/guide/newcomers.md` says how to read
        them.
        """
        return certified.of_newcomers(self, delta, draws)

    def certificate(
        self, client: int | str, prior: "Run | None" = None, delta: float = DELTA, draws: int = DRAWS
    ) -> Certificate:
        """A bound on the error of one client of the federation, at 1 − delta.

        Args:
            client: A newcomer, or with `prior` a client that took part.
            prior: A run of the same method and model on a federation that held the client out. What it learned is the
                prior; all of the network that is not drawn is taken from it, and so is the scaling of inputs.
        """
        return certified.of_client(self, client, prior, delta, draws)

    def effects(self, level: float = 0.9, draws: bool = False) -> Effects:
        """The random effects of every client that takes part, with central intervals, where the method has any.

        Warns where R-hat is above 1.01 or an effective sample size below 400, and where the method has advice on the
        run, such as that its population has not settled.

        Args:
            level: Probability of the intervals.
            draws: Whether to keep the draws that they are computed from.
        """
        check_effects(self.method, self.name, level)
        found: Effects = self.session.effects(level, draws)
        if found.warning is not None:
            warnings.warn(found.warning, AdviceWarning, stacklevel=2)
        return found

    def inference_data(self, found: Effects | None = None) -> Any:
        """The draws of the clients' random effects as `arviz.InferenceData`; needs the extra `priory[arviz]`.

        Args:
            found: The effects with their draws, where they are known already.
        """
        arviz()  # before anything is computed
        found = found or self.effects(draws=True)
        if found.draws is None:
            raise UsageError("These effects were computed without their draws; ask for `effects(draws=True)`.")
        return inference_data(found, method=self.name, data=self.federation.name)

    def summary(self) -> dict[str, Any]:
        """The contents of summary.json."""

        def scores(of: Scores | RegressionScores | None) -> dict[str, Any] | None:
            return None if of is None else of.to_json()

        return {
            "method": self.name,
            "rounds": self.completed,
            "personal": scores(self.personal),
            "global": scores(self.population),
            **{part: scores(getattr(self, part)) for part in NEWCOMERS},
            "communication": self.communication,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "peak_rss_bytes": self.peak_rss_bytes,
            "extra": self.extra,
        }

    def per_client(self) -> dict[str, Any]:
        """The contents of clients.json: the scores of each client, by name, null where it has no test examples."""
        names = self.federation.clients
        parts = {"personal": self.personal, "global": self.population}
        parts |= {part: getattr(self, part) for part in NEWCOMERS}
        ends = {"personal": (0, self.task.num_clients), "global": (0, self.task.num_clients)}
        table: dict[str, Any] = {}
        for part, scores in parts.items():
            if scores is not None:
                start, stop = ends.get(part, (self.task.num_clients, len(names)))
                columns = {k: [None if np.isnan(v) else float(v) for v in vs] for k, vs in scores.per_client.items()}
                table[part] = {"client": list(names[start:stop]), **columns}
        return table

    def save(self, path: Path | str) -> None:
        """Write a run directory that `priory.load` reads."""
        self.session.save(Path(path), self)

    def _personalised(
        self, data: Shard, place: int, joined: Array, state: Any, basis: Basis | str, visits: int = 0
    ) -> PersonalModel:
        down = self.method.broadcast(self.server)
        key_post, key_predict, _ = _keys(self.root, self.completed, place, num=3)
        task = self.session.task_of(place)
        args = (self.method, task, down, data, self.root, jnp.int32(place), joined, state, key_post)
        posterior = _personalise(*args, visits=visits, settled=self.session.settled)
        return self._model(task, posterior, key_predict, "personalise", basis, place)

    def _inferred(self, data: Shard) -> PersonalModel:
        down = self.method.broadcast(self.server)
        if not isinstance(self.method, Unlabelled):
            return self._of_population("labels", "y as well")
        key_infer, key_predict = self._keys_of_newcomer()
        posterior = _infer(self.method, self.task, down, data, key_infer)
        return self._model(self.task, posterior, key_predict, "infer", certified.WITHOUT_LABELS)

    def _of_population(self, lacking: str, remedy: str) -> PersonalModel:
        down = self.method.broadcast(self.server)
        if not isinstance(self.method, SharedModel):
            raise UsageError(
                f"{self.name} has nothing for a client without {lacking}, since it has no global model; give {remedy}."
            )
        key_choice, key_predict = self._keys_of_newcomer()
        posterior = self.method.population(self.task, down, None, key_choice)
        return self._model(self.task, posterior, key_predict, "population", certified.WITHOUT_LABELS)

    def _model(
        self, task: Task, posterior: Any, key: Key, verb: Verb, basis: Basis | str, place: int | None = None
    ) -> PersonalModel:
        """The model of the client at a place, which is past the end for one that comes later."""
        names = self.federation.clients
        client = names[place] if place is not None and place < len(names) else None
        source = Source(self.name, verb, self.session.model_text(place or 0), client, self.completed)
        return PersonalModel(self.method, task, posterior, self.federation.form, key, source, basis=basis)

    def _keys_of_newcomer(self) -> tuple[Key, Key]:
        """A key for the posterior and one for predictions; a client that comes later takes the next free number."""
        key_posterior, key_predict = _keys(self.root, self.completed, len(self.federation.clients), num=2)
        return key_posterior, key_predict


def _kept_uncertainty(path: Path) -> Uncertainty | None:
    """The tables in a run directory, if there are any that this version can read."""
    table = RunDirectory(path).uncertainty()
    try:
        return None if table is None else Uncertainty.from_json(table)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # of another version: it is computed anew


def _shard(shards: Shards, client: int) -> Shard:
    """One client's shard, outside of any program."""
    start, lengths = _run_of(shards.start, shards.count, client)
    return Shard(shards.pool, start, lengths, shards.capacity)


@jax.jit
def _run_of(start: Array, count: Array, client: Array) -> tuple[Array, Array]:
    return start[client][None], count[client][None]


@partial(jax.jit, static_argnames="num")
def _keys(root: Key, t: Array, place: Array, *, num: int) -> tuple[Key, ...]:
    return tuple(jax.random.split(rng.key(root, Stream.EVALUATION, t, place), num))


@jax.jit
def _infer(method: Unlabelled, task: Task, down: Any, data: Shard, key: Key) -> Any:
    return method.infer(task, down, data, key)


@partial(jax.jit, static_argnames="visits")
def _personalise(
    method: Method,
    task: Task,
    down: Any,
    data: Shard,
    root: Key,
    place: Array,
    joined: Array,
    state: Any,
    key: Key,
    *,
    visits: int,
    settled: Method,
) -> Any:
    client = current_client(method, task, down, root, place, joined, state)
    return personal_posterior(method, settled, task, down, client, data, key, visits)
