"""Calls and functions that ran eagerly instead of compiled, which recompiles and breaks do not show."""

from __future__ import annotations

from torchloom.records.model import Function, Session


def eager_reason(function: Function | None) -> str:
    """Return why a function, or calls of it, ran eagerly; empty if nothing was lost.

    A function without anything to compile loses nothing.
    """
    if function is None:
        return ""
    if function.num_eager_calls or function.entries or _has_failed(function):
        return function.skipped or ""
    return ""


def eager_calls(session: Session) -> list[str]:
    """Return a line for each function with calls that fitted no entry and ran eagerly."""
    lines = [
        f"{function.name} ({function.file}:{function.line}): {function.skipped}"
        for function in session.all_functions()
        if function.num_eager_calls
    ]
    if session.num_unknown_eager_calls:
        lines.append(f"{session.num_unknown_eager_calls} of functions that could not be told")
    return lines


def given_up(session: Session) -> list[str]:
    """Return a line for each function that torch does not compile, where no graph break says so."""
    return [
        f"{function.name} ({function.file}:{function.line}): {function.skipped}"
        for function in session.all_functions()
        if eager_reason(function) and not function.num_eager_calls and not function.breaks
    ]


def _has_failed(function: Function) -> bool:
    return (function.skipped or "").startswith("failed")
