"""Limits on compiling, for tests: no recompile, no graph break."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchloom.errors import ExpectationError
from torchloom.inspect.api.watch import Watch
from torchloom.records import Entry, Function
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
    with Watch() as watch:
        yield watch
    record = watch.record
    functions = list(record.all_functions())
    problems: list[str] = []
    if recompiles is not None:
        again = [
            _why(function, entry)
            for function in functions
            for index, entry in enumerate(function.entries)
            if index or entry.recompiles
        ]
        title = "calls that no entry fits, and that nothing is compiled for any more:"
        problems += _over(again, recompiles, "recompiles")
        problems += _listed(title, eager_calls(record))
    if recompiles is not None or graph_breaks is not None:
        title = "functions that run eagerly, as torch gave them up:"
        problems += _listed(title, given_up(record))
    if graph_breaks is not None:
        breaks = [f"{each.place}: {each.reason}" for each in record.breaks()]
        problems += _over(breaks, graph_breaks, "graph breaks")
    if entries is not None:
        problems += [
            f"{function.name} has {len(function.entries)} entries, expected at most {entries}"
            for function in functions
            if len(function.entries) > entries
        ]
    if compiles is not None:
        compiled = [f"{f.name}, entry {e.compile_id}" for f in functions for e in f.entries]
        problems += _over(compiled, compiles, "compiles")
    if problems:
        raise ExpectationError("\n".join(problems))


def _why(function: Function, entry: Entry) -> str:
    reasons = [
        f"{r.source or 'the call'}: expected {r.expected}, got {r.actual}" for r in entry.recompiles
    ]
    return f"{function.name} ({function.file}:{function.line}), entry {entry.compile_id}: " + (
        "; ".join(reasons) or "another call was compiled"
    )


def _over(found: list[str], limit: int, what: str) -> list[str]:
    title = f"{len(found)} {what}, expected at most {limit}:"
    return _listed(title, found) if len(found) > limit else []


def _listed(title: str, lines: list[str]) -> list[str]:
    """Return a title and its indented lines; an empty list if there are no lines."""
    return [title, *(f"  {line}" for line in lines)] if lines else []
