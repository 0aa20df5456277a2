"""What a client keeps: safe from crashes, from full disks, from servers that went back and from other clients."""

import errno
import hashlib
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core.errors import UsageError
from priory.deploy import client_states
from priory.deploy.client_states import ClientStateStore, forget, secret_in, secret_key
from priory.deploy.exchange import Reply


def record(value):
    return {
        "joined": np.asarray(True),
        "mean": np.full((2, 3), value, np.float32),
        "nothing": np.zeros((0, 2), np.float32),
    }


LIKE = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, record(0)))


@pytest.fixture
def kept(tmp_path) -> ClientStateStore:
    return ClientStateStore(tmp_path, 3, "run-1", "digest")


def after(kept, *generations):
    """The states of rounds that followed one another, each with its own number in it."""
    came_from = 0
    for generation in generations:
        kept.write(record(generation), generation, came_from)
        came_from = generation
    return kept


def value(kept, t):
    return float(kept.read(t, LIKE)[0]["mean"][0, 0])


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_who_has_not_joined_starts_from_zeros(kept):
    found, generation = kept.read(5, LIKE)
    assert generation == 0
    assert not found["joined"]
    assert found["mean"].shape == (2, 3)


def test_a_state_comes_back_with_its_bits(kept):
    kept.write(record(0.1), 1, 0)
    found, generation = kept.read(1, LIKE)
    assert generation == 1
    jax.tree.map(np.testing.assert_array_equal, found, record(0.1))


def test_a_round_starts_from_the_newest_state_that_is_not_after_it(kept):
    after(kept, 2, 5)
    assert [value(kept, t) for t in (2, 3, 4, 5, 9)] == [2, 2, 2, 5, 5]


def test_a_round_that_is_asked_twice_starts_from_the_same_state(kept):
    after(kept, 1, 2)
    kept.write(record(3), 3, 2)
    assert kept.read(2, LIKE)[1] == 2
    kept.write(record(3), 3, 2)
    assert kept.generations() == [2, 3]


def test_two_generations_are_left(kept):
    assert after(kept, 1, 2, 3, 7).generations() == [3, 7]


def test_a_crash_before_the_rename_loses_nothing(kept):
    after(kept, 1, 2)
    (kept.place / ".state-00000003.safetensors.77").write_bytes(b"half of a")
    assert kept.read(9, LIKE)[1] == 2


def test_a_crash_before_old_states_are_dropped_loses_nothing(kept, monkeypatch):
    after(kept, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(ClientStateStore, "generations", lambda self: [])
        kept.write(record(3), 3, 2)
    assert kept.generations() == [1, 2, 3]
    assert (value(kept, 2), value(kept, 3)) == (2, 3)
    kept.write(record(4), 4, 3)
    assert kept.generations() == [3, 4]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_told_and_leaves_the_old_state(kept, monkeypatch, call):
    after(kept, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full_disk)
        with pytest.raises(UsageError, match=r"Client 3 cannot keep its state in .*\(No space left on device\); make"):
            kept.write(record(3), 3, 2)
    assert value(kept, 3) == 2
    assert sorted(path.name for path in kept.place.iterdir()) == [f"state-0000000{t}.safetensors" for t in (1, 2)]


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "client-0").write_text("a file")
    with pytest.raises(UsageError, match="Client 0 cannot keep its state"):
        ClientStateStore(tmp_path, 0, "run", "digest").write(record(1), 1, 0)


def test_a_server_that_went_back_too_far_is_refused(kept):
    after(kept, 4, 5, 6)
    with pytest.raises(UsageError, match="has states of rounds 5, 6 and was asked for round 3, while the one of"):
        kept.read(3, LIKE)


def test_a_server_may_go_back_to_before_a_client_joined(kept):
    kept.write(record(5), 5, 0)
    found, generation = kept.read(3, LIKE)
    assert generation == 0
    assert not found["joined"]


@pytest.mark.parametrize(
    "other", [{"client": 4}, {"run": "run-2"}, {"digest": "another"}], ids=["client", "run", "charter"]
)
def test_a_state_of_somebody_else_is_refused(kept, other):
    after(kept, 1)
    theirs = ClientStateStore(**{**vars(kept), **other})
    if theirs.place != kept.place:
        theirs.place.mkdir(parents=True)
        (theirs.place / "state-00000001.safetensors").write_bytes(
            (kept.place / "state-00000001.safetensors").read_bytes()
        )
    with pytest.raises(UsageError, match="belongs to another client or federation"):
        theirs.read(1, LIKE)


def test_a_state_under_the_name_of_another_generation_is_refused(kept):
    after(kept, 1)
    (kept.place / "state-00000001.safetensors").rename(kept.place / "state-00000002.safetensors")
    with pytest.raises(UsageError, match="is damaged"):
        kept.read(2, LIKE)


def outcome(kept, t):
    """What a round starts from, or why it cannot."""
    try:
        return str(value(kept, t))
    except UsageError as error:
        return str(error)


def test_no_flipped_bit_of_a_state_is_read(kept):
    after(kept, 1, 2)
    (kept.place / "state-00000001.safetensors").unlink()
    path = kept.place / "state-00000002.safetensors"
    raw, whole = path.read_bytes(), [outcome(kept, t) for t in (1, 2)]  # round 1 asks where the state came from
    found = 0
    for bit in range(0, 8 * len(raw), 5):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        now = [outcome(kept, t) for t in (1, 2)]
        assert now == whole or all("is damaged" in one for one in now)
        found += now != whole
    assert found > 100


def test_a_state_of_an_older_version_is_read(kept):
    from safetensors.numpy import load_file, save

    after(kept, 1)
    path = kept.place / "state-00000001.safetensors"
    packed = load_file(path)
    told = {"client": "3", "run": "run-1", "charter": "digest", "generation": "1", "came_from": "0"}
    digest = hashlib.sha256()  # of the arrays alone
    for name in sorted(packed):
        digest.update(f"{name}{packed[name].dtype.str}{packed[name].shape}".encode() + packed[name].tobytes())
    path.write_bytes(save(packed, {**told, "sha256": digest.hexdigest()}))
    assert value(kept, 1) == 1
    path.write_bytes(path.read_bytes().replace(digest.hexdigest().encode(), b"0" * 64))
    with pytest.raises(UsageError, match="is damaged"):
        kept.read(1, LIKE)


def test_a_state_of_other_shapes_is_refused(kept):
    after(kept, 1)
    with pytest.raises(UsageError, match=r"mean arrived as float32\[2, 3\] where float32\[5\]"):
        kept.read(1, LIKE | {"mean": jax.ShapeDtypeStruct((5,), jnp.float32)})


def test_a_state_that_is_one_array_is_kept(kept):
    kept.write(np.arange(3.0, dtype=np.float32), 1, 0)
    np.testing.assert_array_equal(kept.read(1, jax.ShapeDtypeStruct((3,), jnp.float32))[0], [0, 1, 2])


@pytest.mark.parametrize("run", ["", "..", "../x", "a/b", "/etc", ".hidden", "a" * 101, "a\nb"])
def test_a_run_whose_name_would_leave_the_directory_is_refused(tmp_path, run):
    with pytest.raises(UsageError, match="is no name of a run"):
        ClientStateStore(tmp_path, 0, run, "digest")
    (tmp_path / "client-0").mkdir()
    if run:
        with pytest.raises(UsageError, match="nothing to forget"):
            forget(tmp_path, 0, run)


def bits(key):
    return jax.random.key_data(key).tolist()


def test_a_secret_is_for_its_owner_alone_and_stays(kept):
    first = bits(secret_in(kept.place / "secret"))
    assert stat.S_IMODE((kept.place / "secret").stat().st_mode) == 0o600
    assert bits(secret_in(kept.place / "secret")) == first


def test_a_secret_can_at_no_moment_be_read_by_others(kept, monkeypatch):
    seen, real = [], os.fsync

    def fsync(handle):
        if stat.S_ISREG(os.fstat(handle).st_mode):
            seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    secret_in(kept.place / "secret")
    assert seen == [0o600]


def test_two_secrets_are_different(tmp_path):
    assert bits(secret_in(tmp_path / "one")) != bits(secret_in(tmp_path / "other"))


def test_all_of_a_secret_counts():
    text = "00" * 16
    keys = [bits(secret_key(text[: 2 * i] + "01" + text[2 * i + 2 :])) for i in range(16)]
    assert len({tuple(key) for key in [*keys, bits(secret_key(text))]}) == 17


@pytest.mark.parametrize("raw", [b"", b"no digits", b"00" * 15, b"\xff\xfe" * 16])
def test_a_damaged_secret_is_refused(kept, raw):
    kept.place.mkdir(parents=True)
    (kept.place / "secret").write_bytes(raw)
    with pytest.raises(UsageError, match="The secret is damaged; forget"):
        secret_in(kept.place / "secret")


def test_a_secret_that_cannot_be_written_is_told(kept, monkeypatch):
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UsageError, match="No space left"):
        secret_in(kept.place / "secret")
    assert list(kept.place.iterdir()) == []


def test_forgetting_deletes_one_run_and_says_what(kept, tmp_path):
    after(kept, 1, 2)
    other = after(ClientStateStore(tmp_path, 3, "run-2", "digest"), 1)
    assert [path.name for path in forget(tmp_path, 3, "run-1")] == [f"state-0000000{t}.safetensors" for t in (1, 2)]
    assert not kept.place.exists()
    assert other.generations() == [1]


def test_forgetting_deletes_all_runs_of_a_client_and_of_no_other(kept, tmp_path):
    after(kept, 1)
    other = after(ClientStateStore(tmp_path, 4, "run-1", "digest"), 1)
    assert sorted(path.name for path in forget(tmp_path, 3)) == ["state-00000001.safetensors"]
    assert not client_states.client_directory(tmp_path, 3).exists()
    assert other.generations() == [1]


def test_there_is_nothing_to_forget_of_a_client_that_keeps_nothing(tmp_path):
    with pytest.raises(UsageError, match="client-8 is no directory"):
        forget(tmp_path, 8)


def test_what_a_client_keeps_is_for_its_owner_alone(tmp_path, open_umask):
    kept = ClientStateStore(tmp_path / "state", 3, "run-1", "digest")
    after(kept, 1)
    kept.write_reply(Reply({}, {"x": b"1"}))
    modes = {path.name.split("-")[0]: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").rglob("*")}
    assert modes == {"client": 0o700, "run": 0o700, "state": 0o600, "answer": 0o600}
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_open_directories_of_a_client_are_closed_and_the_one_that_its_owner_made_is_not(tmp_path):
    state = tmp_path / "state"
    (state / "client-3" / "run-1").mkdir(parents=True)
    for place in (state, state / "client-3", state / "client-3" / "run-1"):
        place.chmod(0o755)
    after(ClientStateStore(state, 3, "run-1", "digest"), 1)
    places = (state, state / "client-3", state / "client-3" / "run-1")
    assert [stat.S_IMODE(place.stat().st_mode) for place in places] == [0o755, 0o700, 0o700]
