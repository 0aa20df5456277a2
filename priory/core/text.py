"""Text from data and files, which may be hostile, where people and spreadsheets read it.

A name that holds a terminal's escape sequence could hide or forge output, one with a bidirectional override could show
another name, and a spreadsheet takes a cell that begins with = for a formula.
"""

import re

__all__ = ["one_line", "printable", "spreadsheet_cell"]

# Control characters, surrogates, line and paragraph separators, and what changes the direction of text.
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
HIDDEN_BUT_LAYOUT = re.compile(HIDDEN.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four are full-width
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|infinity|nan)", re.IGNORECASE | re.ASCII)


def printable(text: str) -> str:
    r"""Return a text for a terminal or a page: control characters as escapes, except newlines and tabs.

    >>> print(printable("evil\x1b[2J"))
    evil\x1b[2J
    """
    return HIDDEN_BUT_LAYOUT.sub(_escape, text)


def one_line(name: str) -> str:
    r"""Return a name that cannot leave its line or cell: control characters, newlines and tabs as escapes."""
    return HIDDEN.sub(_escape, name)


def spreadsheet_cell(value: str) -> str:
    """Return a cell of a CSV file; a text that a spreadsheet would take for a formula gets an apostrophe in front.

    >>> spreadsheet_cell("=1+2"), spreadsheet_cell("-1"), spreadsheet_cell("+3.5e2")
    ("'=1+2", '-1', '+3.5e2')
    """
    return f"'{value}" if value.startswith(FORMULA) and not NUMBER.fullmatch(value) else value


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode()
