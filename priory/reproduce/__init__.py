"""Published tables again: definitions in `tables/`, runs kept as cells, and pages made of them."""

from priory.reproduce.cells import Cell, Federations
from priory.reproduce.definition import Definition, names, read

__all__ = ["Cell", "Definition", "Federations", "names", "read"]
