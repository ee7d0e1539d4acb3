"""Reads one sentence of torch about a failed guard."""

from __future__ import annotations

import re

from torchloom.inspect.wording.reasons import process, tensors, values
from torchloom.inspect.wording.reasons.base import Reason
from torchloom.inspect.wording.reasons.fixes import SIZES_FIX
from torchloom.inspect.wording.scrub import without_addresses, without_tensors_of_floats

_TAIL = re.compile(r"[. ]*(?:Guard failed on a parameter, consider .*|\(HINT: [^()]*\)\s*)$", re.S)
"""Upstream's advice behind some sentences."""

_RULES = [*tensors.RULES, *process.RULES, *values.RULES]
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
