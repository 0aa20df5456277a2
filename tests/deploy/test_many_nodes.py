"""A hundred nodes for fifty rounds: what the process holds after round 5 it holds after round 50."""

import gc
import os
from pathlib import Path

import pytest

from priory.deploy.loopback import Loopback

CLIENTS, ROUNDS, SETTLED = 100, 50, 5
MEGABYTE = 1 << 20


class Watched(Loopback):
    """A link that looks at its process after every round."""

    def ask(self, requests, timeout):
        request = next(iter(requests.values()))
        if request.kind != "hello":
            gc.collect()
            self.seen[request.config["round"]] = memory(), len(os.listdir("/proc/self/fd"))
        yield from super().ask(requests, timeout)


def memory():
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedrep"], ids=["stateless", "stateful"])
def test_memory_and_open_files_stay_flat(deployed, name):
    made = deployed(name, num_clients=CLIENTS, rounds=ROUNDS)
    made.link = Watched(made.clients)
    made.link.seen = seen = {}
    server = made.server()
    server.go()
    assert server.log.completed == ROUNDS
    assert server.log.reasons == {}
    (before, files), (after, files_after) = seen[SETTLED], seen[ROUNDS]
    told = ", ".join(f"{t}: {rss / MEGABYTE:.1f} MB, {num} files" for t, (rss, num) in seen.items() if t % 5 == 0)
    print(f"\n{name}, {CLIENTS} nodes, after round {told}")
    assert after <= max(1.03 * before, before + 10 * MEGABYTE), told
    assert files_after <= files, told
