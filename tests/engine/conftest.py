"""A federation of six small clients, and what is to be compared between two runs of it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import priory
from priory.data import Federation
from priory.engine.prepared import Prepared
from tests.states import State, state_of

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
def begin(simulate: Callable[..., Any]) -> Callable[..., Any]:
    """A run that was stopped before its first round: all is checked and placed, and no round is traced or compiled."""

    def run(*args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Prepared, "rehearse", lambda _: None)
            return simulate(*args, stop=lambda: True, **options)

    return run


@pytest.fixture(scope="session")
def train(simulate: Callable[..., Any]) -> Callable[..., Any]:
    """A run that was stopped after its rounds, before the last evaluation: that is a program of its own."""

    def run(*args: Any, rounds: int = 4, **options: Any) -> Any:
        asked = iter([False] * rounds + [True])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("priory.engine.runner.LOOK_SECONDS", 0.0)  # it is asked after every round
            patch.setattr(Prepared, "_rehearse_scores", lambda *_: None)
            return simulate(*args, rounds=rounds + 1, stop=lambda: next(asked), **options)

    return run


@pytest.fixture(scope="session")
def state() -> Callable[[Any], State]:
    """All that a run keeps, by name: server and clients' records."""
    return state_of


@pytest.fixture(scope="session")
def assert_same_bits(state: Callable[[Any], State]) -> Callable[[Any, Any], None]:
    """Raises unless two runs hold the same bits."""

    def check(one: Any, other: Any) -> None:
        first, second = state(one), state(other)
        assert first.keys() == second.keys()
        for name in first:
            bits = [np.atleast_1d(leaf).view(np.uint8) for leaf in (first[name], second[name])]
            np.testing.assert_array_equal(*bits, err_msg=name)

    return check


@pytest.fixture(scope="session")
def assert_close(state: Callable[[Any], State]) -> Callable[..., None]:
    """Raises unless two runs hold the same numbers but for rounding."""

    def check(one: Any, other: Any, atol: float = 1e-5) -> None:
        first, second = state(one), state(other)
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_allclose(first[name], second[name], atol=atol, rtol=1e-5, err_msg=name)

    return check
