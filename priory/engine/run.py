"""A finished run: its scores, its clients' personal models, and the way in for a client that never took part."""

import dataclasses
import math
import resource
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from priory import methods, uncertainty
from priory.certificate import DELTA, DRAWS, Certificate
from priory.core import trees
from priory.core.errors import UsageError
from priory.data import Federation
from priory.effects import Effects, arviz, check_effects, inference_data
from priory.engine import certified, devices, personalise
from priory.engine.advice import Adviser
from priory.engine.divergence import DIVERGED
from priory.engine.evaluator import NEWCOMERS, AnyScores, Evaluator
from priory.engine.personal import PersonalModel, shard_of
from priory.engine.prediction import Prediction
from priory.engine.run_log import RunLog, rounded
from priory.engine.settings import Settings
from priory.fed.capabilities import AdviceWarning, Evidence
from priory.fed.method import Method, Task
from priory.metrics import Scores
from priory.store import UNCERTAINTY, Checkpoint, RunDirectory
from priory.uncertainty import Uncertainty


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
        evaluator: The problem, the server and what clients keep, after the rounds so far.
        log: Lines of the metrics, counters, and the run directory if there is one.
        adviser: The advice on the run.
        manifest: The settings as a run directory has them.
        commit: What a commit holds besides states and counters.
        personal: Scores of the clients' own models on their own test examples; None without any.
        population: Scores of the global model; None if the method has none.
        newcomers: Scores of held-out clients after onboarding with labels; None without any.
        newcomers_unlabelled: Of what their training inputs alone give; None if the method cannot use these.
        newcomers_global: Of the global model, which has seen nothing of them; None if the method has none.
        communication: Bytes down and up for each client and round.
        seconds: Spent compiling, training, evaluating.
        extra: What else is to be known, such as clients whose updates were not finite.
    """

    evaluator: Evaluator = field(repr=False)
    log: RunLog = field(repr=False)
    adviser: Adviser = field(repr=False)
    manifest: dict[str, Any] = field(repr=False)
    commit: dict[str, Any] = field(repr=False)
    personal: AnyScores
    population: AnyScores
    newcomers: AnyScores
    newcomers_unlabelled: AnyScores
    newcomers_global: AnyScores
    communication: dict[str, int | None]
    seconds: dict[str, float]
    peak_rss_bytes: int
    extra: dict[str, Any]

    @property
    def method(self) -> Method:
        """The method as it was given."""
        return self.evaluator.ready.method

    @property
    def name(self) -> str:
        """Registered name of the method."""
        return methods.name_of(self.method)

    @property
    def federation(self) -> Federation:
        """The clients and their examples."""
        return self.evaluator.ready.federation

    @property
    def settings(self) -> Settings:
        """How the run was made."""
        return self.evaluator.ready.settings

    @property
    def task(self) -> Task:
        """The problem of the first group of clients; of all, where there are no others."""
        return self.evaluator.ready.task

    @property
    def server(self) -> Any:
        """What the server keeps."""
        return self.evaluator.server

    @property
    def completed(self) -> int:
        """Rounds done."""
        return self.evaluator.completed

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are done."""
        return self.completed >= self.evaluator.ready.last_round

    @property
    def history(self) -> Sequence[dict[str, Any]]:
        """A line for each evaluation, as in metrics.jsonl; `list(run.history)` is what `json.dumps` takes."""
        return self.log.history

    @property
    def path(self) -> Path | None:
        """The run directory, if there is one."""
        return self.log.directory.path if self.log.directory else None

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
        return personalise.participant(self.evaluator, self.federation.participant(client))

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
            return personalise.without_rows(self.evaluator, "data", "x and y")
        data = shard_of(self.federation.form, x, y, None if y is None else scale, encoded)
        if y is None:
            return personalise.without_labels(self.evaluator, data)
        groups = None if group is None else np.asarray(group)
        if groups is not None and groups.shape != (int(data.count),):
            raise UsageError(f"group has shape {groups.shape} and y {int(data.count)} rows; give one value for each.")
        return personalise.newcomer(self.evaluator, data, groups)

    def elbo(self) -> Elbo:
        """The bound on log p(D) under the model's prior, with one draw of each client's weights.

        Each q_k is one local update from the final broadcast, whether or not the client took part in the last round.
        """
        if not isinstance(self.method, Evidence):
            raise UsageError(
                f"{self.name} has no bound on log p(D), since it has no `server_evidence` and `client_evidence`; "
                "choose a method with a prior over all clients, or give it both."
            )
        evidence, server = self.evaluator.evidence()
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
            self.evaluator.answers(inputs),
            inputs,
            classes=self.federation.classes,
            rounds=self.completed,
            level=level,
            bootstrap=bootstrap,
        )
        if self.path is not None and jax.process_index() == 0:
            try:
                RunDirectory(self.path).write(UNCERTAINTY, found.to_json())
            except OSError as error:
                warnings.warn(f"{self.path}/uncertainty.json was not written ({error.strerror}).", stacklevel=2)
        return found

    def certificates(self, delta: float = DELTA, draws: int = DRAWS) -> dict[str, Certificate]:
        """A bound on the error of each newcomer that has training rows, by name, at 1 − delta for each.

        Where the run has a directory they are kept in `certificates.json`. `docs/guide/newcomers.md` says how to read
        them.
        """
        return certified.of_newcomers(self.evaluator, self.path, delta, draws)

    def certificate(
        self, client: int | str, prior: "Run | None" = None, delta: float = DELTA, draws: int = DRAWS
    ) -> Certificate:
        """A bound on the error of one client of the federation, at 1 − delta.

        Args:
            client: A newcomer, or with `prior` a client that took part.
            prior: A run of the same method and model on a federation that held the client out. What it learned is the
                prior; all of the network that is not drawn is taken from it, and so is the scaling of inputs.
        """
        held_out = None if prior is None else prior.evaluator
        return certified.of_client(
            self.evaluator, client, held_out, lambda: self.client(client).posterior, delta, draws
        )

    def effects(self, level: float = 0.9, draws: bool = False) -> Effects:
        """The random effects of every client that takes part, with central intervals, where the method has any.

        Warns where R-hat is above 1.01 or an effective sample size below 400, and where the method has advice on the
        run, such as that its population has not settled.

        Args:
            level: Probability of the intervals.
            draws: Whether to keep the draws that they are computed from.
        """
        check_effects(self.method, self.name, level)
        # What is shown is taken for the answer, whatever rounds are still to come.
        advice = self.adviser.of_figures(self.log.info, progress=1.0)
        self.adviser.warn({kind: advice[kind] for kind in advice if kind not in self.adviser.warned})
        found = self.evaluator.effects(level, draws, advice)
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

        def scores(of: AnyScores) -> dict[str, Any] | None:
            return None if of is None else of.to_json()

        return {
            "method": self.name,
            "rounds": self.completed,
            "personal": scores(self.personal),
            "global": scores(self.population),
            **{part: scores(getattr(self, part)) for part in NEWCOMERS},
            "communication": self.communication,
            "seconds": rounded(self.seconds),
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
        """Write a run that was kept in memory as a run directory, which `priory.load` reads."""
        evaluator, directory = self.evaluator, RunDirectory(path)
        directory.create(self.manifest)
        ready, states = evaluator.ready, evaluator.client_states
        checkpoint = Checkpoint(directory.checkpoint, self.server, ready.record, self.task.num_clients)
        for piece, padded in evaluator.pieces(np.arange(self.task.num_clients)):
            records = devices.to_host(states.take(padded, self.completed), ready.plan.mesh)
            there = np.flatnonzero(records.joined[: len(piece)])
            joined = jax.tree.map(lambda leaf, there=there: leaf[there], records)
            checkpoint.clients.write(piece[there], joined, self.completed, 0)
        log = self.log.copied_to(directory, checkpoint)
        log.commit(devices.to_host(self.server, ready.plan.mesh), self.commit)
        checkpoint.close()
        if self.is_finished:
            directory.write_summary(self.summary(), self.per_client())


def result(
    evaluator: Evaluator,
    log: RunLog,
    adviser: Adviser,
    scores: tuple[AnyScores, AnyScores, dict[str, AnyScores]],
    manifest: dict[str, Any],
    commit: dict[str, Any],
) -> Run:
    """Return the run after the rounds so far.

    Args:
        scores: Personal and global ones, and those of newcomers by the name of `NEWCOMERS`.
    """
    personal, population, newcomers = scores
    method, up = evaluator.ready.method, log.info.get("bits", math.nan) / 8
    down = jax.eval_shape(method.broadcast, evaluator.server)
    return Run(
        evaluator=evaluator,
        log=log,
        adviser=adviser,
        manifest=manifest,
        commit=commit,
        personal=personal,
        population=population,
        **{part: newcomers.get(part) for part in NEWCOMERS},
        communication={
            "down_bytes": None if method.pools else trees.num_bytes(down),
            "up_bytes": None if method.pools or not math.isfinite(up) else int(up),
        },
        seconds=dict(evaluator.ready.clock.seconds),
        peak_rss_bytes=_peak_rss(),
        extra=log.summary_entries() | ({"advice": dict(adviser.given)} if adviser.given else {}),
    )


def _peak_rss() -> int:
    """The most memory that this process has held, which includes earlier runs in it; macOS counts bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _kept_uncertainty(path: Path) -> Uncertainty | None:
    """The tables in a run directory, if there are any that this version can read."""
    table = RunDirectory(path).read(UNCERTAINTY)
    try:
        return None if table is None else Uncertainty.from_json(table)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # of another version: it is computed again
