"""A personal model as files: `weights.safetensors`, `model.json` and, where asked for, `draws.nc`.

The weights are the leaves of the posterior by their paths; no structure is written and nothing is pickled. A reader
gets the structure from `jax.eval_shape` of the method's own verbs, so a file that does not fit it is refused.

The files contain the alignment set, which all clients know, and one conformal score per held-out row. A model of
kNN-Per contains the client's training examples as its last layer sees them, with labels; no other method keeps any.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from priory import methods
from priory.core import codec
from priory.core.codec import Arrays, DecodeError
from priory.core.errors import UsageError, explain_os_errors
from priory.core.files import sync_directory
from priory.core.reading import JsonDict, read_bytes
from priory.core.rng import Key
from priory.core.sealed import SealError, sealed, unsealed
from priory.data import form as forms
from priory.data.form import Form
from priory.engine import manifest
from priory.engine.personal import PersonalModel, Source, Verb, check_draws
from priory.engine.problem import with_likelihood
from priory.fed.capabilities import SharedModel, Unlabelled
from priory.fed.method import Method, Task
from priory.fed.shard import Pool, Shard
from priory.models.likelihood import Categorical, Gaussian
from priory.models.model import Head, as_model, check_trusted, parse

FORMAT = 1
DESCRIPTION, WEIGHTS, DRAWS = "model.json", "weights.safetensors", "draws.nc"
POSTERIOR, PUBLIC, CALIBRATION = "posterior", "public", "calibration"  # what the names of arrays begin with


def save_model(model: PersonalModel, path: Path | str, draws: int = 0) -> Path:
    """Write a model to a new directory, which appears whole or not at all, and return it.

    Args:
        draws: How many draws of the posterior go to `draws.nc`, as ArviZ reads them; 0 for none.
    """
    path = Path(path)
    if path.exists():
        raise UsageError(f"{path} exists already and is never overwritten; choose another directory.")
    if draws:
        check_draws(model, draws)
    raw = codec.to_file(_arrays(model))
    table = _describe(model, raw)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with explain_os_errors(f"{path} cannot be written", "; choose a directory that can"):
            temporary.mkdir(parents=True)
            (temporary / WEIGHTS).write_bytes(raw)
            if draws:
                model.inference_data(draws).to_netcdf(str(temporary / DRAWS))
                table["draws"] = {"file": DRAWS, "sha256": hashlib.sha256((temporary / DRAWS).read_bytes()).hexdigest()}
            (temporary / DESCRIPTION).write_text(sealed(table, indent=2))
            for file in temporary.iterdir():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            temporary.rename(path)
            sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def load_model(
    path: Path | str, *, method: Method | None = None, model: Any = None, trust_code: bool = False
) -> PersonalModel:
    """Return the personal model that `save_model` or `priory export` wrote; it predicts with the same bits.

    Args:
        method: As it was given to `simulate`, if it is not registered.
        model: The network as it was given to `simulate`, if it was an object.
        trust_code: Import the Python code that the directory names as a model or method, such as `mynet:make`. Set it
            only if you trust whoever wrote the directory; what is given as `model` or `method` needs no trust.
    """
    path = Path(path)
    table, raw = _read_description(path), _read(path / WEIGHTS)
    try:
        _check_sum(path / WEIGHTS, raw, table["weights"])
        if "draws" in table and (path / DRAWS).exists():  # it is for ArviZ, and may be deleted
            _check_sum(path / DRAWS, _read(path / DRAWS), table["draws"])
        if model is None:
            check_trusted({"model": table["task"]["model"]}, path / DESCRIPTION, trust_code)
        return _assembled(path, table, raw, method, model, trust_code)
    except DecodeError as error:
        raise UsageError(f"{path / WEIGHTS} holds no tensors ({error}); export the model again.") from None
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(
            f"{path / DESCRIPTION} does not describe a personal model ({type(error).__name__}: {error}); "
            "export the model again."
        ) from None


def is_model(path: Path | str) -> bool:
    """Return whether a directory contains an exported model."""
    return (Path(path) / DESCRIPTION).is_file()


def _arrays(model: PersonalModel) -> Arrays:
    """Return all arrays by name."""
    parts = {POSTERIOR: model.posterior, PUBLIC: model.task.public, CALIBRATION: model.calibration}
    return codec.to_arrays({name: part for name, part in parts.items() if part is not None})


def _describe(model: PersonalModel, raw: bytes) -> JsonDict:
    """Return the description: everything except the arrays."""
    task, form, source = model.task, model.form, model.source
    assert isinstance(task.is_head, Head)
    own = not methods.is_registered(model.method)
    named = {"method": {"name": source.method}} if own else manifest.name_method(model.method)
    return {
        "format": FORMAT,
        "priory": manifest.version_of("priory"),
        "client": source.client,
        "rounds": source.rounds,
        **named,
        "given": {name: True for name, is_so in (("method", own), ("model", source.model is None)) if is_so},
        "posterior": source.verb,
        "task": {
            "model": source.model,
            "likelihood": _likelihood_table(task.likelihood),
            "input_shape": list(task.input_shape),
            "num_clients": task.num_clients,
            "num_examples": task.num_examples,
            "head": task.is_head.pattern,
        },
        "data": forms.to_table(form),
        "calibration_rows": 0 if model.calibration is None else len(model.calibration),
        "key": {
            "kind": str(jax.random.key_impl(model.key)),
            "numbers": np.asarray(jax.random.key_data(model.key)).tolist(),
        },
        "weights": {"file": WEIGHTS, "sha256": hashlib.sha256(raw).hexdigest()},
    }


def _assembled(
    path: Path, table: JsonDict, raw: bytes, method: Method | None, model: Any, trust_code: bool
) -> PersonalModel:
    """Return the model of a description and its arrays."""
    for name, value in (("method", method), ("model", model)):
        if name in table["given"] and value is None:
            raise UsageError(f"The model in {path} was made with a {name} that a file cannot hold; pass {name}= again.")
    tensors, _ = codec.from_file(raw)
    if method is not None:
        manifest.check_method(method)
    else:
        method = manifest.read_method(table, path / DESCRIPTION, trust_code)
        manifest.warn_if_changed(method, table, path / DESCRIPTION)
    form = forms.from_table(table["data"], tuple(table["task"]["input_shape"]))
    task = _task(table["task"], model, tensors.get(PUBLIC))
    shape = _posterior_shape(method, task, form, table["posterior"])
    name = str(methods.canonical(table)["method"]["name"])
    source = Source(name, table["posterior"], table["task"]["model"], table["client"], int(table["rounds"]))
    key = jax.random.wrap_key_data(jnp.array(table["key"]["numbers"], jnp.uint32), impl=table["key"]["kind"])
    calibration = tensors.get(CALIBRATION)
    return PersonalModel(method, task, _posterior(path, tensors, shape), form, key, source, calibration)


def _task(table: JsonDict, model: Any, public: np.ndarray | None) -> Task:
    shape, likelihood = tuple(table["input_shape"]), _likelihood(table["likelihood"])
    if model is None:
        model = parse(table["model"], input_shape=shape, num_outputs=likelihood.num_outputs)
    return Task(
        with_likelihood(as_model(model), likelihood),
        likelihood,
        shape,
        int(table["num_clients"]),
        int(table["num_examples"]),
        Head(table["head"]),
        None if public is None else jnp.asarray(public),
    )


def _posterior_shape(method: Method, task: Task, form: Form, verb: Verb) -> Any:
    """Return the structure of the result of the verb; nothing is computed."""

    def made(key: Key) -> Any:
        key_init, key_client, key_post = jax.random.split(key, 3)
        down = method.broadcast(method.init_server(task, key_init))
        if verb == "population":
            assert isinstance(method, SharedModel)
            return method.population(task, down, None, key_post)
        y = jnp.zeros(1, jnp.float32 if form.num_classes is None else jnp.int32)
        shift, factor = jnp.asarray(form.shift), jnp.asarray(form.factor)
        pool = Pool(jnp.zeros((1, *task.input_shape)), y, jnp.ones(1), shift, factor)
        data = Shard(pool, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), 1)
        if verb == "infer":
            assert isinstance(method, Unlabelled)
            return method.infer(task, down, data, key_post)
        return method.personalise(task, down, method.init_client(task, down, key_client), data, key_post)

    return jax.eval_shape(made, jax.random.key(0))


def _posterior(path: Path, arrays: Arrays, shape: Any) -> Any:
    """Return the tree of that structure whose leaves are the arrays; raise where they do not fit it."""
    own = {name: array for name, array in arrays.items() if name not in (PUBLIC, CALIBRATION)}
    try:
        return jax.tree.map(jnp.asarray, codec.from_arrays(own, {POSTERIOR: shape})[POSTERIOR])
    except DecodeError:
        raise UsageError(
            f"The tensors in {path / WEIGHTS} do not fit the posterior that {path / DESCRIPTION} describes, so another "
            "version wrote them; export the model again."
        ) from None


def _likelihood_table(likelihood: Any) -> JsonDict:
    if isinstance(likelihood, Categorical):
        return {"kind": "categorical", "num_classes": likelihood.num_classes}
    return {"kind": "gaussian", "scale": likelihood.scale}


def _likelihood(table: JsonDict) -> Categorical | Gaussian:
    return Categorical(int(table["num_classes"])) if table["kind"] == "categorical" else Gaussian(table["scale"])


def _check_sum(file: Path, raw: bytes, entry: JsonDict) -> None:
    """Raise if the bytes of a file are not those that the description has the checksum of."""
    if hashlib.sha256(raw).hexdigest() != entry["sha256"]:
        raise UsageError(f"{file} does not match its checksum, so it was damaged; export the model again.")


def _read_description(path: Path) -> JsonDict:
    raw = _read(path / DESCRIPTION)
    try:
        table = unsealed(raw)
    except SealError as error:
        raise UsageError(f"{path / DESCRIPTION} {error}, so it was damaged; export the model again.") from None
    except ValueError:
        table = None  # no JSON
    if not isinstance(table, dict) or "format" not in table:
        raise UsageError(f"{path / DESCRIPTION} is no description of a personal model; export the model again.")
    if table["format"] != FORMAT:
        raise UsageError(
            f"{path / DESCRIPTION} has format {table['format']} where this version reads {FORMAT}; export the model "
            "again, or use the version that wrote it."
        )
    return table


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{file} cannot be read ({reason}); name a directory that `priory export` wrote.") from None
