"""Toy data whose inputs are their own row numbers, so that a split can be read off the pool."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from priory.data import Dataset, Federation, load
from priory.data.arrays import dataset

Make = Callable[..., Dataset]
Ids = Callable[..., list[int]]


@pytest.fixture
def numbered() -> Make:
    """A maker of data sets whose x is the row number and whose classes cycle."""

    def make(rows: int = 120, classes: int = 4, **columns: object) -> Dataset:
        y = np.arange(rows) % classes
        return dataset(np.arange(rows, dtype=np.float32)[:, None], y, task="classification", **columns)

    return make


@pytest.fixture
def ids() -> Ids:
    """The row numbers of one part of one client, sorted; of every client when none is named."""

    def read(federation: Federation, part: str, client: int | str | None = None) -> list[int]:
        clients = range(len(federation.clients)) if client is None else [client]
        rows = [federation.x[federation.rows(each, part)].ravel() for each in clients]
        return sorted(np.concatenate(rows).astype(int).tolist())

    return read


@pytest.fixture
def official() -> Callable[..., Dataset]:
    """A maker of uint8 images with an official test part; the pixels carry the class."""

    def make(rows: int = 600, classes: int = 10, test: int = 200) -> Dataset:
        y = np.arange(rows + test) % classes
        x = np.random.default_rng(0).integers(0, 20, size=(rows + test, 4, 4, 1)) + 20 * y[:, None, None, None]
        made = dataset(x.astype(np.uint8), y)
        return replace(made, official_test=np.arange(rows + test) >= rows)

    return make


@pytest.fixture(scope="session")
def whole(data_dir) -> Callable[[str], Dataset]:
    """A reader of real data sets, which are large, so that each is read once."""
    del data_dir
    return cache(load)
