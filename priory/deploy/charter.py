"""The charter of a federation: what its server and all of its clients know before the first message.

Method, settings, the form of the data and how much of them there is; nobody's examples, but the alignment set that all
clients know where there is one. It is two files of a Flower app, which the app's bundle carries to every node, or three
if a file has the method:

    manifest.toml   method and settings, made to be read and changed
    problem.json    the form of the data, found when the app was made
    method.py       the method, where it is neither built in nor of an installed package

Both sides build the same tasks, channel and shapes from it, so that only numbers travel.
"""

import base64
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tomli_w

from priory import methods
from priory.core import rng
from priory.core.errors import UsageError
from priory.core.files import write_atomically
from priory.core.reading import JsonDict, parse_json, parse_toml, read_text
from priory.core.rng import Key
from priory.data import Federation
from priory.data import form as forms
from priory.data.form import Form
from priory.data.schema import Schema
from priory.deploy import noise
from priory.engine import accounting, architectures, demand, manifest, settings
from priory.engine.accounting import Ledger
from priory.engine.architectures import Tasks
from priory.engine.cohort import Participation
from priory.engine.problem import Question, question_of, tasks_for
from priory.engine.settings import Settings
from priory.fed.capabilities import SparseUplink
from priory.fed.channel import memory_of
from priory.fed.method import Channel, Message, Method, Task
from priory.fed.screen import Limits
from priory.fed.shard import Pool, Shard, Shards
from priory.fed.visit import Record, RoundContext
from priory.models.model import check_trusted, default_spec

MANIFEST, PROBLEM, METHOD = "manifest.toml", "problem.json", "method.py"
PUBLIC_BYTES = 4 << 20  # a bundle may have 10 MB, and text takes a third more than bytes
FREE = ("rounds", "seed")  # settings that a run may change without being another federation


@dataclass(frozen=True)
class Charter:
    """What everybody knows.

    Attributes:
        method: The method with its hyper-parameters.
        settings: How the federation is run.
        form: What examples look like.
        question: What is asked of them.
        public: The alignment set in the form of the data, or None.
    """

    method: Method
    settings: Settings
    form: Form
    question: Question
    public: np.ndarray | None = None

    @cached_property
    def name(self) -> str:
        """Registered name of the method."""
        return methods.name_of(self.method)

    @property
    def code(self) -> JsonDict:
        """The table of the method's code: {} for a built-in one, and a method from a file is in that of the app."""
        origin = methods.origin_of(type(self.method))
        return {} if origin is None else origin.table(copy=METHOD)

    @cached_property
    def tasks(self) -> Tasks:
        """The problem of each group of clients; client i belongs to group i mod G."""
        return tasks_for(self.question, self.settings)

    def task_of(self, client: int) -> Task:
        """The problem of a client."""
        return self.tasks[client % len(self.tasks)]

    @cached_property
    def participation(self) -> Participation:
        """How clients are drawn."""
        return self.settings.drawn_from(self.question.num_clients, len(self.tasks))

    @cached_property
    def ledger(self) -> Ledger | None:
        """What privacy costs, where it is asked for."""
        drawn, shards = self.participation, self.empty_shards
        return accounting.open_ledger(self.settings, self.method, self.tasks[0], drawn, None, shards, deployed=True)

    @cached_property
    def channel(self) -> Channel | None:
        """What a payload goes through before it is sent."""
        return self.settings.channel_of(self.method, None) if self.ledger is None else self.ledger.channel()

    @property
    def limits(self) -> Limits:
        """What the server accepts."""
        return self.settings.limits(self.tasks[0])

    def round_context(
        self, method: Method, down: Any, root: Key, t: int, client: int = 0, channel: Channel | None = None
    ) -> RoundContext:
        """What the server and a client share in a round.

        Args:
            method: As the schedules have it in this round.
            channel: What the client's payload goes through before noise is added to it.
        """
        return RoundContext(
            method, self.task_of(client), channel, down, root, jnp.int32(t), self.limits, self.settings.weighting
        )

    @property
    def empty_shards(self) -> Shards:
        """Shards of the form of the data that hold one row, for shapes."""
        data = self.shard(np.zeros((1, *self.question.input_shape), np.float32), None, None)
        return Shards(data.pool, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), 1)

    def shard(self, x: np.ndarray, y: np.ndarray | None, scale: np.ndarray | None) -> Shard:
        """One client's examples, in the form of the data and filled up to a power of two.

        A program is compiled for each capacity, and no result depends on it: clients of like sizes share one.
        """
        num = len(x)
        capacity = 1 << max(num - 1, 0).bit_length()

        def filled(array: np.ndarray) -> jax.Array:
            return jnp.asarray(np.concatenate([array, np.zeros((capacity - num, *array.shape[1:]), array.dtype)]))

        if y is None:
            y = np.zeros(num, np.float32 if self.question.num_classes is None else np.int32)
        if self.question.has_scale and scale is None:
            scale = np.ones(num, np.float32)
        scales = filled(np.asarray(scale, np.float32)) if self.question.has_scale else None
        shift, factor = jnp.asarray(self.form.shift, jnp.float32), jnp.asarray(self.form.factor, jnp.float32)
        pool = Pool(filled(x), filled(y), scales, shift, factor)
        return Shard(pool, jnp.zeros(1, jnp.int32), jnp.full(1, num, jnp.int32), capacity)

    @cached_property
    def _contacts(self) -> dict[int, architectures.Contact]:
        return {}

    def contact(self, client: int = 0) -> architectures.Contact:
        """What is broadcast to a client, kept, sent and reported by it, as shapes; traced once for each group."""
        group = client % len(self.tasks)
        if group not in self._contacts:
            found = architectures.first_contact(self.method, self.tasks[group], self.empty_shards)
            self._contacts[group] = found
        return self._contacts[group]

    def record(self, client: int) -> Record:
        """The shape of what is kept of a client."""
        contact = self.contact(client)
        memory = jax.eval_shape(partial(memory_of, self.channel), contact.message.payload)
        return Record(jax.eval_shape(lambda: jnp.bool_(False)), contact.client, memory)

    @cached_property
    def uplink(self) -> Message:
        """The shape of what travels up: a message without its sender, thin where the method makes it so."""
        payload = jax.eval_shape(self.thinned, self.contact().message.payload)
        return jax.eval_shape(lambda payload: Message(payload, jnp.float32(0)), payload)

    @property
    def _sparse(self) -> SparseUplink | None:
        """The method where only a part of its payload travels; a channel sees all of it."""
        return self.method if isinstance(self.method, SparseUplink) and self.channel is None else None

    def thinned(self, payload: Any) -> Any:
        """Return what travels of a payload."""
        return payload if self._sparse is None else self._sparse.thin(payload)

    def filled(self, task: Task, down: Any, payload: Any) -> Any:
        """Return the payload of what travelled."""
        return payload if self._sparse is None else self._sparse.fill(task, down, payload)

    def check(self) -> None:
        """Raise on what cannot be deployed, before anything runs."""
        chosen, method = self.settings, self.method
        if method.pools:
            raise UsageError(f"{self.name} needs all data in one place, which no network can give; choose fedavg.")
        if chosen.exclude_uncertain:
            raise UsageError(
                f"exclude-uncertain={chosen.exclude_uncertain} asks clients twice a round, which is done in simulation "
                "only; leave it out."
            )
        chosen.check(self.question.num_clients)
        method.check()
        demand.check_numbers(method, chosen)
        chosen.check_robust(method, self.name)
        chosen.schedules(method)
        self.participation.check()
        architectures.check(method, self.name, self.tasks, self.empty_shards)
        if self.ledger is not None:
            noise.sampler()
        _ = self.channel

    @cached_property
    def digest(self) -> str:
        """A hash of all that decides the shapes and meaning of what travels and is kept."""
        table = self._manifest()
        for name in FREE:
            table["run"].pop(name, None)
        method = table["method"] if self.code else methods.first_table(table["method"])
        parts = [method, table["run"], self._problem()]
        parts += [self.code["sha256"]] if self.code else []
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def running(self, **changes: Any) -> "Charter":
        """The same federation with some of the `FREE` settings changed."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **changes))

    def save(self, directory: Path) -> None:
        """Write the files."""
        problem, origin = self._problem(), methods.origin_of(type(self.method))
        if origin is not None and origin.is_file:
            write_atomically(directory / METHOD, origin.source)
        write_atomically(directory / MANIFEST, tomli_w.dumps(self._manifest()))
        write_atomically(directory / PROBLEM, json.dumps(problem, indent=1) + "\n")

    def _manifest(self) -> JsonDict:
        run = {name: value for name, value in dataclasses.asdict(self.settings).items() if value is not None}
        return {
            **manifest.name_method(self.method),
            **({"code": self.code} if self.code else {}),
            "run": run | {"schedule": list(self.settings.schedule)},
            "environment": {"priory": manifest.version_of("priory")},
        }

    def _problem(self) -> JsonDict:
        asked = self.question
        return {
            "clients": asked.num_clients,
            "examples": asked.num_examples,
            "input_shape": list(asked.input_shape),
            "has_scale": asked.has_scale,
            "form": forms.to_table(self.form),
            "public": None if self.public is None else _to_text(self.public),
        }


def make(method: Method, federation: Federation, chosen: Settings) -> Charter:
    """The charter under which a federation's clients would train a method."""
    return _drawn_up(method, chosen, federation.form, question_of(federation), federation.public)


def from_schema(method: Method, schema: Schema, chosen: Settings, public: np.ndarray | None = None) -> Charter:
    """Return the charter of a federation that a schema describes; it depends on no row, except those of `public`."""
    form = schema.form
    asked = _question(form, schema.role("scale") is not None, schema.clients, schema.examples, public)
    return _drawn_up(method, chosen, form, asked, public)


def _drawn_up(method: Method, chosen: Settings, form: Form, asked: Question, public: np.ndarray | None) -> Charter:
    if not methods.is_registered(method):
        raise UsageError(
            f"{type(method).__name__} is not registered, so no node would find it; register it first, or load it by "
            "priory.methods.make('path/file.py:Class')."
        )
    if chosen.model is None and chosen.models is None:
        chosen = dataclasses.replace(chosen, model=default_spec(form.input_shape, form.num_classes or 1))
    if public is not None and public.nbytes > PUBLIC_BYTES:
        raise UsageError(
            f"The alignment set has {public.nbytes} bytes, and an app may carry {PUBLIC_BYTES}; use fewer rows."
        )
    charter = Charter(method, chosen, form, asked, public)
    charter.check()
    if charter.ledger is None:
        return charter
    return charter.running(dp_noise=charter.ledger.noise)  # solved for once, and the same on all sides


def load(directory: Path, trust_code: bool = False) -> Charter:
    """The charter in the directory of an app; raises when it is damaged, or was made by another version.

    Args:
        trust_code: Whether it may name a model or method that is Python code.
    """
    charter = read(directory, trust_code)
    named = {"model": charter.settings.model, "models": charter.settings.models}
    check_trusted(named, directory / MANIFEST, trust_code)
    with _undamaged(directory):
        charter.check()
    return charter


def code_in(directory: Path) -> JsonDict:
    """Return the table of the method's code in the directory of an app; nothing is imported."""
    code = _read_toml(directory / MANIFEST).get("code", {})
    return code if isinstance(code, dict) else {}


def read(directory: Path, trust_code: bool = False) -> Charter:
    """The charter in the directory of an app before it is checked, so that no model is built and its code not imported.

    Args:
        trust_code: Whether it may name a method that is Python code.
    """
    table, problem = _read_toml(directory / MANIFEST), _read_json(directory / PROBLEM)
    check_version(str(table["environment"].get("priory", "")), f"{directory.name}/{MANIFEST}")
    with _undamaged(directory):
        method = manifest.read_method(table, directory / MANIFEST, trust_code)
        if manifest.has_changed(method, table.get("code", {})):
            raise UsageError(
                f"{directory / MANIFEST} was written with other code of the method {methods.name_of(method)}; make the "
                "app again, and install the same version of its package on all sides."
            )
        form = forms.from_table(problem["form"], tuple(problem["input_shape"]))
        public = None if problem["public"] is None else _from_text(problem["public"])
        asked = _question(form, bool(problem["has_scale"]), int(problem["clients"]), int(problem["examples"]), public)
        return Charter(method, settings.make(dict(table["run"])), form, asked, public)


@contextmanager
def _undamaged(directory: Path) -> Iterator[None]:
    """Turn whatever the values of a damaged app raise into one sentence."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # a value of another kind fails wherever it is first used
        said = f"{type(error).__name__}: {error}"[:200]
        raise UsageError(f"{MANIFEST} or {PROBLEM} in {directory} is damaged ({said}); make the app again.") from None


def _question(form: Form, has_scale: bool, clients: int, examples: int, public: np.ndarray | None) -> Question:
    """What is asked of examples of that form; the alignment set is given as raw rows."""
    seen = None if public is None else (public.astype(np.float32) - form.shift) * form.factor
    return Question(form.name, form.input_shape, form.num_classes, has_scale, clients, examples, seen)


def check_version(other: str, whose: str) -> None:
    """Raise unless another side runs this version: hyper-parameters and shapes may change between any two."""
    own = manifest.version_of("priory")
    if other != own:
        raise UsageError(f"{whose} is of priory {other or 'unknown'} and here is {own}; install the same on all sides.")


def first_key(seed: int) -> Key:
    """The root key of a run, as the simulator makes it."""
    return _root(np.uint32(seed))


_root = jax.jit(rng.root)


def _read_toml(path: Path) -> JsonDict:
    try:
        table = parse_toml(read_text(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); make an app with `priory flower init`.") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML ({error}); correct it.") from None
    for part in ("method", "run", "environment"):
        if not isinstance(table.get(part), dict):
            raise UsageError(f"{path} has no [{part}] table; make the app again.")
    return table


def _read_json(path: Path) -> JsonDict:
    try:
        table = parse_json(read_text(path))
        if not isinstance(table, dict):
            raise ValueError("no table")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); make an app with `priory flower init`.") from None
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}); make the app again.") from None
    return table


def _to_text(array: np.ndarray) -> JsonDict:
    raw = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": raw}


def _from_text(table: JsonDict) -> np.ndarray:
    raw = base64.b64decode(table["base64"], validate=True)
    return np.frombuffer(raw, np.dtype(table["dtype"])).reshape(table["shape"])
