"""The tools that metrics can be sent to, each behind the same four verbs; none is imported before it is asked for."""

import importlib
import os
import time
from typing import Any, ClassVar, Protocol

from priory.core.errors import UsageError
from priory.core.reading import JsonDict
from priory.store import RunDirectory

Numbers = dict[str, float]
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
PROJECT = "priory"


class Tool(Protocol):
    """A place for metrics."""

    def start(self, title: str, settings: JsonDict, known: str | None) -> tuple[str, set[int]]:
        """Return the tool's name of the run, and the rounds it has; `known` is that name if the run was sent before."""

    def send(self, step: int, values: Numbers) -> None:
        """Keep the numbers of a round."""

    def end(self, step: int, values: Numbers) -> None:
        """Keep the numbers of the end."""

    def close(self, how: str) -> None:
        """Close a run that is finished, stopped or failed."""


class TensorBoard:
    """Event files in the directory `tensorboard` of the run: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, directory: RunDirectory | None) -> None:
        if directory is None:
            raise UsageError("track='tensorboard' writes beside a run, and this one has no directory; give out=.")
        self._path = directory.path / "tensorboard"
        # What PyTorch writes with too; tensorboardX would be a second package beside the one that shows the files.
        self._files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._settings = importlib.import_module("tensorboard.plugins.hparams.summary_v2")

    def start(self, title: str, settings: JsonDict, known: str | None) -> tuple[str, set[int]]:
        """Begin a file that replaces older ones in the display: all lines are written again."""
        del known
        self._writer = self._files.EventFileWriter(str(self._path))
        log = self._event.SessionLog
        self._add(step=0, session_log=log(status=log.START))
        self._add(summary=self._settings.hparams_pb(settings, trial_id=title))
        return self._path.name, set()

    def send(self, step: int, values: Numbers) -> None:
        """Write all numbers of a round in one event, on the disk before the round is committed."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))
        self._writer.flush()

    end = send

    def close(self, how: str) -> None:
        """Close the file."""
        del how
        self._writer.close()

    def _add(self, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), **what))


class MLflow:
    """A run of the experiment MLFLOW_EXPERIMENT_NAME, `priory` by default, where MLFLOW_TRACKING_URI says."""

    STATUS: ClassVar = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
    MOST_METRICS, MOST_PARAMS = 1000, 100  # that one call may carry

    def __init__(self, directory: RunDirectory | None) -> None:
        del directory
        self._client = importlib.import_module("mlflow").MlflowClient()
        self._kinds = importlib.import_module("mlflow.entities")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        self._experiment = self._client.create_experiment(name) if found is None else found.experiment_id

    def start(self, title: str, settings: JsonDict, known: str | None) -> tuple[str, set[int]]:
        """Continue the run that was begun before; begin one only if there is none."""
        if known is not None:
            self._run = known
            self._client.update_run(known, status="RUNNING")
            return known, {metric.step for metric in self._client.get_metric_history(known, "round")}
        self._run = self._client.create_run(self._experiment, run_name=title).info.run_id
        params = [self._kinds.Param(name, str(value)) for name, value in settings.items()]
        for start in range(0, len(params), self.MOST_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + self.MOST_PARAMS])
        return self._run, set()

    def send(self, step: int, values: Numbers) -> None:
        """Send all numbers of a round in one call, `round` last: if it arrived, all have."""
        self._log(step, {**values, "round": step})

    def end(self, step: int, values: Numbers) -> None:
        """Send the numbers of the end once; `rounds` is one of them."""
        if "rounds" not in self._client.get_run(self._run).data.metrics:
            self._log(step, values)

    def close(self, how: str) -> None:
        """Mark the run."""
        self._client.set_terminated(self._run, self.STATUS[how])

    def _log(self, step: int, values: Numbers) -> None:
        now = int(1000 * time.time())
        metrics = [self._kinds.Metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), self.MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + self.MOST_METRICS])


class WandB:
    """A run of the project WANDB_PROJECT, `priory` by default."""

    def __init__(self, directory: RunDirectory | None) -> None:
        del directory
        self._wandb = importlib.import_module("wandb")

    def start(self, title: str, settings: JsonDict, known: str | None) -> tuple[str, set[int]]:
        """Continue the run that was begun before: W&B counts steps, so the next one is known."""
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = self._wandb.init(project=project, name=title, id=known, config=settings, resume="allow")
        return str(self._run.id), set(range(self._run.step)) if known is not None else set()

    def send(self, step: int, values: Numbers) -> None:
        """Send the numbers of a round."""
        self._run.log({**values, "round": step}, step=step)

    def end(self, step: int, values: Numbers) -> None:
        """Put the numbers of the end into the summary of the run."""
        del step
        self._run.summary.update(values)

    def close(self, how: str) -> None:
        """Wait until everything is sent."""
        self._run.finish(exit_code=0 if how == FINISHED else 1)


TOOLS: JsonDict = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
