"""The memory benchmark's own arithmetic: budgets, points, what covers what, verdicts, chart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from _fields import FIELDS, TINY, our_arm, pick_fields
from _group import ArmError
from _limits import Limits, budgets_between, lacking_bytes, search_least
from _memory_report import write_json
from _memory_verdicts import covers, judge_field
from _model import Shape, build_model
from _points import field_result, pareto
from _rounds import ArmFacts, PassResult
from _stats import StepSample, merge_ranks
from arms.activations import checkpoint_blocks

sys.path.remove(str(BENCH))

from torchloom.errors import PlanError
from torchloom.plan import Planner, PlanningProblem

MIB = 1 << 20
PLENTY, HALF, LEAST = "loom-boxed-100", "loom-boxed-50", "loom-boxed-0"
PLAIN, TIGHT, BLOCKS = "torch-boxed-1", "torch-boxed-0", "checkpoint-boxed-1"
# name: total MiB, seconds
MEASURED = {
    PLENTY: (700, 1.0),
    HALF: (600, 1.02),
    LEAST: (500, 1.2),
    PLAIN: (700, 1.0),
    TIGHT: (720, 1.3),
    BLOCKS: (510, 1.25),
}


def said(total_mib, budget_mib):
    return {
        "budget_bytes": budget_mib * MIB,
        "peak_bytes": total_mib * MIB,
        "micro_s": 0.8,
        "compute_s": 0.7,
        "num_recomputed": 3,
    }


def make(measured=MEASURED, num_rounds=3, **said_of):
    """Return the field "boxed" with these totals and times; live memory is 400 MiB."""
    field = FIELDS["boxed"]
    ours = [our_arm(field, 0, int(name.rpartition("-")[2])) for name in measured if "loom" in name]
    peers = [arm for arm in field.peers if arm.name in measured]
    result = PassResult(batch=4)
    for name, (total_mib, _) in measured.items():
        plan = said_of.get(name, said(total_mib, total_mib) if "loom" in name else {})
        result.facts[name] = ArmFacts(
            build_s=1.0,
            first_step_s=1.0,
            live_bytes=400 * MIB,
            peak_bytes=(total_mib - 400) * MIB,
            shared_bytes=0,
            anonymous_bytes=0,
            said=plan,
        )
        result.losses[name] = [9.0, 8.5, 8.0]
    result.samples = [
        StepSample(
            arm=name,
            round=index,
            wall_s=wall * (1 + 0.1 * index),
            wait_share=0.0,
            foreign_share=0.0,
            steal_share=0.0,
            micro_s=0.9 * wall if "loom" in name else None,
        )
        for index in range(num_rounds)
        for name, (_, wall) in measured.items()
    ]
    return field_result(field, [*ours, *peers], result)


def states(result):
    return {cover.peer.arm: cover.state for cover in covers(result)}


class TestBudgets:
    def test_are_even_and_hold_both_ends(self):
        found = budgets_between(Limits(1000, 2001), 6)
        assert list(found) == [0, 20, 40, 60, 80, 100]
        assert found[0] == 1000
        assert found[100] == 2001
        assert found[40] == 1400

    def test_the_planners_refusal_says_what_lacks(self):
        def fn(x, w):
            y = torch.sin(x @ w)
            return (torch.exp(y).sum(), y)

        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(fn, tracing_mode="fake")(torch.ones(7, 5), torch.ones(5, 3)).graph
        with pytest.raises(PlanError) as refused:
            Planner(room_bytes=1).plan(PlanningProblem(joint=graph, num_results=1))
        lacking = lacking_bytes(f"PlanError: {refused.value}")
        assert lacking
        enough = Planner(room_bytes=1 + lacking).plan(PlanningProblem(joint=graph, num_results=1))
        assert enough.peak_bytes <= 1 + lacking
        assert lacking_bytes("PlanError: this plan was made for 2 ranks") is None

    @pytest.mark.parametrize(
        ("least", "start", "said", "found"),
        [
            (100, 100, 100, 100),
            (100, 90, 90, 100),  # what is behind the split counts on top
            (100, 130, 100, 100),  # measured times found a leaner plan than modelled ones
            (100, 130, 90, 130),  # it would not fit
        ],
    )
    def test_the_least_budget_is_one_that_was_accepted(self, least, start, said, found):
        def plan(budget):
            if budget < least:
                raise ArmError(
                    "PlanError: infeasible: the minimum is 1. Raise compile.memory_budget by at "
                    f"least {least - budget:,} bytes"
                )
            return said

        assert search_least(plan, start) == found

    def test_other_failures_are_not_taken_for_a_refusal(self):
        def plan(budget):
            raise ArmError("a rank left with exit status 1")

        with pytest.raises(ArmError, match="exit status 1"):
            search_least(plan, 100)


class TestFields:
    def test_each_base_is_a_peer_and_quick_runs_keep_it(self):
        for field in FIELDS.values():
            assert field.base in [arm.name for arm in field.peers]
        (field,) = pick_fields(["boxed"], is_quick=True)
        assert [arm.name for arm in field.peers] == [TIGHT, PLAIN, BLOCKS]

    def test_peers_are_picked_and_unknown_names_refused(self):
        (field,) = pick_fields(["boxed"], [BLOCKS])
        assert [arm.name for arm in field.peers] == [BLOCKS]
        with pytest.raises(SystemExit, match="no such field: loose; known: inductor, boxed"):
            pick_fields(["loose"])
        with pytest.raises(SystemExit, match="no such peer: fsdp2-whole"):
            pick_fields(["boxed"], ["fsdp2-whole"])

    def test_checkpointed_blocks_give_the_same_gradients(self):
        tokens = torch.randint(0, 256, (2, 13), generator=torch.Generator().manual_seed(0))
        grads = []
        for every in (0, 1, 2):
            model = build_model(Shape(**{**TINY, "seq_len": 13, "num_layers": 3}))
            checkpoint_blocks(model, every)
            model(tokens, tokens.roll(1)).backward()
            grads.append([param.grad for param in model.parameters()])
            wrapped = [type(block).__name__ == "Checkpointed" for block in model.blocks]
            assert wrapped == [every > 0 and index % every == 0 for index in range(3)]
        for found in grads[1:]:
            assert all(map(torch.equal, grads[0], found))


class TestPoints:
    def test_hold_measured_and_predicted(self):
        result = make(**{HALF: said(590, 610)})
        half = next(point for point in result.points if point.arm == HALF)
        assert half.peak_bytes == 600 * MIB
        assert half.peak_error == pytest.approx(600 / 590 - 1)
        assert half.ratio.median == pytest.approx(1.02)
        assert half.micro_s.median == pytest.approx(0.9 * 1.02)
        assert half.micro_ratio == pytest.approx(0.9 * 1.02 / 0.8)
        assert [point.arm for point in result.ours] == [LEAST, HALF, PLENTY]

    def test_an_arm_that_left_during_the_rounds_has_none(self):
        result = make()
        result.measured.missing[HALF] = "a rank left"
        again = field_result(result.field, result.arms, result.measured)
        assert HALF not in [point.arm for point in again.points]
        (broken,) = [line for line in judge_field(again) if " runs: " in line]
        assert broken == "boxed: BROKEN runs: 2 of 3 budgets train; loom-boxed-50: a rank left"

    def test_pareto_drops_what_is_beaten(self):
        assert pareto([(7, 1.0), (5, 1.5), (6, 1.5), (8, 1.0)]) == [(5, 1.5), (7, 1.0)]

    def test_time_of_forward_and_backward_is_the_mean_of_ranks_that_all_tell(self):
        rank = {"wall_s": 1.0, "cpu_s": 1.0, "wait_s": 0.0, "machine_busy_s": 1.0}
        rank["machine_steal_s"] = 0.0
        ranks = [{**rank, "micro_s": 0.5}, {**rank, "micro_s": 0.75}]
        assert merge_ranks("a", 0, ranks, 2).micro_s == pytest.approx(0.625)
        assert merge_ranks("a", 0, [ranks[0], {**rank, "micro_s": None}], 2).micro_s is None
        assert merge_ranks("a", 0, [rank, rank], 2).micro_s is None


class TestCovers:
    def test_leaner_and_no_slower_is_kept(self):
        assert states(make()) == {PLAIN: "kept", TIGHT: "kept", BLOCKS: "kept"}

    def test_leaner_than_all_of_ours_is_broken(self):
        assert states(make({**MEASURED, BLOCKS: (490, 1.25)}))[BLOCKS] == "BROKEN"

    def test_two_parts_in_a_thousand_are_the_same_memory(self):
        assert states(make({**MEASURED, PLAIN: (699, 1.0)}))[PLAIN] == "kept"
        assert states(make({**MEASURED, PLAIN: (698, 1.01)}))[PLAIN] == "line"

    def test_between_two_budgets_the_line_decides(self):
        # At 550 MiB the line is half way between 1.2 and 1.02: 1.11.
        found = {c.peer.arm: c for c in covers(make({**MEASURED, BLOCKS: (550, 1.15)}))}[BLOCKS]
        assert (found.state, found.best.arm) == ("line", LEAST)
        assert found.on_line.median == pytest.approx(1.11 / 1.15)
        assert states(make({**MEASURED, BLOCKS: (550, 1.10)}))[BLOCKS] == "BROKEN"

    def test_fatter_and_faster_than_all_of_ours_is_broken(self):
        assert states(make({**MEASURED, PLAIN: (800, 0.9)}))[PLAIN] == "BROKEN"

    def test_few_rounds_judge_nothing(self):
        assert set(states(make(num_rounds=2)).values()) == {"UNSURE"}
        assert set(states(make(num_rounds=0)).values()) == {"UNSURE"}


class TestVerdicts:
    def marks(self, result):
        lines = [line for line in judge_field(result) if ":   " not in line]
        return [(line.split()[2].rstrip(":"), line.split()[1]) for line in lines]

    def test_all_kept(self):
        kept = self.marks(make({**MEASURED, TIGHT: (620, 1.3)}))
        assert kept == [
            (name, "kept")
            for name in ("runs", "peak", "budget", "minimum", "minimum", "frontier", "losses")
        ]

    def test_each_can_break(self):
        result = make(
            {**MEASURED, BLOCKS: (495, 1.25), TIGHT: (580, 0.9)},
            **{HALF: said(590, 599)},
        )
        result.measured.losses[HALF] = [9.0, 8.5, 8.1]
        marks = self.marks(result)
        assert marks[0] == ("runs", "kept")
        assert {name for name, mark in marks if mark == "BROKEN"} == {
            "peak",
            "budget",
            "minimum",
            "frontier",
            "losses",
        }
        text = "\n".join(judge_field(result))
        assert "above it at 1 of 3, most at torchloom, compiled, 50 % by 1,048,576 bytes" in text
        assert "our leanest step adds 1.053x of what per-block checkpoint" in text
        assert "no point of ours is as lean (495.0 MiB)" in text


class TestReport:
    def test_json_holds_points_samples_and_verdicts(self, tmp_path):
        result = make()
        write_json({"cpu": "x"}, [result], judge_field(result), tmp_path / "memory.json")
        (field,) = json.loads((tmp_path / "memory.json").read_text())["fields"]
        point = next(each for each in field["points"] if each["arm"] == LEAST)
        assert point["predicted"]["peak_bytes"] == 500 * MIB
        assert point["ratio"]["median"] == pytest.approx(1.2)
        assert len(field["samples"]) == 18
        assert {cover["state"] for cover in field["covers"]} == {"kept"}


@pytest.mark.exhaustive
def test_a_quick_run_writes_everything(tmp_path):
    command = [sys.executable, str(BENCH / "memory.py"), "--quick", "--rounds", "1"]
    command += ["--min-clean", "1", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "boxed: kept   runs: 2 of 2 budgets train" in done.stdout
    (field,) = json.loads((tmp_path / "memory.json").read_text())["fields"]
    points = {point["arm"]: point for point in field["points"]}
    assert set(points) == {LEAST, PLENTY, PLAIN, TIGHT, BLOCKS}
    assert points[LEAST]["peak_bytes"] < points[PLENTY]["peak_bytes"]
    for name in (LEAST, PLENTY):
        assert points[name]["peak_error"] == pytest.approx(0.0, abs=0.01)
