"""Pytrees, keys and errors; knows no probability and no federation."""
