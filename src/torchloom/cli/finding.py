"""One line of the report of `torchloom doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple


class CheckFinding(NamedTuple):
    """One line of the report."""

    state: Literal["ok", "note", "FAIL"]
    about: str
    what: str
    cure: str = ""
