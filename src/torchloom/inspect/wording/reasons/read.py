"""Reads one sentence of torch about a failed guard."""

from __future__ import annotations

import re
from typing import NamedTuple

from torchloom.inspect.wording.english import source_in_words
from torchloom.inspect.wording.reasons import tensors, values
from torchloom.inspect.wording.reasons.base import SIZES_FIX, Reason
from torchloom.inspect.wording.scrub import (
    without_addresses,
    without_tensors_of_floats,
    without_values,
)

_TAIL = re.compile(r"[. ]*(?:Guard failed on a parameter, consider .*|\(HINT: [^()]*\)\s*)$", re.S)
"""Upstream's advice behind some sentences."""

_RULES = [*tensors.RULES, *values.PROCESS_RULES, *values.RULES]
"""Values last: one of their patterns fits every comparison."""


def reason_of(text: str) -> Reason:
    """Read one sentence about a failed guard.

    Example:
        >>> reason_of("len(d) != 2").expected  # torch tells what it found
        'len 2'
    """
    body = _TAIL.sub("", text.partition("\nUser stack trace")[0].partition("  # ")[0]).strip()
    while body.startswith("(") and body.endswith(")") and body.count("(") == body.count(")"):
        inner = body[1:-1]
        if inner.find(")") < inner.find("("):
            break
        body = inner
    body = without_tensors_of_floats(body)
    for pattern, build in _RULES:
        found = pattern.fullmatch(body)
        if found:
            return build(*found.groups())
    return Reason("", without_addresses(body), "", SIZES_FIX if ".size()[" in body else "")


OTHER_BACKEND = "BACKEND_MATCH: "


class Miss(NamedTuple):
    """Why an entry does not serve a call."""

    compile_id: str
    source: str
    """The value that differs, as Dynamo writes it."""
    text: str
    """The check that failed."""
    english: str


def miss_of(compile_id: str, failure: str) -> Miss:
    """Return a failed guard in words.

    Args:
        compile_id: of the entry.
        failure: the first check that failed, in torch's words.
    """
    text = without_values(failure.partition("\nUser stack trace")[0].partition("  #")[0].strip())
    if text.startswith(OTHER_BACKEND):
        english = f"{text.removeprefix(OTHER_BACKEND)}, this call has another backend"
        return Miss(compile_id, "", text, english)
    quoted = re.match(r"tensor '(.+?)' .*mismatch", text)
    if quoted:
        source = quoted.group(1)
        english = (
            f"{source_in_words(source)}: {without_addresses(text)[len(quoted.group(1)) + 10 :]}"
        )
        return Miss(compile_id, source, text, english)
    reason = reason_of(text)
    english = reason.expected
    if reason.source or reason.actual:
        got = f", got {reason.actual}" if reason.actual else ""
        english = f"{reason.source or 'the call'}: expected {reason.expected}{got}"
    return Miss(compile_id, _source_in(text), text, english)


def _source_in(text: str) -> str:
    """Return the first source expression in the text of a failed guard."""
    start = min((i for i in (text.find("L["), text.find("G[")) if i >= 0), default=-1)
    if start < 0:
        return ""
    depth, end = 0, start
    while end < len(text):
        char = text[end]
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif depth == 0 and not (char.isalnum() or char in "._"):
            break
        end += 1
    return text[start:end]
