"""The problem that is passed to every verb: the mean negative log-likelihood of the rows that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from priory.core.struct import replace
from priory.fed.shard import Batch
from priory.models.likelihood import Gaussian
from tests.methods.problems import tiny_shards, tiny_task

TASK = tiny_task()
LOGITS = np.float32([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0], [100.0, 7.0, 1.0]])
BATCH = Batch(np.zeros((3, 5), np.float32), np.int32([0, 1, 2]), None, np.float32([1.0, 1.0, 0.0]))
value_and_slope = jax.jit(jax.value_and_grad(TASK.mean_nll))


def test_the_mean_is_over_the_rows_that_count():
    log_probs = log_softmax(LOGITS[:2].astype(np.float64), axis=1)
    expected = -(log_probs[0, 0] + log_probs[1, 1]) / 2
    assert float(value_and_slope(LOGITS, BATCH)[0]) == pytest.approx(expected, rel=1e-6)


def test_where_no_row_counts_the_mean_and_its_slope_are_zero():
    value, slope = value_and_slope(LOGITS, replace(BATCH, mask=np.zeros(3, np.float32)))
    assert float(value) == 0
    np.testing.assert_array_equal(slope, 0)


def test_known_errors_of_the_targets_are_heard():
    task = replace(TASK, likelihood=Gaussian("column"))
    batch = replace(BATCH, y=np.float32([1.0, 2.0, 0.0]), scale=np.float32([0.5, 2.0, 1.0]))
    expected = np.mean(0.5 * np.log(2 * np.pi) + np.log([0.5, 2.0]) + 0.5 * np.array([2.0, 1.0]) ** 2)
    assert float(jax.jit(task.mean_nll)(np.zeros((3, 1), np.float32), batch)) == pytest.approx(expected, rel=1e-6)


def test_the_likelihood_of_a_network_is_that_of_its_outputs():
    kept = []

    @jax.jit
    def both(key):
        batch, params = tiny_shards().of(jnp.int32(1)).padded(), TASK.init(key)
        value, stats = TASK.nll(params, batch)
        kept.append(stats is params.stats)
        return value, TASK.mean_nll(TASK.model.apply(params, batch.x)[0], batch)

    value, expected = both(jax.random.key(0))
    assert float(value) == float(expected)
    assert kept == [True]
