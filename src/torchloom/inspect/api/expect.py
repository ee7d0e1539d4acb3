"""Promises about compiling, for tests: no recompile, no graph break."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchloom.errors import ExpectationError
from torchloom.inspect.api.watch import Watch
from torchloom.records import Session
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
    problems = _problems(watch.record, recompiles, graph_breaks, entries, compiles)
    if problems:
        raise ExpectationError("\n".join(problems))


def _problems(
    record: Session,
    recompiles: int | None,
    graph_breaks: int | None,
    entries: int | None,
    compiles: int | None,
) -> list[str]:
    problems: list[str] = []
    again = [
        (function, entry)
        for function in record.all_functions()
        for index, entry in enumerate(function.entries)
        if index or entry.recompiles
    ]
    if recompiles is not None and len(again) > recompiles:
        problems.append(f"{len(again)} recompiles, expected at most {recompiles}:")
        for function, entry in again:
            reasons = [
                f"{r.source or 'the call'}: expected {r.expected}, got {r.actual}"
                for r in entry.recompiles
            ]
            problems.append(
                f"  {function.name} ({function.file}:{function.line}), entry {entry.compile_id}: "
                + ("; ".join(reasons) or "another call was compiled")
            )
    refused = eager_calls(record)
    if recompiles is not None and refused:
        problems.append("calls that no entry fits, and that nothing is compiled for any more:")
        problems += [f"  {each}" for each in refused]
    lost = given_up(record)
    if lost and (recompiles is not None or graph_breaks is not None):
        problems.append("functions that run eagerly, as torch gave them up:")
        problems += [f"  {each}" for each in lost]
    breaks = record.breaks()
    if graph_breaks is not None and len(breaks) > graph_breaks:
        problems.append(f"{len(breaks)} graph breaks, expected at most {graph_breaks}:")
        problems += [f"  {each.place}: {each.reason}" for each in breaks]
    if entries is not None:
        for function in record.all_functions():
            if len(function.entries) > entries:
                problems.append(
                    f"{function.name} has {len(function.entries)} entries, expected at most {entries}"
                )
    num_compiles = sum(1 for _ in record.entries())
    if compiles is not None and num_compiles > compiles:
        names = sorted({f.name for f in record.all_functions() if f.entries})
        problems.append(f"{num_compiles} compiles, expected at most {compiles}: {', '.join(names)}")
    return problems
