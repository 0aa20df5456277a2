"""Docstrings as Markdown: columns that spaces hold together stay columns, and sessions stay sessions."""

import re
from typing import Any

import griffe

COLUMNS = re.compile(r"\S {2,}\S")
STARRED = re.compile(r"(?<=[Α-Ωα-ω])\*")  # Σ* is a name; two of them would be emphasis


class AsTyped(griffe.Extension):
    """Markdown would run such lines together; as a block of code they stay as they were typed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the paragraphs of a docstring that mean something else in Markdown."""
        del kwargs
        if obj.docstring is not None:
            paragraphs = re.split(r"\n\s*\n", obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(_as_typed, paragraphs))


def _as_typed(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if paragraph.startswith(" "):
        return paragraph
    if paragraph.startswith(">>>"):
        return "\n".join(["```pycon", *lines, "```"])
    if len(lines) > 1 and COLUMNS.search(paragraph):
        return "\n".join("    " + line for line in lines)
    return STARRED.sub(r"\\*", paragraph)
