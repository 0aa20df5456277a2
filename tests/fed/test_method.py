"""The problem that is passed to every verb: the mean negative log-likelihood of the rows that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core.struct import replace
from priory.fed.shard import Batch
from priory.models.likelihood import Gaussian
from tests.methods.problems import tiny_shards, tiny_task

TASK = tiny_task()
LOGITS = jnp.array([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0], [100.0, 7.0, 1.0]])
BATCH = Batch(jnp.zeros((3, 5)), jnp.array([0, 1, 2]), None, jnp.array([1.0, 1.0, 0.0]))


def test_the_mean_is_over_the_rows_that_count():
    log_probs = jax.nn.log_softmax(LOGITS[:2])
    expected = -(log_probs[0, 0] + log_probs[1, 1]) / 2
    assert float(TASK.mean_nll(LOGITS, BATCH)) == pytest.approx(float(expected), rel=1e-6)


def test_where_no_row_counts_the_mean_and_its_slope_are_zero():
    nobody = replace(BATCH, mask=jnp.zeros(3))
    value, slope = jax.value_and_grad(TASK.mean_nll)(LOGITS, nobody)
    assert float(value) == 0
    np.testing.assert_array_equal(slope, 0)


def test_known_errors_of_the_targets_are_heard():
    task = replace(TASK, likelihood=Gaussian("column"))
    batch = replace(BATCH, y=jnp.array([1.0, 2.0, 0.0]), scale=jnp.array([0.5, 2.0, 1.0]))
    expected = np.mean(0.5 * np.log(2 * np.pi) + np.log([0.5, 2.0]) + 0.5 * np.array([2.0, 1.0]) ** 2)
    assert float(task.mean_nll(jnp.zeros((3, 1)), batch)) == pytest.approx(expected, rel=1e-6)


def test_the_likelihood_of_a_network_is_that_of_its_outputs():
    batch, params = tiny_shards().of(jnp.int32(1)).padded(), TASK.init(jax.random.key(0))
    value, stats = TASK.nll(params, batch)
    assert float(value) == float(TASK.mean_nll(TASK.model.apply(params, batch.x)[0], batch))
    assert stats is params.stats
