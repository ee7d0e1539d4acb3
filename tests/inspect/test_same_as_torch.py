"""Counts in a record are those of torch's own logs and caches, over many small programs."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest
import torch

import torchloom
from support.compiled_programs import PROGRAMS
from torchloom.inspect.live.guards import is_library

_LOGS = ("torch._dynamo.guards.__recompiles", "torch._dynamo.symbolic_convert.__graph_breaks")


class TorchSays(logging.Handler):
    """What torch logs of recompiles and breaks, and what it holds."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.num_recompiles = self.num_graphs = self.num_limits = self.num_calls = 0
        self.breaks: set[str] = set()
        self.codes: list[tuple[CodeType, CodeType]] = []
        self.sizes: list[int] = []
        self.num_before = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.num_recompiles += text.startswith("Recompiling function")
        self.num_limits += "torch._dynamo hit config." in text
        found = re.match(r"Graph break in user code at (\S+:\d+)", text)
        if found:
            self.breaks.add(found.group(1))

    def compile(self, fn: Any, **options: Any) -> Any:
        if unknown := options.keys() - inspect.signature(torch.compile).parameters.keys():
            pytest.skip(f"this torch's compile has no {', '.join(unknown)}")
        # a function: Lightning, once imported, copies the backends of modules (`lightning.fabric.wrappers`)
        return torch.compile(fn, backend=lambda *graph: self.backend(*graph), **options)

    __call__ = compile

    def backend(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_calls += 1
            return gm.forward(*args)

        return run

    def rewritten(self, original: CodeType, transformed: CodeType) -> None:
        self.codes.append((original, transformed))


def num_held() -> int:
    """Return how many entries torch holds of all functions that it has met."""
    from torch._dynamo import convert_frame, eval_frame

    codes = [ref() for ref in convert_frame.input_codes.seen]
    return sum(len(eval_frame._debug_get_cache_entry_list(code)) for code in codes if code)


@pytest.fixture
def says() -> Iterator[TorchSays]:
    from torch._dynamo.convert_frame import register_bytecode_hook

    torch._logging.set_logs(recompiles=True, graph_breaks=True)
    handler = TorchSays()
    loggers = [logging.getLogger(name) for name in (*_LOGS, "torch._dynamo.convert_frame")]
    for logger in loggers:
        logger.addHandler(handler)
    handle = register_bytecode_hook(handler.rewritten)
    try:
        yield handler
    finally:
        handle.remove()
        for logger in loggers:
            logger.removeHandler(handler)
        torch._logging.set_logs()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_counts(program, says: TorchSays) -> None:
    if program.__name__ == "warm":
        program(says)
        before = num_held()
        says.__init__()
        says.num_before, says.sizes = before, [1]
    with torchloom.watch() as w:
        program(says)
    record = w.record
    entries = list(record.entries())
    assert len(entries) == len(says.codes), [e.compile_id for e in entries]
    own_backend = [e for e in entries if e.artifact("dynamo") and e.backend != "eager"]
    assert len(own_backend) == says.num_graphs
    assert sum(each.num_hits for each in own_backend) == says.num_calls
    assert record.num_recompiles == says.num_recompiles - says.num_limits
    places = {each.place.partition(" in ")[0] for each in record.breaks()}
    # Where torch names a line of its own, the record names the user's that led there.
    assert {place for place in says.breaks if not is_library(place)} <= places
    assert len(places) == len(says.breaks)
    assert not any(map(is_library, places))
    limited = [f for f in record.all_functions() if f.recompile_limit is not None]
    assert len(limited) == says.num_limits
    if not record.num_resets:
        assert len(entries) + says.num_before == num_held()
