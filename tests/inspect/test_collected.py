"""A record is made of plain data: no hook has to run for it, and hooks need no record."""

from __future__ import annotations

import torch

from torchloom.inspect.collected import Collected, EagerCalls, Row
from torchloom.inspect.listen.collector import Collector
from torchloom.inspect.record.session import build_session
from torchloom.records import Session


def row(kind: str, body: object = None, payload: str | None = None) -> Row:
    return Row(kind, body, payload, 0, 0, 0, None, 0.0)


def test_nothing_heard_is_an_empty_record() -> None:
    assert build_session(Collected()) == Session()


def test_rows_become_an_entry() -> None:
    graph = "def forward(self, x):\n    return x + 1"
    rows = [
        row("dynamo_start", {"stack": [{"filename": "demo.py", "line": 3, "name": "f"}]}),
        row("dynamo_output_graph", payload=f"# graph id: 7\n{graph}"),
        row("compilation_metrics", {"co_name": "f", "entire_frame_compile_time_s": 0.5}),
        row("a_kind_of_the_future"),
    ]
    record = build_session(Collected(rows=rows, num_resets=2))
    (function,) = record.functions
    (entry,) = function.entries
    assert (function.name, function.file, function.line) == ("f", "demo.py", 3)
    assert (entry.compile_id, entry.compile_s, entry.artifact("dynamo")) == ("0/0", 0.5, graph)
    assert record.num_resets == 2


def test_eager_calls_over_a_limit_name_it() -> None:
    code = (lambda x: x).__code__
    eager = EagerCalls({(0, code): 3}, {(0, code): 8}, num_unknown=1)
    record = build_session(Collected(eager=eager))
    (function,) = record.functions
    assert function.num_eager_calls == 3
    assert record.num_eager_calls == 4


def test_a_collector_returns_what_its_hooks_collected() -> None:
    collector = Collector()
    collector.open()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    for _ in range(2):
        compiled(torch.ones(2))
    collected = collector.close()
    assert len(collected.rewritings) == 1
    assert list(collected.num_hits.values()) == [2]
    assert any(each.kind == "dynamo_start" for each in collected.rows)
    assert collected.num_lookups > 0
    assert collected.duration_s > 0
    assert collected.num_dropped == {}
