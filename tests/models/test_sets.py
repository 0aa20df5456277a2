"""Networks on sets: what the order, the repetition and the place of the mean do not change."""

import jax
import jax.numpy as jnp
import numpy as np

from priory.models.nets import MLP
from priory.models.sets import SetNet

NET = SetNet((7, 6), 5)
WEIGHTS = NET.init(jax.random.key(0), 4)
X = jax.random.normal(jax.random.key(1), (9, 4))


def described(x):
    return NET.whole(WEIGHTS, NET.elements(WEIGHTS, x).mean(axis=0))


def test_the_mean_before_the_last_layer_is_the_mean_after_it():
    after = MLP((7, 6), 5).apply({"params": WEIGHTS}, X).mean(axis=0)
    np.testing.assert_allclose(described(X), after, rtol=1e-5, atol=1e-6)


def test_the_order_of_the_elements_does_not_matter():
    order = np.random.default_rng(0).permutation(9)
    np.testing.assert_allclose(described(X[order]), described(X), rtol=1e-5, atol=1e-6)


def test_a_set_repeated_is_the_same_set():
    np.testing.assert_allclose(described(jnp.concatenate([X, X])), described(X), rtol=1e-5, atol=1e-6)


def test_elements_are_seen_through_nonlinear_layers():
    """A mean taken before the layers instead would be another number."""
    assert not np.allclose(described(X), described(X.mean(axis=0, keepdims=True)), atol=1e-3)


def test_without_hidden_layers_the_network_is_linear_in_the_mean():
    net = SetNet((), 3)
    weights = net.init(jax.random.key(2), 4)
    np.testing.assert_array_equal(net.elements(weights, X), X)
    expected = X.mean(axis=0) @ weights["Dense_0"]["kernel"] + weights["Dense_0"]["bias"]
    np.testing.assert_allclose(net.whole(weights, X.mean(axis=0)), expected, rtol=1e-6)
