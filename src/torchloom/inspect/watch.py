"""`torchloom.watch()`: collect everything that torch.compile does in a block.

Nothing is reset, recompiled or replaced; when the block ends every handler and hook is gone, also
after an exception. What is kept is text: no tensor, no module.
"""

from __future__ import annotations

import platform
import time
from contextlib import ExitStack
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch
import torch.distributed as dist

import torchloom
from torchloom import envs, events
from torchloom._torch import introspect
from torchloom.errors import InspectError
from torchloom.inspect.build import build_session
from torchloom.inspect.hits import HitCounter
from torchloom.inspect.tap import TraceTap
from torchloom.log import get_logger
from torchloom.records import Function, Session, save_record

logger = get_logger(__name__)


_MAX_EVENTS = 100_000
"""Each step of training tells some tens: a watch left open for days must not grow for days."""


class Compiled(NamedTuple):
    """One rewriting of a code object by Dynamo."""

    compile_id: str
    original: CodeType
    transformed: CodeType
    row: int
    """How many rows the tap held when it was made: places it among them."""


class Watch:
    """What `watch()` gives: open it with `with`, read `record` afterwards.

    Example:
        >>> with watch() as w:  # doctest: +SKIP
        ...     model(batch)
        >>> print(w.summary())  # doctest: +SKIP
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._record: Session | None = None
        self._stack: ExitStack | None = None

    def __enter__(self) -> Watch:  # noqa: PYI034
        if self._stack is not None:
            raise InspectError("this watch is open already: make another one with watch()")
        self._tap = TraceTap()
        self._recorder = events.Recorder(limit=_MAX_EVENTS)
        self._compiled: list[Compiled] = []
        self._hits = HitCounter()
        self._started_at_s, self._started = time.time(), time.perf_counter()
        with ExitStack() as stack:
            stack.callback(self._hits.close)
            stack.enter_context(self._recorder)
            stack.enter_context(introspect.bytecode_hook(self._on_bytecode))
            stack.enter_context(introspect.after_compile(self._hits.install))
            stack.enter_context(self._tap)
            self._stack = stack.pop_all()
        self._record = None
        return self

    def __exit__(self, *exc: object) -> None:
        stack, self._stack = self._stack, None
        if stack is None:
            return
        duration_s = time.perf_counter() - self._started
        counts = self._hits.counts()
        stack.close()
        started = time.perf_counter()
        self._record = build_session(self._tap.rows, self._compiled, counts, self._recorder.events)
        self._describe(self._record, duration_s)
        self._record.overhead["tap_ms"] = self._tap.spent_s * 1e3
        self._record.overhead["build_ms"] = (time.perf_counter() - started) * 1e3
        for what, dropped in (("events", self._recorder), ("texts", self._tap)):
            if dropped.num_dropped:
                self._record.overhead[f"{what}_dropped"] = dropped.num_dropped
        self._compiled, self._tap.rows = [], []
        if self._path is not None:
            self._save(self._record)

    def _on_bytecode(self, original: CodeType, transformed: CodeType) -> None:
        compile_id = introspect.current_compile_id() or "?"
        self._hits.install()  # torch._dynamo.reset() drops what was to run after compiles
        self._compiled.append(Compiled(compile_id, original, transformed, len(self._tap.rows)))
        self._hits.expect(compile_id, transformed, introspect.compiling_globals())

    @property
    def record(self) -> Session:
        """What was seen.

        Raises:
            InspectError: the block has not ended.
        """
        if self._record is None:
            raise InspectError("the record is made when the `with` block ends: read it after that")
        return self._record

    def __getitem__(self, name: str) -> Function:
        """Return the record of one function."""
        return self.record[name]

    def summary(self) -> str:
        """Return one screen about what was seen."""
        from torchloom.records.summary import summary

        return summary(self.record)

    def to_json(self, path: str | Path) -> Path:
        """Write the record; see `torchloom.records.save_record`."""
        return save_record(self.record, path)

    def _describe(self, session: Session, duration_s: float) -> None:
        session.torchloom, session.torch = torchloom.__version__, torch.__version__
        session.python, session.platform = platform.python_version(), platform.platform()
        session.device = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        )
        if dist.is_available() and dist.is_initialized():
            session.rank, session.world_size = dist.get_rank(), dist.get_world_size()
        else:
            launch = envs.launch()
            session.rank, session.world_size = launch.rank, launch.world_size
        session.started_at_s, session.duration_s = self._started_at_s, duration_s
        session.config = introspect.config_changes()

    def _save(self, session: Session) -> None:
        assert self._path is not None
        path = self._path
        if path.is_dir() or not path.suffix:
            path = path / "record.json"
        if session.world_size > 1:
            path = path.with_name(f"{path.stem}-rank{session.rank}{path.suffix}")
        try:
            save_record(session, path)
        except OSError as error:
            # The block's own work is done and must not be lost for a record.
            logger.warning("the record could not be written to %s: %s", path, error)


def watch(path: str | Path | None = None) -> Watch:
    """Collect everything that torch.compile does in a `with` block.

    Entries, guards, graphs at every stage, kernels, graph breaks, reasons of recompiles, phase
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
