"""Where the clients' records are between rounds: on the devices while they fit, on disk beyond that.

Both homes run the same rounds on the same draws, so a run has the same bits in either.
"""

import shutil
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from priory.core import trees
from priory.core.errors import UsageError
from priory.core.rng import Key
from priory.engine import devices
from priory.engine.architectures import Tasks
from priory.engine.rounds import Plan, RoundInputs, Trace, blank_record, draw_slots, run_block, run_round
from priory.fed.method import Channel, Method
from priory.fed.shard import Shards
from priory.fed.visit import EMPTY, Record
from priory.records import RecordStore


class Resident:
    """Records stacked on the devices; a block of rounds is one compiled loop."""

    def __init__(self, record: Any, num_clients: int, plan: Plan, store: RecordStore | None) -> None:
        self._plan, self._store = plan, store
        self.records: Record = devices.zeros_shared_out(
            devices.shapes_shared_out(record, (plan.rows(num_clients),), plan.mesh), plan.mesh
        )
        self._touched = np.zeros(num_clients, bool)

    @staticmethod
    def rehearse(inputs: RoundInputs, server: Any, record: Any, plan: Plan) -> None:
        """Trace a block of rounds."""
        t, server = devices.shapes_everywhere((np.int32(0), server), plan.mesh)
        records = devices.shapes_shared_out(record, (plan.rows(inputs.num_clients),), plan.mesh)
        run_block.trace(inputs, t, t, server, records, plan=plan)

    def restore(self, generation: int) -> None:
        """Read what was committed."""
        assert self._store is not None
        for ids in _pieces(np.arange(len(self._touched)), self.records):
            stacked, found = self._store.read(ids, generation)
            if found.any():
                new = jax.tree.map(lambda leaf, found=found: leaf[found], stacked)
                rows, new = devices.everywhere((ids[found], new), self._plan.mesh)
                self.records = devices.put_rows(self.records, rows, new, mesh=self._plan.mesh)

    def run(self, inputs: RoundInputs, server: Any, start: int, stop: int) -> tuple[Any, Trace]:
        """The server after rounds start … stop − 1, and what happened."""
        span = devices.everywhere((np.int32(start), np.int32(stop)), self._plan.mesh)
        server, self.records, trace = run_block(inputs, *span, server, self.records, plan=self._plan)
        trace = jax.tree.map(lambda leaf: leaf[: stop - start], devices.to_host(trace, self._plan.mesh))
        self._touched[trace.ids[trace.status != EMPTY]] = True
        return server, trace

    def take(self, ids: np.ndarray, completed: int) -> Record:
        """The records of the given clients, shared out over the devices."""
        del completed
        return devices.take_rows(self.records, devices.everywhere(ids, self._plan.mesh), mesh=self._plan.mesh)

    def save(self, generation: int, committed: int) -> None:
        """Write down the clients that ran since the last time; they become valid with the next commit."""
        for ids in _pieces(np.flatnonzero(self._touched), self.records):
            padded = np.resize(ids, _power_of_two(-(-len(ids) // self._plan.hands)) * self._plan.hands)
            rows = devices.to_host(self.take(padded, generation), self._plan.mesh)
            if self._store is not None and jax.process_index() == 0:
                own = jax.tree.map(lambda leaf, ids=ids: leaf[: len(ids)], rows)
                self._store.write(ids, own, generation, committed)
        self._touched[:] = False


class Stored:
    """Records on disk; a round reads and writes its cohort only, and the next cohort is read while this one runs."""

    def __init__(self, record: Any, num_clients: int, plan: Plan, store: RecordStore | None) -> None:
        if jax.process_count() > 1:
            raise UsageError(
                f"The state of {num_clients} clients exceeds resident-bytes, and several processes cannot share a disk "
                "store; raise resident-bytes or run one process."
            )
        self._plan = plan
        if store is None:
            temporary = tempfile.mkdtemp(prefix="priory-")
            # Not a TemporaryDirectory, which warns when it is left to the garbage collector, as here it has to be.
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            store = RecordStore(Path(temporary), record, num_clients)
        self._store = store
        self._reader = ThreadPoolExecutor(max_workers=1)
        self._committed = 0

    @staticmethod
    def rehearse(inputs: RoundInputs, server: Any, record: Any, plan: Plan) -> None:
        """Trace a round."""
        t, server = devices.shapes_everywhere((np.int32(0), server), plan.mesh)
        here = devices.shapes_shared_out(record, (plan.places,), plan.mesh)
        run_round.trace(inputs, t, server, here, plan=plan)

    def restore(self, generation: int) -> None:
        """Nothing to read: a record is read when its client is called."""
        self._committed = generation

    def run(self, inputs: RoundInputs, server: Any, start: int, stop: int) -> tuple[Any, Trace]:
        """The server after rounds start … stop − 1, and what happened."""
        mesh, traces = self._plan.mesh, []
        ids = self._draw(inputs, start)
        early = self._read(ids, start)
        late = np.zeros(len(ids), bool)
        for t in range(start, stop):
            here = self._patched(early, ids, late, t)
            step = devices.everywhere(np.int32(t), mesh)
            running = run_round(inputs, step, server, devices.shared_out(here, mesh), plan=self._plan)
            following = self._draw(inputs, t + 1)
            # Who is in both rounds can be read only after this round has written it.
            late = np.isin(following, ids)
            reading = self._reader.submit(self._read, following[~late], t)
            server, after, trace = running
            trace = jax.tree.map(np.asarray, trace)
            ran = trace.status != EMPTY
            fresh = jax.tree.map(lambda leaf, ran=ran: np.asarray(leaf)[ran], after)
            self._store.write(ids[ran], fresh, t + 1, self._committed)
            traces.append(trace)
            early, ids = reading.result(), following
        return server, jax.tree.map(lambda *leaves: np.stack(leaves), *traces)

    def take(self, ids: np.ndarray, completed: int) -> Record:
        """The records of the given clients, shared out over the devices."""
        return devices.shared_out(self._read(ids, completed), self._plan.mesh)

    def save(self, generation: int, committed: int) -> None:
        """Nothing to write: every round did."""
        del committed
        self._committed = generation

    def _patched(self, early: Record, ids: np.ndarray, late: np.ndarray, t: int) -> Record:
        """The cohort's records: those read ahead, and those that had to wait."""
        if not late.any():
            return early

        def both(first: np.ndarray, second: np.ndarray) -> np.ndarray:
            out = np.empty((len(ids), *first.shape[1:]), first.dtype)
            out[~late], out[late] = first, second
            return out

        return jax.tree.map(both, early, self._read(ids[late], t))

    def _draw(self, inputs: RoundInputs, t: int) -> np.ndarray:
        return np.asarray(_ids_of_round(inputs.train, inputs.root, jnp.int32(t), plan=self._plan))

    def _read(self, ids: np.ndarray, completed: int) -> Record:
        return self._store.read(ids, completed)[0]  # a record that does not exist is zeros: not joined


@partial(jax.jit, static_argnames="plan")
def _ids_of_round(shards: Shards, root: Key, t: Array, *, plan: Plan) -> Array:
    return draw_slots(plan, shards, root, t).ids


def home_for(
    method: Method, tasks: Tasks, channel: Channel | None, shards: Shards, plan: Plan, limit: int
) -> tuple[type[Resident] | type[Stored], Any]:
    """The home that suits the size of the clients' state, and the shape of one record."""
    record = blank_record(method, tasks, channel, shards)
    return (Resident if trees.num_bytes(record) * tasks[0].num_clients <= limit else Stored), record


def _power_of_two(num: int) -> int:
    """The next power of two: how many clients ran differs from commit to commit, and each length is compiled once."""
    return 1 << (num - 1).bit_length()


def _pieces(ids: np.ndarray, records: Any, most: int = 1 << 28) -> list[np.ndarray]:
    """The ids in pieces whose records stay below so many bytes."""
    size = max(1, trees.num_bytes(records) // max(1, records.joined.shape[0]))
    step = max(1, most // size)
    return [ids[i : i + step] for i in range(0, len(ids), step)]
