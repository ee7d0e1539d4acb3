"""All cases, by what goes wrong. A name is `family.what [transport compiler stage]`."""

from __future__ import annotations

from collections.abc import Sequence

from faults.matrix.case import Case
from faults.matrix.cases import (
    compilers,
    differing,
    failing,
    files,
    network,
    numbers,
    right,
    starting,
)

_FAMILIES = (right, differing, failing, starting, compilers, numbers, files, network)

CASES: tuple[Case, ...] = tuple(case for family in _FAMILIES for case in family.CASES)


def chosen(texts: Sequence[str] = (), cases: Sequence[Case] = CASES) -> list[Case]:
    """Return the cases whose names contain one of the texts (none: all), and those whose weights they
    are compared with."""
    named = [case for case in cases if not texts or any(text in case.name for text in texts)]
    needed = {case.trains_like for case in named}
    return [case for case in cases if case in named or case.name in needed]
