"""Limits on compiling, for tests: no recompile, no graph break."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchloom.errors import ExpectationError
from torchloom.inspect.api.watch import Watch
from torchloom.records import Entry, Function, Session
from torchloom.records.eager import eager_calls, given_up


@contextmanager
def expect(
    *,
    recompiles: int | None = None,
    graph_breaks: int | None = None,
    entries: int | None = None,
    compiles: int | None = None,
) -> Iterator[Watch]:
    """Raise when a block compiles more than it should.

    Args:
        recompiles: most entries, beyond the first of each function, that the block may compile. A
            compile because an older entry's guards failed counts even if the older one was
            compiled before the block. Calls that run eagerly over the recompile limit, and
            functions that torch gives up, are not allowed either.
        graph_breaks: most distinct places where graphs may end. Functions that torch gives up
            are not allowed either.
        entries: most entries of any one function that the block may compile.
        compiles: most compiles of any kind; 0 after a warm-up.

    Raises:
        ExpectationError: more was seen; the message says what, where and why.

    Example:
        >>> with expect(recompiles=0, graph_breaks=0):  # doctest: +SKIP
        ...     step(batch)
    """
    watch = Watch()
    with watch:
        yield watch
    record = watch.record
    problems: list[str] = []
    if recompiles is not None:
        problems += _recompiles(record, recompiles)
    if recompiles is not None or graph_breaks is not None:
        lost = given_up(record)
        problems += _listed("functions that run eagerly, as torch gave them up:", lost)
    if graph_breaks is not None:
        problems += _breaks(record, graph_breaks)
    if entries is not None:
        problems += _entries(record, entries)
    if compiles is not None:
        problems += _compiles(record, compiles)
    if problems:
        raise ExpectationError("\n".join(problems))


def _recompiles(record: Session, limit: int) -> list[str]:
    again = [
        (function, entry)
        for function in record.all_functions()
        for index, entry in enumerate(function.entries)
        if index or entry.recompiles
    ]
    refused = eager_calls(record)
    title = "calls that no entry fits, and that nothing is compiled for any more:"
    problems = _listed(title, refused)
    if len(again) > limit:
        title = f"{len(again)} recompiles, expected at most {limit}:"
        problems = _listed(title, [_why(*each) for each in again]) + problems
    return problems


def _why(function: Function, entry: Entry) -> str:
    reasons = [
        f"{r.source or 'the call'}: expected {r.expected}, got {r.actual}" for r in entry.recompiles
    ]
    return f"{function.name} ({function.file}:{function.line}), entry {entry.compile_id}: " + (
        "; ".join(reasons) or "another call was compiled"
    )


def _breaks(record: Session, limit: int) -> list[str]:
    breaks = record.breaks()
    if len(breaks) <= limit:
        return []
    title = f"{len(breaks)} graph breaks, expected at most {limit}:"
    return _listed(title, [f"{each.place}: {each.reason}" for each in breaks])


def _entries(record: Session, limit: int) -> list[str]:
    return [
        f"{function.name} has {len(function.entries)} entries, expected at most {limit}"
        for function in record.all_functions()
        if len(function.entries) > limit
    ]


def _compiles(record: Session, limit: int) -> list[str]:
    num_compiles = sum(1 for _ in record.entries())
    if num_compiles <= limit:
        return []
    names = sorted({f.name for f in record.all_functions() if f.entries})
    return [f"{num_compiles} compiles, expected at most {limit}: {', '.join(names)}"]


def _listed(title: str, lines: list[str]) -> list[str]:
    """Return a title and its indented lines; an empty list if there are no lines."""
    return [title, *(f"  {line}" for line in lines)] if lines else []
