"""The state of a client between rounds, in a directory of its own on its own machine.

    STATE/client-3/RUN/state-00000004.safetensors    its record after four rounds: posterior, and the channel's memory
    STATE/client-3/RUN/answer-1f….safetensors        under differential privacy, its last answer with the noise on it
    STATE/client-3/RUN/model/                        its personal model after the last round

A file is replaced atomically and says what it is: client, run, charter, generation (how many rounds had been done) and
the generation that it came from. The newest two are kept. A request for round t starts from the newest generation
that is not after t, so that a round asked twice gives the same answer.
"""

import hashlib
import json
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from priory.core import codec
from priory.core.codec import PyTree
from priory.core.errors import UsageError, explain_os_errors
from priory.core.files import private_directory, sync_directory, write_atomically
from priory.core.reading import parse_json, read_bytes
from priory.core.rng import Key
from priory.deploy.exchange import Reply

NAME = re.compile(r"state-(\d{8})\.safetensors")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SECRET, MODEL = "secret", "model"
CHECKSUM, OLD_CHECKSUM = "checksum", "sha256"  # of everything in a file; in older files, of the arrays alone


@dataclass(frozen=True)
class ClientStateStore:
    """The states of one client in one run.

    Attributes:
        directory: Of the client's state, on its machine.
        client: Its number.
        run: Name of the run, which the server chose.
        digest: Of the charter that the states belong to.
    """

    directory: Path
    client: int
    run: str
    digest: str

    def __post_init__(self) -> None:
        if RUN.fullmatch(self.run) is None:  # it becomes the name of a directory
            raise UsageError(f"run={self.run!r} is no name of a run; use letters, digits, dots and dashes.")

    @property
    def place(self) -> Path:
        """Directory of this run."""
        return client_directory(self.directory, self.client) / self.run

    @property
    def model(self) -> Path:
        """Directory of the personal model."""
        return self.place / MODEL

    def make_place(self) -> None:
        """Make the directory of this run; other users of the machine can enter neither it nor those of other runs."""
        for place in (self.place.parent, self.place):
            private_directory(place)

    def read(self, t: int, like: PyTree) -> tuple[PyTree, int]:
        """Return the record that round t starts from and its generation; zeros and 0 for a client that has not joined.

        Raises when the server has gone back to a round before the oldest state that is left.
        """
        there = self.generations()
        usable = [generation for generation in there if generation <= t]
        if usable:
            return self._load(max(usable), like)[0], max(usable)
        if there and (came_from := self._load(min(there), like)[1]) > 0:
            raise UsageError(
                f"Client {self.client} has states of rounds {', '.join(map(str, there))} and was asked for round {t}, "
                f"while the one of round {came_from} is gone; the server has lost its checkpoint, so start a new run."
            )
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like), 0

    def write(self, record: PyTree, generation: int, came_from: int) -> None:
        """Write a record, and delete all but it and the one that it came from."""
        arrays = codec.to_arrays(record)
        about = {**self._identity(), "generation": str(generation), "came_from": str(came_from)}
        with explain_os_errors(
            f"Client {self.client} cannot keep its state in {self.place}",
            "; make room, and the next round goes on from the last state",
        ):
            self.make_place()
            raw = codec.to_file(arrays, {**about, CHECKSUM: codec.digest(arrays, about)})
            write_atomically(self._path(generation), raw, mode=0o600)
        for old in set(self.generations()) - {generation, came_from}:
            self._path(old).unlink(missing_ok=True)

    def generations(self) -> list[int]:
        """Return the generations that are stored, in order."""
        found = (NAME.fullmatch(path.name) for path in self.place.glob("state-*.safetensors"))
        return sorted(int(match[1]) for match in found if match)

    def write_reply(self, reply: Reply) -> str:
        """Store an answer under differential privacy before it leaves; return its digest."""
        arrays = {name: np.frombuffer(raw, np.uint8) for name, raw in reply.arrays.items()}
        raw = codec.to_file(arrays, {"config": json.dumps(dict(reply.config))})
        digest = hashlib.sha256(raw).hexdigest()
        with explain_os_errors(
            f"Client {self.client} cannot store its answer in {self.place}",
            "; make room, and it answers when it is asked again",
        ):
            self.make_place()
            write_atomically(self._reply(digest), raw, mode=0o600)
        return digest

    def read_reply(self, digest: str) -> Reply:
        """Return the answer of a digest, and delete all others; raise if it was deleted or damaged."""
        path = self._reply(digest)
        try:
            raw = read_bytes(path)
            if hashlib.sha256(raw).hexdigest() != digest:
                raise ValueError
            arrays, about = codec.from_file(raw)
            config = parse_json(about["config"])
        except (OSError, ValueError, KeyError):
            raise UsageError(
                f"The answer that client {self.client} gave is no longer in {self.place}, and its privacy allows one; "
                "go on with the next round."
            ) from None
        for other in set(self.place.glob("answer-*.safetensors")) - {path}:
            other.unlink(missing_ok=True)
        return Reply(config, {name: array.tobytes() for name, array in arrays.items()})

    def _load(self, generation: int, like: PyTree) -> tuple[PyTree, int]:
        """Return the record of a generation, and the generation that it came from."""
        path = self._path(generation)
        with explain_os_errors(f"{path} cannot be read", "; make it readable, and the next round goes on from it"):
            raw = read_bytes(path)
        try:
            arrays, about = codec.from_file(raw)
            claimed = about.pop(CHECKSUM, None)
            whole = codec.digest(arrays, about if claimed else {}) == (claimed or about[OLD_CHECKSUM])
            if not whole or about["generation"] != str(generation):
                raise ValueError
            came_from = int(about["came_from"])
        except (KeyError, ValueError):
            raise UsageError(
                f"{path} is damaged, so the client's state is lost; `priory flower forget` it to start again."
            ) from None
        if any(about.get(name) != value for name, value in self._identity().items()):
            raise UsageError(
                f"{path} belongs to another client or federation; name another state directory, or forget it."
            )
        return codec.from_arrays(arrays, like), came_from

    def _identity(self) -> dict[str, str]:
        return {"client": str(self.client), "run": self.run, "charter": self.digest}

    def _reply(self, digest: str) -> Path:
        return self.place / f"answer-{digest[:16]}.safetensors"

    def _path(self, generation: int) -> Path:
        return self.place / f"state-{generation:08d}.safetensors"


def secret_in(path: Path) -> Key:
    """Return the key in a file that only its owner can read, which is drawn if there is none."""
    with explain_os_errors(f"{path} can be neither read nor written", "; make it so, and go on"):
        if not path.exists():
            private_directory(path.parent, ours=False)
            write_atomically(path, secrets.token_hex(16) + "\n", mode=0o600)
        return secret_key(path.read_text(errors="replace"))


def secret_key(text: str) -> Key:
    """Return the key that 32 hexadecimal digits name."""
    try:
        words = np.frombuffer(bytes.fromhex(text.strip()), ">u4")
        if len(words) != 4:
            raise ValueError
    except ValueError:
        raise UsageError("The secret is damaged; forget the client's state in this run to start again.") from None
    key = jax.random.wrap_key_data(jnp.asarray(words[:2].astype(np.uint32)))
    return jax.random.fold_in(jax.random.fold_in(key, int(words[2])), int(words[3]))


def client_directory(directory: Path, client: int) -> Path:
    """Return the directory of a client, of all its runs."""
    return directory / f"client-{client}"


def forget(directory: Path, client: int, run: str | None = None) -> list[Path]:
    """Delete the files of one run of a client, or of all, and return them.

    Files next to the runs stay, which are the budget and the log: forgetting an answer does not make others forget it.
    """
    place = client_directory(directory, client)
    place = place if run is None else place / run
    if not place.is_dir() or (run is not None and RUN.fullmatch(run) is None):
        raise UsageError(f"{place} is no directory, so there is nothing to forget; name the client's state directory.")
    runs = [place] if run is not None else sorted(path for path in place.iterdir() if path.is_dir())
    gone = sorted(path for one in runs for path in one.rglob("*") if path.is_file())
    for one in runs:
        shutil.rmtree(one)
    if run is None and not any(place.iterdir()):
        place.rmdir()
    sync_directory(place if place.exists() else place.parent)
    return gone
