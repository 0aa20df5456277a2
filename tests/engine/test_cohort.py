"""Who takes part: distinct, uniform, cheap, and dealt out evenly."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from priory.core.errors import UsageError
from priory.engine.cohort import Participation, Slots, deal, subset
from tests.methods.verbs import on_host


def subsets(num: int, size: int, draws: int) -> np.ndarray:
    """Independent subsets, (draws, size)."""
    return np.asarray(_subsets(jax.random.key(0), num, size, draws))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _subsets(key: Any, num: int, size: int, draws: int) -> Any:
    return jax.vmap(lambda key: subset(key, num, size))(jax.random.split(key, draws))


@partial(jax.jit, static_argnames="participation")
def drawn_by(participation: Participation, key: Any) -> Slots:
    """The places of a round, or with several keys of as many rounds."""
    return participation.draw(key) if key.ndim == 0 else jax.vmap(participation.draw)(key)


dealt_out = jax.jit(deal, static_argnums=(2, 3))


def assert_uniform(counts: np.ndarray, errors: float = 4.0) -> None:
    """χ² within so many of its standard deviations, √(2 · freedom), of its mean."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    statistic = np.sum((counts - expected) ** 2) / expected
    assert abs(statistic - freedom) < errors * np.sqrt(2 * freedom)


@pytest.mark.parametrize(("num", "size"), [(1, 1), (5, 5), (20, 3), (100, 12), (1000, 30)])
def test_a_subset_is_distinct_and_in_range(num, size):
    drawn = subsets(num, size, 50)
    assert drawn.shape == (50, size)
    assert drawn.min() >= 0
    assert drawn.max() < num
    assert all(len(set(row)) == size for row in drawn.tolist())


@pytest.mark.parametrize(("num", "size"), [(12, 5), (25, 3)], ids=["shuffled", "floyd"])
@pytest.mark.parametrize("place", [0, -1])
def test_each_place_of_a_subset_holds_every_client_equally_often(num, size, place):
    assert_uniform(np.bincount(subsets(num, size, 5000)[:, place], minlength=num))


def test_every_ordered_pair_that_starts_a_subset_is_equally_likely():
    num = 17
    drawn = subsets(num, 2, 20_000)
    counts = np.bincount(drawn[:, 0] * num + drawn[:, 1], minlength=num * num).reshape(num, num)
    assert_uniform(counts[~np.eye(num, dtype=bool)])


def test_drawing_from_a_million_clients_makes_no_array_of_a_million():
    num = 10**6
    participation = Participation(num, 10, 10)

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size"))
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    traced = jax.make_jaxpr(participation.draw)(jax.random.key(0))
    assert max(sizes(traced.jaxpr)) <= 100


@pytest.mark.parametrize(("num", "cohort"), [(1000, 30), (40, 10), (6, 6)])
def test_bernoulli_cohorts_have_the_binomial_mean_and_variance(num, cohort):
    draws = 4000
    participation = Participation(num, cohort, cohort, "bernoulli")
    slots = on_host(drawn_by(participation, jax.random.split(jax.random.key(1), draws)))
    sizes = slots.filled.sum(axis=1)
    variance = cohort * (1 - cohort / num)
    assert abs(sizes.mean() - cohort) <= 4 * np.sqrt(variance / draws)
    # The sample variance of a nearly normal count has standard error variance · √(2 / draws).
    assert abs(sizes.var() - variance) <= 4 * variance * np.sqrt(2 / draws)
    np.testing.assert_array_equal(slots.filled, slots.uploads)


def test_a_bernoulli_client_takes_part_with_the_same_probability_wherever_it_is():
    participation = Participation(40, 10, 10, "bernoulli")
    slots = on_host(drawn_by(participation, jax.random.split(jax.random.key(2), 4000)))
    assert_uniform(np.bincount(slots.ids[slots.filled], minlength=40))


def test_all_active_clients_run_and_only_the_cohort_uploads():
    slots = on_host(drawn_by(Participation(9, 2, 5), jax.random.key(0)))
    assert len(set(slots.ids.tolist())) == 5
    assert slots.filled.all()
    assert int(slots.uploads.sum()) == 2


@pytest.mark.parametrize("hands", [1, 2, 3])
def test_dealing_permutes_the_slots_and_adds_empty_ones(hands):
    drawn = on_host(drawn_by(Participation(30, 4, 7), jax.random.key(3)))
    dealt = on_host(dealt_out(drawn, np.arange(30, dtype=np.int32) % 11, 12, hands))
    kept = np.flatnonzero(dealt.filled)
    before = sorted(zip(drawn.ids.tolist(), drawn.uploads.tolist(), strict=True))
    after = sorted(zip(dealt.ids[kept].tolist(), dealt.uploads[kept].tolist(), strict=True))
    assert before == after
    assert not dealt.uploads[~dealt.filled].any()


def test_dealing_gives_every_device_as_many_clients_and_like_amounts_of_work():
    num, hands = 16, 2
    size = np.random.default_rng(0).integers(1, 100, num, dtype=np.int32)
    slots = Slots(np.arange(num, dtype=np.int32), np.full(num, True), np.full(num, True))
    work = size[np.asarray(dealt_out(slots, size, num, hands).ids)].reshape(hands, -1)
    assert (np.diff(work, axis=1) <= 0).all()  # large clients first
    assert abs(np.diff(work.sum(axis=1))[0]) <= int(size.max())


def test_empty_places_are_shared_out_too():
    slots = Slots(np.arange(5, dtype=np.int32), np.full(5, True), np.full(5, True))
    filled = np.asarray(dealt_out(slots, np.ones(5, np.int32), 8, 2).filled)
    assert sorted(filled.reshape(2, 4).sum(axis=1).tolist()) == [2, 3]


@pytest.mark.parametrize(
    ("participation", "sentence"),
    [
        (Participation(10, 0, 0), r"cohort=0 does not fit the 10 clients.*choose 1 to 10"),
        (Participation(10, 11, 11), r"cohort=11 does not fit the 10 clients.*choose 1 to 10"),
        (Participation(10, 3, 12), r"active=12 does not fit the 10 clients"),
        (Participation(10, 3, 2), r"active=2 is smaller than cohort=3"),
        (Participation(10, 3, 5, "bernoulli"), r"active=5 needs fixed participation"),
    ],
)
def test_a_cohort_that_cannot_be_filled_is_refused_in_a_sentence(participation, sentence):
    with pytest.raises(UsageError, match=sentence):
        participation.check()
