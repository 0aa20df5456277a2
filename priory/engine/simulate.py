"""`simulate`, `check`, `resume` and `load`: a federation in one process, or what is left of one."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from priory.core.errors import UsageError
from priory.core.files import check_no_links
from priory.data import Federation
from priory.engine import manifest, settings
from priory.engine.compilation import let_go_of_programs
from priory.engine.prepared import Prepared, prepare
from priory.engine.run import Run
from priory.engine.runner import Listener, Runner
from priory.fed.method import Channel, Method
from priory.store import RunDirectory
from priory.track import Tracker
from priory.track import check as check_tool


def simulate(
    method: Method,
    federation: Federation,
    *,
    model: Any = None,
    channel: Channel | None = None,
    out: Path | str | None = None,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
    track: str | None = None,
    **options: Any,
) -> Run:
    """The finished run of a method on a federation; `options` are the fields of `Settings` (rounds, cohort, seed, …).

    Args:
        model: A Linen, NNX or Equinox module, a pair of functions, or a name such as `mlp:256`; a list of these is for
            clients in turn, with methods that exchange no weights.
        channel: Transform of what clients upload; `compress` names one that a manifest can hold.
        out: Directory for manifest, metrics, summary and checkpoints; nothing is written without it.
        listener: Told of progress.
        stop: Asked between blocks of rounds; when true the run is committed and returned as far as it is.
        track: Tool that settings, metrics and summary are sent to besides: tensorboard, mlflow or wandb (extras).
    """
    let_go_of_programs()
    ready = check(method, federation, model=model, channel=channel, out=out, track=track, **options)
    tracker = _tracker(track, out)  # before a directory is made
    return Runner.begin(ready, out).run(listener, stop, tracker)


def check(
    method: Method,
    federation: Federation,
    *,
    model: Any = None,
    channel: Channel | None = None,
    out: Path | str | None = None,
    track: str | None = None,
    **options: Any,
) -> Prepared:
    """Raise whatever `simulate` would raise on these arguments, with nothing trained, compiled for it or written.

    Rounds and evaluations are traced, since a method may find only there that the problem lacks something. A run that
    follows does not trace them again.
    """
    if not isinstance(federation, Federation):
        raise UsageError(f"{type(federation).__name__} is no federation; partition a data set first.")
    manifest.check_method(method)
    if isinstance(model, str):
        options, model = {**options, "model": model}, None
    chosen = settings.make(options)
    check_tool(track)
    if out is not None and jax.process_index() == 0:
        RunDirectory(out).check_free()
    ready = prepare(method, federation, chosen, model, channel)
    ready.rehearse()
    return ready


def resume(
    path: Path | str,
    *,
    federation: Federation | None = None,
    method: Method | None = None,
    model: Any = None,
    channel: Channel | None = None,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
    track: str | None = None,
    trust_code: bool = False,
) -> Run:
    """The run in a directory, brought to its end from its last commit; a finished one is only loaded.

    Args:
        federation: The data, where they came from arrays and no name describes them.
        method: As it was given to `simulate`, if it is not registered.
        model: As it was given to `simulate`, if it was an object.
        channel: As it was given to `simulate`.
        track: As for `simulate`; what the tool has of the run already is not sent again.
        trust_code: Import the Python code that the manifest names as a model or method, such as `mynet:make`. Set it
            only if you trust whoever wrote the directory; what is given as `model` or `method` needs no trust.
    """
    directory = RunDirectory(path)
    if not directory.is_committed() and (directory.summary() is not None or len(directory.metrics()) > 1):
        raise UsageError(
            f"{path} has results and no checkpoint to go on from; run its manifest.toml again in another directory."
        )
    is_finished = directory.summary() is not None
    if not is_finished:
        check_no_links(Path(path))
    let_go_of_programs()
    runner = _reopen(path, federation, method, model, channel, trust_code)
    tracker = _tracker(track, path)
    if is_finished:
        return runner.loaded(tracker)
    return runner.run(listener, stop, tracker)


def load(
    path: Path | str,
    *,
    federation: Federation | None = None,
    method: Method | None = None,
    model: Any = None,
    channel: Channel | None = None,
    trust_code: bool = False,
) -> Run:
    """The run in a directory, as far as it is; arguments as for `resume`."""
    if not RunDirectory(path).is_committed():
        raise UsageError(f"{path} holds no checkpoint; name a run directory, or run its manifest again.")
    return _reopen(path, federation, method, model, channel, trust_code).loaded()


def _tracker(name: str | None, out: Path | str | None) -> Tracker | None:
    """The tracker of that name, in the one process that writes."""
    return None if name is None or jax.process_index() > 0 else Tracker(name, out)


def _reopen(
    path: Path | str,
    federation: Federation | None,
    method: Method | None,
    model: Any,
    channel: Channel | None,
    trust_code: bool,
) -> Runner:
    table, file = RunDirectory(path).manifest(), Path(path, "manifest.toml")
    has_model = model is not None
    recipe = manifest.read(table, federation, method, file=file, has_model=has_model, trust_code=trust_code)
    for name, value in (("model", model), ("channel", channel)):
        if name in recipe.given and value is None:
            raise UsageError(
                f"The run in {path} was given {name}={recipe.given[name]}, which a manifest cannot hold; pass it again."
            )
    devices = recipe.environment.get("devices", len(jax.devices()))
    if devices != len(jax.devices()):
        warnings.warn(
            f"The run in {path} was made on {devices} devices and goes on with {len(jax.devices())}: sums are taken in "
            "another order, so the last bits will differ.",
            stacklevel=3,
        )
    return Runner.reopen(recipe, path, model, channel)
