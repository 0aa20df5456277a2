"""The command line `priory`."""

from priory.cli.app import main

__all__ = ["main"]
