"""What FedHB's server sums over: the participants, every client's latest m_k, or every client's latest m_k − m0.

    PRIORY_DATA=... python bench/server_sums.py

Only the first is in the library; the others remember a network for every client, and are kept here so that the
comparison in docs/methods/fedhb.md can be made again. Scores are of validation splits. Finished cells are read back.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

import jax

jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)

import jax.numpy as jnp  # noqa: E402

import priory  # noqa: E402
from priory import FedHBNIW, Optimiser, Work  # noqa: E402
from priory.core.struct import static, struct  # noqa: E402
from priory.fed.method import Message  # noqa: E402
from priory.models.model import Params  # noqa: E402
from priory.tune import without_test  # noqa: E402

CELLS = Path(__file__).parents[1] / "docs" / "methods" / "fedhb" / "validation"
KINDS = ("participants", "latest", "deltas")


@struct
class Memory:
    """The prior, and what every client sent last.

    Attributes:
        prior: What is broadcast.
        sent: m_k or m_k − m0 of each client on axis 0.
        seen: 1 for a client that has sent something.
    """

    prior: Any
    sent: Any
    seen: Any


@struct
class Remembering(FedHBNIW):
    """FedHB-NIW whose server sums over all clients that it has heard of."""

    kind: Literal["latest", "deltas"] = static(default="latest")

    def init_server(self, task: Any, key: Any) -> Any:
        prior = FedHBNIW.init_server(self, task, key)
        sent = jax.tree.map(lambda m: jnp.zeros((task.num_clients, *m.shape)), prior.mean)
        return Memory(prior, sent, jnp.zeros(task.num_clients))

    def broadcast(self, server: Any) -> Any:
        return server.prior

    def aggregate(self, task: Any, server: Any, messages: Any, key: Any) -> Any:
        mean, new = server.prior.mean, messages.payload.weights
        if self.kind == "deltas":
            new = jax.tree.map(lambda m, c: m - c[None], new, mean)
        senders = jnp.where(messages.weight > 0, messages.sender, task.num_clients)  # past the end: dropped
        sent = jax.tree.map(lambda old, m: old.at[senders].set(m, mode="drop"), server.sent, new)
        seen = server.seen.at[senders].set(1.0, mode="drop")
        points = sent if self.kind == "latest" else jax.tree.map(lambda d, c: d + c[None], sent, mean)
        prior, info = FedHBNIW.aggregate(self, task, server.prior, Message(Params(points, {}), seen), key)
        return Memory(prior, sent, seen), info


def main() -> None:
    for data in ("mnist", "fashion_mnist"):
        federation = priory.data.load(data).partition("shards:5", clients=100, seed=0, validation=0.2)
        for seed in (100, 101, 102):
            for kind in KINDS:
                path = CELLS / f"{data}-server-{kind}-{seed}.json"
                if not path.exists():
                    path.write_text(json.dumps(cell(federation, data, seed, kind), indent=2) + "\n")
                history = json.loads(path.read_text())["rounds_global_personal"]
                print(data, seed, kind, *(f"{t}: {g:.2f}/{p:.2f}" for t, g, p in history), flush=True)


def cell(federation: Any, data: str, seed: int, kind: Any) -> dict[str, Any]:
    """Accuracies along the run: on 25 clients before the end, on all at the end."""
    local = {"optimiser": Optimiser(step_size=0.1, momentum=0.9), "work": Work(batch_size=50), "prior_scale": 3.0}
    method = FedHBNIW(**local) if kind == "participants" else Remembering(kind=kind, **local)
    settings: dict[str, Any] = {"cohort": 10, "model": "mlp:256", "schedule": ("step-size=step:0.1@0.5,0.75",)}
    run = priory.simulate(
        method, without_test(federation), rounds=100, eval_every=20, eval_clients=25, seed=seed, **settings
    )
    history = [
        (line["round"], *(100 * line[part]["clients"]["mean"] for part in ("global", "personal")))
        for line in run.history
    ]
    origin = {"command": "python bench/server_sums.py", "split": "validation", "server_sums_over": kind, "data": data}
    return {**origin, "seed": seed, "rounds_global_personal": history, "personal_nll": run.personal.nll}


if __name__ == "__main__":
    main()
