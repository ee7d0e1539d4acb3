"""`torchloom.watch()`: collect everything that torch.compile does in a block.

Nothing is reset, recompiled or replaced; when the block ends every handler and hook is gone, also
after an exception. What is kept is text: no tensor, no module.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import CodeType

import torch
import torch.distributed as dist

import torchloom
from torchloom import envs, events
from torchloom._torch import compiling, introspect
from torchloom.errors import InspectError
from torchloom.inspect.heard import Compiled
from torchloom.inspect.listen.eager_calls import EagerCalls
from torchloom.inspect.listen.hit_counter import HitCounter
from torchloom.inspect.listen.hooks import caller_of_lookup, quietly
from torchloom.inspect.listen.trace import TraceTap
from torchloom.inspect.live.rewritten import continuations
from torchloom.inspect.live.target import named
from torchloom.inspect.record.session import build_session
from torchloom.log import get_logger
from torchloom.records import Function, Session, save_record

logger = get_logger(__name__)


_MAX_EVENTS = 100_000
"""Each step of training tells some tens: a watch left open for days must not grow for days."""


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
        self.num_lookups = 0
        """How often Dynamo looked for an entry in the block: calls of what was compiled before as well."""

    def __enter__(self) -> Watch:  # noqa: PYI034
        if self._stack is not None:
            raise InspectError("this watch is open already: make another one with watch()")
        self._num_resets = 0
        self._eager, self._hits = EagerCalls(self._epoch), HitCounter()
        self._tap = TraceTap(epoch=self._epoch, told=self._eager.told)
        self._recorder = events.Recorder(limit=_MAX_EVENTS)
        self._compiled: list[Compiled] = []
        self._after_compile = compiling.AfterCompile(quietly(self._hits.install))
        looked_up = compiling.AfterLookup(quietly(self._looked_up))
        self._started_at_s, self._started = time.time(), time.perf_counter()
        with ExitStack() as stack:
            stack.callback(self._hits.close)
            stack.enter_context(self._recorder)
            stack.enter_context(compiling.bytecode_hook(quietly(self._on_bytecode)))
            stack.callback(self._after_compile.remove)
            self._after_compile.install()
            stack.callback(looked_up.remove)
            looked_up.install()
            stack.enter_context(self._tap)
            self._stack = stack.pop_all()
        self._record = None
        return self

    def __exit__(self, *exc: object) -> None:
        duration_s = time.perf_counter() - self._started if self._stack else 0.0
        self._epoch()  # also of a reset that no compile has followed
        stack, self._stack = self._stack, None
        if stack is None:
            return
        self._eager.close()
        self.num_lookups = self._eager.num_lookups
        counts: dict[str, int] = {}
        quietly(lambda: counts.update(self._hits.counts()))()
        stack.close()
        started = time.perf_counter()
        self._record = self._built(counts)
        quietly(self._describe)(self._record, duration_s)
        self._record.overhead["tap_ms"] = self._tap.spent_s * 1e3
        self._record.overhead["build_ms"] = (time.perf_counter() - started) * 1e3
        for what, dropped in (("events", self._recorder), ("texts", self._tap)):
            if dropped.num_dropped:
                self._record.overhead[f"{what}_dropped"] = dropped.num_dropped
        self._compiled, self._tap.rows = [], []
        self._eager = EagerCalls()
        if self._path is not None:
            self._save(self._record)

    def _built(self, counts: Mapping[str, int]) -> Session:
        try:
            return build_session(
                self._tap.rows,
                self._compiled,
                counts,
                self._recorder.events,
                eager=self._eager,
                num_resets=self._num_resets,
            )
        except Exception as error:  # what is watched must not fail for its watcher
            logger.warning("the record could not be made: %s", type(error).__name__, exc_info=True)
            return Session(orphans=[f"the record could not be made: {type(error).__name__}"])

    def _epoch(self) -> int:
        """Return how often Dynamo has been reset inside the block."""
        if self._stack is not None and self._after_compile.install():
            self._num_resets += 1
        return self._num_resets

    def _looked_up(self, is_hit: bool) -> None:
        # Two frames of ours, one of the hook: above them stands the caller.
        self._eager.looked_up(is_hit, None if is_hit else caller_of_lookup())

    def _on_bytecode(self, original: CodeType, transformed: CodeType) -> None:
        namespace = compiling.compiling_globals() or {}
        wrapped = compiling.compiling_wrapped()
        each = Compiled(
            introspect.current_compile_id() or "?",
            original,
            transformed,
            self._epoch(),
            compiling.continued_code(original),
            continuations(transformed, namespace),
            None if wrapped is None else named(wrapped),
            compiling.traced_code(),
        )
        self._compiled.append(each)
        self._hits.install()
        self._hits.expect(each.compile_id, transformed, namespace)

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
        except Exception as error:  # noqa: BLE001
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
