"""`torchloom.watch()`: collect everything that torch.compile does in a block.

A watch resets, recompiles and replaces nothing. When the block ends, also by an exception, all handlers and
hooks are removed. The record keeps text and numbers, no tensor and no module.
"""

from __future__ import annotations

import time
from pathlib import Path

from torchloom.errors import InspectError
from torchloom.inspect.collected import Collected
from torchloom.inspect.listen.collector import Collector, quietly
from torchloom.inspect.record.session import build_session, describe_process
from torchloom.log import get_logger
from torchloom.records import Function, Session, save_record

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
