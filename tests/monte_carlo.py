"""What tests with random draws share."""

import math

import numpy as np


def assert_mean(draws, value, standard_errors=5.0):
    """The mean over axis 0 is the value but for Monte-Carlo error."""
    error = np.std(draws, axis=0) / math.sqrt(len(draws))
    assert np.all(np.abs(np.mean(draws, axis=0) - value) < standard_errors * error + 1e-12)
