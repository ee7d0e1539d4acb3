"""Collects the structured trace of torch.compile, without a file or an environment variable.

torch writes a record of every stage to the logger `torch.__trace` as soon as that logger has a handler. These are
the records that `TORCH_TRACE` writes and tlparse reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from torchloom._torch import compiling
from torchloom.inspect.collected import Row
from torchloom.inspect.live.target import Named, named

LOGGER = "torch.__trace"

_CONTEXT = (
    "rank",
    "frame_id",
    "frame_compile_id",
    "attempt",
    "compiled_autograd_id",
    "has_payload",
    "stack",
    "subgraph_name",
    "process",
)

_BULK = ("fx_graph_cache_", "describe_", "aotautograd_cache_")
"""Kinds whose payloads are nine tenths of all bytes and say little: only the first characters are kept."""
_BULK_CHARS = 2000


_BEGINS = frozenset({"dynamo_start", "recompile_reasons", "compilation_metrics"})


def wrapped_callable() -> Named | None:
    """Return what this thread compiles through a wrapper function of torch's; None for any other function."""
    try:
        found = compiling.compiling_wrapped()
        return None if found is None else named(found)
    except Exception:  # noqa: BLE001  an object of the program may raise anything
        return None


class TraceTap(logging.Handler):
    """Collects the trace of this process while attached.

    It is called on the compiling thread, copies, and returns.

    Args:
        max_payload_chars: longer payloads are cut to this length.
        max_total_chars: when this much has been kept, further payloads are dropped and counted.
        epoch: returns how often Dynamo has been reset; called at each row.
        told: called with each row of a compile.
    """

    def __init__(
        self,
        max_payload_chars: int = 1 << 20,
        max_total_chars: int = 256 << 20,
        *,
        epoch: Callable[[], int] = lambda: 0,
        told: Callable[[Row], None] = lambda row: None,
    ) -> None:
        super().__init__(logging.DEBUG)
        self._epoch, self._told = epoch, told
        self.rows: list[Row] = []
        self.spent_s = 0.0
        self.num_dropped = 0
        self._max_payload, self._left = max_payload_chars, max_total_chars
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record; raises nothing into the compiler."""
        started = time.perf_counter()
        try:
            metadata = getattr(record, "metadata", None)
            if isinstance(metadata, dict):
                self._keep(metadata, getattr(record, "payload", None))
        except Exception:  # noqa: BLE001  any bug of ours: the compiler that logs must not fail for it
            self.num_dropped += 1
        self.spent_s += time.perf_counter() - started

    def _keep(self, metadata: dict[str, Any], payload: Any) -> None:
        kinds = [key for key in metadata if key not in _CONTEXT]
        if not kinds:
            return
        kind, body = kinds[0], metadata[kinds[0]]
        if kind == "artifact" and isinstance(body, dict):
            kind = str(body.get("name", kind))
        text = self._cut(kind, payload)
        row = Row(
            kind,
            body,
            text,
            metadata.get("frame_id"),
            metadata.get("frame_compile_id"),
            metadata.get("attempt") or 0,
            metadata.get("stack"),
            time.time(),
            self._epoch(),
            compiling.compiling_code() if kind in _BEGINS else None,
            compiling.compiling_stack() if kind == "dynamo_start" else (),
            compiling.guards_being_built_us() if kind == "dynamo_cpp_guards_str" else None,
            wrapped_callable() if kind in _BEGINS else None,
        )
        with self._guard:
            self.rows.append(row)
        if row.frame_id is not None:
            self._told(row)

    def _cut(self, kind: str, payload: Any) -> str | None:
        if payload is None:
            return None
        text = payload if isinstance(payload, str) else str(payload)
        cap = _BULK_CHARS if kind.startswith(_BULK) else self._max_payload
        text = text[:cap]
        if len(text) > self._left:
            self.num_dropped += 1
            return None
        self._left -= len(text)
        return text

    def __enter__(self) -> TraceTap:  # noqa: PYI034
        logging.getLogger(LOGGER).addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger(LOGGER).removeHandler(self)
