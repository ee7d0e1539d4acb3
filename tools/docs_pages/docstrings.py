"""Docstrings in Google's form, taken apart."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Example|Examples):$")
_ARGUMENT = re.compile(r"^ {4}\*{0,2}(\w+): (.*)$")


class Docstring(NamedTuple):
    """A docstring's parts."""

    summary: str
    """Its first paragraph, as one line."""
    text: str
    """What follows up to the first section; indented blocks are fenced."""
    arguments: dict[str, str]
    """What `Args:` says, by name."""


def parse(docstring: str | None) -> Docstring:
    """Take a docstring apart."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    sections = [at for at, line in enumerate(lines) if SECTION.match(line)] + [len(lines)]
    head = "\n".join(lines[: sections[0]])
    summary, _, text = head.partition("\n\n")
    arguments = {}
    for start, end in pairwise(sections):
        if lines[start] == "Args:":
            arguments = dict(_arguments(lines[start + 1 : end]))
    return Docstring(" ".join(summary.split()), fenced(text.strip("\n")), arguments)


def fenced(text: str) -> str:
    """Return text whose blocks that are indented by four spaces stand between fences."""
    paragraphs = re.split(r"\n\n(?=\S)|(?<=\S)\n\n(?= {4})", text)
    return "\n\n".join(
        f"```text\n{inspect.cleandoc(each)}\n```" if each.startswith("    ") else each
        for each in paragraphs
        if each.strip()
    )


def _arguments(lines: list[str]) -> Iterator[tuple[str, str]]:
    name, words = "", []
    for line in lines:
        begins = _ARGUMENT.match(line)
        if begins:
            if name:
                yield name, " ".join(words)
            name, words = begins[1], [begins[2].strip()]
        elif line.strip():
            words.append(line.strip())
    if name:
        yield name, " ".join(words)
