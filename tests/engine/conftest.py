"""A federation of six small clients, and what is to be compared between two runs of it."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import priory
from priory.data import Federation
from priory.engine import devices

NUM_CLIENTS = 6  # a multiple of the two devices
SIZES = (20, 28, 12, 40, 8, 24)  # of the training parts: several numbers of batches an epoch


@pytest.fixture(scope="session")
def arrays() -> dict[str, np.ndarray]:
    """Inputs, labels and client numbers; labels follow from the inputs, differently in each client."""
    draw = np.random.default_rng(0)
    client = np.repeat(np.arange(NUM_CLIENTS), [size * 5 // 4 for size in SIZES])
    x = draw.normal(size=(len(client), 3)).astype(np.float32)
    tilt = draw.normal(size=(NUM_CLIENTS, 3))
    y = (np.sum(x * tilt[client], axis=1) > 0).astype(int)
    return {"x": x, "y": y, "client": client}


@pytest.fixture(scope="session")
def federation(arrays: dict[str, np.ndarray]) -> Federation:
    """Six clients, two classes, three features."""
    return priory.data.from_arrays(**arrays, test=0.2, seed=0)


@pytest.fixture(scope="session")
def simulate(federation: Federation) -> Callable[..., Any]:
    """A short run whose defaults are shared, so that most tests compile the same rounds."""

    def run(method: Any = None, data: Federation | None = None, **options: Any) -> Any:
        chosen = {"model": "linear", "rounds": 4, "cohort": 3, "seed": 0, "eval_every": 0} | options
        return priory.simulate(method or priory.Ditto(), data or federation, **chosen)

    return run


@pytest.fixture(scope="session")
def state() -> Callable[[Any], dict[str, np.ndarray]]:
    """All that a run keeps, by name: server and clients' records."""

    def read(run: Any) -> dict[str, np.ndarray]:
        session, mesh = run.session, run.session.plan.mesh
        num = run.federation.num_clients
        rows = np.resize(np.arange(num), -(-num // mesh.size) * mesh.size)
        records = devices.to_host(session.home.take(rows, run.completed), mesh)
        records = jax.tree.map(lambda leaf: leaf[:num], records)
        # What a client that never joined has in its place is nobody's business.
        records = jax.tree.map(
            lambda leaf: np.where(records.joined.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0), records
        )
        named, _ = jax.tree_util.tree_flatten_with_path({"server": run.server, "records": records})
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}

    return read


@pytest.fixture(scope="session")
def assert_same_bits(state: Callable[[Any], dict[str, np.ndarray]]) -> Callable[[Any, Any], None]:
    """Raises unless two runs hold the same bits."""

    def check(one: Any, other: Any) -> None:
        first, second = state(one), state(other)
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name].view(np.uint8), second[name].view(np.uint8), err_msg=name)

    return check


@pytest.fixture(scope="session")
def assert_close(state: Callable[[Any], dict[str, np.ndarray]]) -> Callable[..., None]:
    """Raises unless two runs hold the same numbers but for rounding."""

    def check(one: Any, other: Any, atol: float = 1e-5) -> None:
        first, second = state(one), state(other)
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_allclose(first[name], second[name], atol=atol, rtol=1e-5, err_msg=name)

    return check
