"""What runs left, to be read by people: tables for the terminal, and an HTML report."""

from priory.report.page import check_drawing, write
from priory.report.tables import (
    architectures_table,
    compare,
    comparison_tables,
    console,
    datasets_table,
    methods_table,
    plain_table,
    run_lines,
    run_table,
    say,
    score_line,
    sources_table,
    tuning_table,
    value_at,
    ways_table,
)

__all__ = [
    "architectures_table",
    "check_drawing",
    "compare",
    "comparison_tables",
    "console",
    "datasets_table",
    "methods_table",
    "plain_table",
    "run_lines",
    "run_table",
    "say",
    "score_line",
    "sources_table",
    "tuning_table",
    "value_at",
    "ways_table",
    "write",
]
