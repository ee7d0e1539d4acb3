"""Plans as text, their diff, and the command that shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from torchloom.cli import make_app
from torchloom.errors import PlanError
from torchloom.plan import Decision, GraphPlan, Plan
from torchloom.plan.text import diff_plans, show_plan


def decision(value: str, size: int, action: str) -> Decision:
    return Decision(
        value=value,
        op="mm.default",
        num_bytes=size,
        action=action,
        cost_us=12.5,
        where="layers.0.mlp",
    )


GRAPH = GraphPlan(
    graph="0011",
    budget_bytes=3_000_000,
    peak_bytes=2_500_000,
    graph_peak_bytes=2_500_000,
    saved_bytes=1_200_000,
    min_peak_bytes=900_000,
    compute_us=10_000,
    measured_us=2_500,
    extra_us=500,
    overhead_us=150,
    copy_us=110,
    bound_us=400,
    decisions=(decision("mm_1", 800_000, "keep"), decision("mul_3", 400_000, "recompute")),
)
PLAN = Plan(world_size=2, budget_bytes=5_000_000, base_bytes=2_000_000, graphs=(GRAPH,))


def test_a_plan_reads_as_a_table() -> None:
    text = show_plan(PLAN)
    assert "2 ranks, budget 5.00 MB, predicted peak 4.50 MB" in text
    assert (
        "adds at most 2.50 MB of 3.00 MB; no plan found needs less than 900 kB; 1.20 MB cross"
        in text
    )
    assert (
        "time 10.650 ms: compute 10.000 ms (measured here: 25%, else modelled), computed again"
        in text
    )
    # 0.5 ms again and 0.15 ms of transfers, of which no plan can save more than 0.25 ms.
    assert "transfers add 0.150 ms; at most 2.4% above the best within this budget" in text
    assert "optimizer" not in text.partition("\n\n")[2]
    heavy = replace(PLAN, optimizer_bytes=2_900_000)
    assert "predicted peak 4.90 MB" in show_plan(heavy)
    assert "the optimizer's step adds 2.90 MB" in show_plan(heavy)
    assert "optimizer_bytes: 0 B -> 2.90 MB" in diff_plans(PLAN, heavy)
    rows = [line.split() for line in text.splitlines() if "mm.default" in line]
    assert rows[0][:4] == ["keep", "800", "kB", "0.013"]
    assert rows[1][-3:] == ["mul_3", "mm.default", "layers.0.mlp"]
    assert "and 1 smaller values" in show_plan(PLAN, 1)


def test_what_differs_between_plans() -> None:
    assert diff_plans(PLAN, PLAN) == ""
    tight = replace(
        GRAPH,
        peak_bytes=2_000_000,
        decisions=(replace(GRAPH.decisions[0], action="recompute"), GRAPH.decisions[1]),
    )
    other = replace(GRAPH, graph="22ff")
    lines = diff_plans(PLAN, replace(PLAN, graphs=(tight, other))).splitlines()
    assert lines == [
        "graph 22ff: only after",
        "graph 0011: peak_bytes: 2.50 MB -> 2.00 MB",
        "graph 0011: keep -> recompute: 1 values, 800 kB: mm_1",
    ]


def test_the_command(tmp_path) -> None:
    path = PLAN.save(tmp_path / "plan.json")
    more = replace(PLAN, budget_bytes=6_000_000).save(tmp_path / "more.json")
    run = CliRunner().invoke
    app = make_app("plan")
    shown = run(app, ["plan", "show", str(path)])
    assert shown.exit_code == 0
    assert shown.output.strip() == show_plan(PLAN)
    same = run(app, ["plan", "diff", str(path), str(path)])
    assert (same.exit_code, same.output.strip()) == (0, "the plans are equal")
    differs = run(app, ["plan", "diff", str(path), str(more)])
    assert (differs.exit_code, differs.output.strip()) == (1, "budget_bytes: 5.00 MB -> 6.00 MB")


def test_files_that_are_no_plans(tmp_path) -> None:
    with pytest.raises(PlanError, match=r"no plan can be read from .*gone\.json: No such file"):
        Plan.load(tmp_path / "gone.json")
    path = tmp_path / "plan.json"
    path.write_text("[]")
    with pytest.raises(PlanError, match="is not a plan"):
        Plan.load(path)
    path.write_text('{"version": 99}')
    with pytest.raises(PlanError, match=r"plan\.json is of version 99 of the format"):
        Plan.load(path)
    path.write_text('{"version": 2, "ranks": 3}')
    with pytest.raises(PlanError, match="lacks or adds fields"):
        Plan.load(path)
    with pytest.raises(PlanError, match="made for 2 ranks, the run has 4"):
        PLAN.check_world(4)
