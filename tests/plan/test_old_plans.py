"""A plan.json that an older torchloom wrote still loads, and means the same."""

from __future__ import annotations

import json

from torchloom.files import from_plain
from torchloom.plan import Decision, GraphPlan, Plan

OLD = """{
 "base_bytes": 1000, "budget_bytes": 9000, "optimizer_bytes": 50, "version": 2, "world_size": 2,
 "graphs": [{
  "again": ["relu_1"], "batch_bytes": 64, "bound_us": 1.5, "bucket_bytes": 0, "budget_bytes": 7000,
  "compute_us": 100.0, "copy_us": 2.0, "extra_us": 3.0, "graph": "0123456789abcdef",
  "graph_peak_bytes": 5900, "measured_us": 40.0, "min_peak_bytes": 3000, "overhead_us": 4.0,
  "peak_bytes": 6000, "pieces": {"a.weight": 128, "b.weight": 256}, "prefetch_bytes": 512,
  "resident": {"a.weight": 1024}, "saved_bytes": 2500, "states_us": 5.0,
  "decisions": [
   {"action": "recompute", "cost_us": 3.0, "num_bytes": 400, "op": "relu.default", "place": 1,
    "value": "relu_1", "where": "layers.0"},
   {"action": "offload", "cost_us": 7.0, "num_bytes": 800, "op": "mm.default", "place": 0,
    "value": "mm", "where": ""},
   {"action": "keep", "cost_us": 1.0, "num_bytes": 200, "op": "add.Tensor", "value": "add"}
  ]
 }]
}"""


def test_a_plan_of_an_older_torchloom_loads_and_means_the_same() -> None:
    plan = Plan.from_json(OLD)
    (graph,) = plan.graphs

    assert graph.recompute == {"relu_1"}
    assert graph.offload == {"mm"}
    assert graph.again == {"relu_1"}
    assert graph.resident == {"a.weight": 1024}
    assert graph.pieces == {"a.weight": 128, "b.weight": 256}
    assert (graph.bucket_bytes, graph.prefetch_bytes) == (0, 512)
    assert (graph.resident_bytes, graph.beside_bytes) == (1024, 1408)
    assert plan.peak_bytes == 1000 + 1408 + 64 + 6000
    assert graph.step_us == 112.0
    assert graph.decisions[0] == Decision(
        value="relu_1",
        op="relu.default",
        num_bytes=400,
        action="recompute",
        cost_us=3.0,
        where="layers.0",
        place=1,
    )


def test_it_is_written_as_it_was_read() -> None:
    data = json.loads(OLD)
    written = json.loads(Plan.from_json(OLD).to_json())

    data["graphs"][0]["decisions"][2] |= {"place": -1, "where": ""}
    data["graphs"][0] |= {"calls_bodies": False, "loss_rows": []}  # none did
    assert written == data
    assert from_plain(GraphPlan, written["graphs"][0]) == Plan.from_json(OLD).graphs[0]
