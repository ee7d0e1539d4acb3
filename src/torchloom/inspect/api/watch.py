"""Watches: `torchloom.watch()` collects what torch.compile does in a block; `explain` and `expect` judge one.

A watch resets, recompiles and replaces nothing. When the block ends, also by an exception, all handlers and
hooks are removed. The record keeps text and numbers, no tensor and no module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchloom.errors import ExpectationError, InspectError
from torchloom.inspect.collected import Collected
from torchloom.inspect.listen.collector import Collector, quietly
from torchloom.inspect.live.target import target_of, twin_of
from torchloom.inspect.record.session import build_session, describe_process
from torchloom.log import get_logger
from torchloom.records import Break, Entry, Function, Session, save_record
from torchloom.records.model import eager_calls, given_up

logger = get_logger(__name__)


class Watch:
    """What `watch()` gives: open it with `with`, read `record` afterwards.

    Args:
        path: as for `watch`.

    Example:
        >>> with watch() as w:  # doctest: +SKIP
        ...     model(batch)
        >>> print(w.summary())  # doctest: +SKIP
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._record: Session | None = None
        self._collector: Collector | None = None
        self.num_lookups = 0
        """How often Dynamo looked for an entry, including calls of functions that were compiled before the block."""

    def __enter__(self) -> Watch:  # noqa: PYI034  Self needs Python 3.11
        if self._collector is not None:
            raise InspectError("this watch is open already: make another one with watch()")
        collector = Collector()
        collector.open()
        self._collector, self._record = collector, None
        return self

    def __exit__(self, *exc: object) -> None:
        collector, self._collector = self._collector, None
        if collector is None:
            return
        collected = collector.close()
        self.num_lookups = collected.num_lookups
        self._record = _recorded(collected)
        if self._path is not None:
            _save(self._record, self._path)

    @property
    def record(self) -> Session:
        """The record of the block.

        Raises:
            InspectError: the block has not ended.
        """
        if self._record is None:
            raise InspectError("the record is made when the `with` block ends: read it after that")
        return self._record

    def __getitem__(self, name: str) -> Function:
        """Return the record of one function.

        Raises:
            InspectError: the block has not ended.
            KeyError: nothing of this name was compiled, or several functions share it.
        """
        return self.record[name]

    def summary(self) -> str:
        """Return the record on one screen of text.

        Raises:
            InspectError: the block has not ended.
        """
        from torchloom.records.summary import summary

        return summary(self.record)

    def to_json(self, path: str | Path) -> Path:
        """Write the record; see `torchloom.records.save_record`.

        Raises:
            InspectError: the block has not ended.
            OSError: the file cannot be written.
        """
        return save_record(self.record, path)


def watch(path: str | Path | None = None) -> Watch:
    """Collect everything that torch.compile does in a `with` block.

    Records entries, guards, graphs at every stage, kernels, graph breaks, reasons of recompiles, phase
    times, cache hits and misses, hits per entry, and torchloom's own events. Blocks may nest.

    Args:
        path: write the record here at the end: a .json file, or a folder; with several ranks each
            writes its own, `record-rank0.json` and so on.

    Example:
        >>> with watch("runs/record.json") as w:  # doctest: +SKIP
        ...     compiled(batch)
        >>> len(w.record.functions)  # doctest: +SKIP
        1
    """
    return Watch(path)


def _recorded(collected: Collected) -> Session:
    started = time.perf_counter()
    try:
        session = build_session(collected)
    except Exception as error:  # any bug of ours: what is watched must not fail for its watcher
        logger.warning("the record could not be made: %s", type(error).__name__, exc_info=True)
        session = Session(orphans=[f"the record could not be made: {type(error).__name__}"])
    session.started_at_s, session.duration_s = collected.started_at_s, collected.duration_s
    quietly(describe_process)(session)
    session.overhead["tap_ms"] = collected.listening_ms
    session.overhead["build_ms"] = (time.perf_counter() - started) * 1e3
    for what, number in collected.num_dropped.items():
        session.overhead[f"{what}_dropped"] = number
    return session


def _save(session: Session, path: Path) -> None:
    if path.is_dir() or not path.suffix:
        path = path / "record.json"
    if session.world_size > 1:
        path = path.with_name(f"{path.stem}-rank{session.rank}{path.suffix}")
    try:
        save_record(session, path)
    except Exception as error:  # noqa: BLE001  the block's work is done and must not be lost for a record
        logger.warning("the record could not be written to %s: %s", path, error)


class Explanation(NamedTuple):
    """Counts and reasons for one call."""

    num_graphs: int
    num_breaks: int
    num_guards: int
    breaks: tuple[Break, ...]
    record: Session

    def __str__(self) -> str:
        from torchloom.records.summary import summary

        return summary(self.record)


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Compile and run a function once, and report what was captured.

    Compiles a copy of the function with a backend that keeps the graphs: the entries that torch.compile
    holds for `fn` stay, and nothing is reset. Counts the graphs that the backend received, and the
    distinct places where a graph ended.

    Args:
        fn: a function, a module, or what torch.compile returned.
        args: as for a call of `fn`. The function runs, effects included.
        kwargs: as for a call of `fn`.

    Raises:
        InspectError: there is no Python function behind `fn`.

    Example:
        >>> explain(lambda x: x + 1, torch.ones(2)).num_breaks
        0
    """
    target = target_of(fn)
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    # Dynamo keeps entries by code object: one of its own keeps the function's entries out of this.
    twin = twin_of(target.fn)
    with Watch() as watch:
        torch.compile(twin, backend=keep)(*target.leading, *args, **{**target.keywords, **kwargs})
    record = watch.record
    breaks = tuple(record.breaks())
    return Explanation(
        num_graphs=len(graphs),
        num_breaks=len(breaks),
        num_guards=sum(len(entry.guards) for entry in record.entries()),
        breaks=breaks,
        record=record,
    )


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
    again = [
        _why(function, entry)
        for function in functions
        for index, entry in enumerate(function.entries)
        if index or entry.recompiles
    ]
    breaks = [f"{each.place}: {each.reason}" for each in record.breaks()]
    compiled = [f"{f.name}, entry {e.compile_id}" for f in functions for e in f.entries]
    problems = _over(again, recompiles, "recompiles")
    if recompiles is not None:
        title = "calls that no entry fits, and that nothing is compiled for any more:"
        problems += _listed(title, eager_calls(record))
    if recompiles is not None or graph_breaks is not None:
        title = "functions that run eagerly, as torch gave them up:"
        problems += _listed(title, given_up(record))
    problems += _over(breaks, graph_breaks, "graph breaks")
    problems += [
        f"{function.name} has {len(function.entries)} entries, expected at most {entries}"
        for function in functions
        if entries is not None and len(function.entries) > entries
    ]
    problems += _over(compiled, compiles, "compiles")
    if problems:
        raise ExpectationError("\n".join(problems))


def _why(function: Function, entry: Entry) -> str:
    reasons = "; ".join(each.sentence for each in entry.recompiles)
    where = f"{function.name} ({function.file}:{function.line}), entry {entry.compile_id}"
    return f"{where}: {reasons or 'another call was compiled'}"


def _over(found: list[str], limit: int | None, what: str) -> list[str]:
    title = f"{len(found)} {what}, expected at most {limit}:"
    return _listed(title, found) if limit is not None and len(found) > limit else []


def _listed(title: str, lines: list[str]) -> list[str]:
    """Return a title and its indented lines; an empty list if there are no lines."""
    return [title, *(f"  {line}" for line in lines)] if lines else []
