"""Bytes of any kind: whatever a message, a state or a run directory holds, the only exception is one sentence.

A mutation may be harmless (a byte of a comment, a digit of a score); then there is no exception.
"""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import priory
from priory.core.codec import DecodeError
from priory.core.errors import UsageError
from priory.deploy import charter as charters
from priory.deploy import client_states, examples, wire
from priory.deploy.client_states import ClientStateStore
from priory.deploy.flower import configured
from priory.deploy.journal import read_events, read_status
from priory.deploy.loopback import Loopback
from priory.deploy.roster import Roster
from priory.deploy.server import Operations, Server
from priory.fed.method import Message
from priory.fed.thin import Thin
from priory.methods import get
from priory.store import REMEDIES, RunDirectory
from tests.deploy.conftest import MODEL, Deployed, small_charter, small_federation


def fuzzed(num):
    """So many examples, the same every time."""
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=num, derandomize=True, deadline=None, database=None, suppress_health_check=slow)


@st.composite
def mutations(draw):
    """A function that changes bytes: cuts them, or overwrites, inserts or drops a few somewhere."""
    kind = draw(st.sampled_from(["cut", "overwrite", "insert", "drop", "double", "flip"]))
    where = draw(st.floats(0, 1, exclude_max=True))
    raw = draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(TOKENS)))
    length, bit = draw(st.integers(1, 40)), draw(st.integers(0, 7))

    def mutate(content: bytes) -> bytes:
        at = int(where * len(content))
        match kind:
            case "cut":
                return content[:at]
            case "overwrite":
                return content[:at] + raw + content[at + len(raw) :]
            case "insert":
                return content[:at] + raw + content[at:]
            case "drop":
                return content[:at] + content[at + length :]
            case "double":
                return content[:at] + content[at : at + length] * 2 + content[at + length :]
        return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :] if content else content

    return mutate


TOKENS = [
    b"0",
    b"-",
    b"9" * 20,
    b"1e999",
    b"NaN",
    b"null",
    b"[]",
    b"{}",
    b'"',
    b"\n",
    b"\x00",
    b"\xff",
    b'{"a":',
    b"true",
]


# What travels.

KEPT = {"a": np.arange(10).reshape(5, 2) < 3, "b": np.asarray(True)}
NUMBERS = jax.tree.map(lambda there: np.where(there, np.float32(1.5), np.float32(0)), KEPT)
TREE = {
    "thin": Message(Thin(KEPT, (NUMBERS, NUMBERS), {"stats": np.arange(3, dtype=np.float32)}), np.float32(2)),
    "whole": {"w": np.ones((2, 3), np.float32), "n": np.int32(4), "t": np.array([True, False]), "e": np.zeros((0, 2))},
}
LIKE = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), TREE)
PARTS = wire.encode(TREE)


def fits_or_is_refused(parts):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = wire.decode(parts, LIKE)
        except DecodeError as error:
            refused = error
            found = None
    if found is None:
        assert refused.reason in ("keys", "shape", "dtype", "oversized", "garbage")
        assert len(str(refused)) < 5000
        return
    assert jax.tree.structure(found) == jax.tree.structure(TREE)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(TREE), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@fuzzed(100)
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(PARTS)), st.text(max_size=20)), st.binary(max_size=200), max_size=12
    )
)
def test_bytes_of_any_kind_are_no_message(parts):
    fits_or_is_refused(parts)
    fits_or_is_refused(PARTS | parts)


@fuzzed(300)
@given(st.sampled_from(sorted(PARTS)), mutations())
def test_a_mutated_message_is_refused_or_fits(name, mutate):
    fits_or_is_refused(PARTS | {name: mutate(PARTS[name])})


@fuzzed(300)
@given(
    st.sampled_from(["'<f4'", "'|O'", "'>i8'", "[('a', '<f4')]", "'|S0'", "'<M8[s]'", "('<f4', (2,))", "'<f4'\\"]),
    st.one_of(st.lists(st.integers(-(10**20), 10**20), max_size=40).map(tuple).map(repr), st.text(max_size=30)),
    st.sampled_from(["True", "False", "1", "None", "[" * 90]),
    st.binary(max_size=64),
)
def test_a_header_of_any_kind_is_refused_or_fits(dtype, shape, fortran, body):
    line = f"{{'descr': {dtype}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode("latin1", "replace") + b"\n"
    raw = b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + body
    fits_or_is_refused(PARTS | {"whole/w": raw})


# What is kept.


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """The states of a client, with a bare place to damage a copy of them in."""
    one = ClientStateStore(tmp_path_factory.mktemp("state"), 0, "run", "digest")
    record = {"joined": np.asarray(True), "mean": np.ones((3, 2), np.float32), "": np.zeros(0, np.int8)}
    like = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, record))
    one.write(record, 1, 0)
    client_states.secret_in(one.place / "secret")
    return one, like, {path.name: path.read_bytes() for path in one.place.iterdir()}


@fuzzed(300)
@given(st.sampled_from(["state-00000001.safetensors", "secret"]), mutations())
def test_a_mutated_state_is_refused_or_whole(state, name, mutate):
    one, like, files = state
    (one.place / name).write_bytes(mutate(files[name]))
    with contextlib.suppress(UsageError):
        found, generation = one.read(1, like)
        assert generation == 1
        np.testing.assert_array_equal(found["mean"], np.ones((3, 2)))
    with contextlib.suppress(UsageError):
        client_states.secret_in(one.place / "secret")
    (one.place / name).write_bytes(files[name])


@fuzzed(100)
@given(st.text(max_size=60))
@example("0" * 32)
def test_a_secret_of_any_kind_is_a_key_or_refused(text):
    with contextlib.suppress(UsageError):
        client_states.secret_key(text)


# What a server and an app keep.


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A finished deployment: its server's directory, an app and dealt rows, and the bytes of all their files."""
    place = tmp_path_factory.mktemp("federation")
    made = Deployed(place, small_charter(get("fedavg")(), rounds=2, eval_every=1), small_federation())
    made.server().go()
    (place / "app").mkdir()
    made.charter.save(place / "app")
    examples.save(examples.of_client(made.federation, 0), place / "app" / "rows.npz")
    return made, {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "node-" not in str(path)}


@contextlib.contextmanager
def damaged(federation, path, mutate):
    """The federation with one file changed, and afterwards as it was."""
    _, files = federation
    path.write_bytes(mutate(files[path]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for file, raw in files.items():
            if not file.exists() or file.read_bytes() != raw:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(raw)


def everything(directory, data=None):
    """Each of the readers of a run directory."""
    run = RunDirectory(directory)
    readers = [run.manifest, run.summary, run.metrics, run.per_client, run.is_committed, run.committed]
    readers += [lambda name=name: run.read(name) for name in REMEDIES]
    readers += [lambda: read_status(directory), lambda: read_events(directory)]
    return [*readers, lambda: Roster.open(directory, True), lambda: priory.load(directory, federation=data)]


@pytest.mark.parametrize(
    "name",
    ["manifest.toml", "metrics.jsonl", "summary.json", "clients.json", "status.json", "events.jsonl", "nodes.json"],
)
@fuzzed(60)
@given(mutate=mutations())
def test_a_mutated_file_of_a_server_is_read_or_refused(federation, name, mutate):
    place = federation[0].place / "server"
    with damaged(federation, place / name, mutate):
        for read in everything(place):
            with contextlib.suppress(UsageError):
                read()


@pytest.mark.parametrize("name", ["manifest.toml", "problem.json"])
@fuzzed(100)
@given(mutate=mutations())
def test_a_mutated_charter_is_read_or_refused(federation, name, mutate):
    place = federation[0].place / "app"
    with damaged(federation, place / name, mutate), contextlib.suppress(UsageError):
        charters.load(place)


@fuzzed(150)
@given(mutate=mutations())
def test_mutated_rows_are_read_or_refused(federation, mutate):
    path = federation[0].place / "app" / "rows.npz"
    with damaged(federation, path, mutate), contextlib.suppress(UsageError):
        examples.load(path).check(federation[0].charter, 0)


CHECKPOINT = ["commit.json", "server/records.bin", "server/index.bin", "clients/records.bin"]


@pytest.mark.parametrize("name", [*(f"checkpoint/{one}" for one in CHECKPOINT), "metrics.jsonl", "nodes.json"])
@fuzzed(30)
@given(mutate=mutations())
def test_a_server_on_a_mutated_directory_starts_or_refuses(federation, name, mutate):
    made, _ = federation
    with damaged(federation, made.place / "server" / name, mutate), contextlib.suppress(UsageError):
        server = Server(made.charter, Loopback({}), Operations(made.place / "server", wait=1.0))
        assert server.log.completed <= 2
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(server.server))


# What a simulation leaves, which the same readers read.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of the simulator, and the bytes of all its files."""
    place = tmp_path_factory.mktemp("run") / "run"
    chosen = {"rounds": 2, "eval_every": 1, "model": MODEL, "out": place}
    priory.simulate(get("fedavg")(), small_federation(), **chosen)
    return place, {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


FILES = ["manifest.toml", "metrics.jsonl", "summary.json", "clients.json", *(f"checkpoint/{one}" for one in CHECKPOINT)]


@pytest.mark.parametrize("name", FILES)
@fuzzed(10)
@given(mutate=mutations())
def test_a_mutated_run_is_loaded_or_refused(run, name, mutate):
    place, _ = run
    with damaged(run, place / name, mutate):
        for read in everything(place, small_federation()):
            with contextlib.suppress(UsageError):
                read()


# What is configured.

VALUES = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=10))


@fuzzed(100)
@given(
    st.dictionaries(
        st.sampled_from(["rounds", "seed", "out", "min-replies", "timeout", "attempts", "wait", "x"]), VALUES
    )
)
def test_a_run_config_of_any_kind_is_taken_or_refused(config):
    with contextlib.suppress(UsageError):
        charter, how = configured(small_charter(get("fedavg")()), {"out": "/tmp/out"} | config)
        how.check(charter.participation.cohort)
