"""Every test of the command line runs in an empty directory."""

import pytest


@pytest.fixture(autouse=True)
def _somewhere_else(somewhere_else):
    pass
