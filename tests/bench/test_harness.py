"""The benchmark's own arithmetic: clocks, what counts as a step, ratios, memory, verdicts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from _compile_times import FirstStep, compile_ratios
from _environment import snapshot, worker_environment
from _memory import integrate
from _report import Report, table, write_json
from _rounds import ArmFacts, PassResult
from _stats import StepSample, are_clean, clean, fastest, merge_ranks, paired_ratios, summarize
from _verdicts import judge_compile, judge_pass
from arms import ARMS, pick_arms
from arms.base import Job, make_step

sys.path.remove(str(BENCH))


def sample(arm, wall_s, *, round=0, wait=0.0, foreign=0.0, steal=0.0):
    return StepSample(
        arm=arm,
        round=round,
        wall_s=wall_s,
        wait_share=wait,
        foreign_share=foreign,
        steal_share=steal,
    )


def facts(live_mib, peak_mib, shared_mib=0):
    return ArmFacts(
        build_s=1.0,
        first_step_s=2.0,
        live_bytes=live_mib << 20,
        peak_bytes=peak_mib << 20,
        shared_bytes=shared_mib << 20,
        anonymous_bytes=0,
    )


@pytest.fixture
def result():
    """Three rounds: the limit, FSDP2 20 % slower, stage 3 5 % slower, DeepSpeed missing."""
    steps = {"limit-compiled": 1.0, "fsdp2-whole": 1.2, "loom-3": 1.05}
    return PassResult(
        batch=4,
        facts={
            "limit-compiled": facts(390, 312),
            "fsdp2-whole": facts(195, 405),
            "loom-3": facts(195, 350, 40),
        },
        samples=[
            sample(arm, wall * (1 + 0.1 * index), round=index)
            for index in range(3)
            for arm, wall in steps.items()
        ],
        losses={
            "limit-compiled": [9.0, 7.5, 7.0],
            "fsdp2-whole": [9.0, 7.4, 6.9],
            "loom-3": [9.0, 7.4, 6.9, 6.5],
        },
        missing={"deepspeed-eager": "DeepSpeed is not installed"},
    )


class TestAccumulation:
    def test_micro_batches_add_up_to_the_step_of_the_whole(self):
        torch.manual_seed(0)
        tokens, targets = torch.randn(6, 5), torch.randn(6, 5)
        steps = []
        for batch, accumulation in ((6, 1), (2, 3)):
            torch.manual_seed(1)
            weight = torch.nn.Linear(5, 5, dtype=torch.float64)
            opened = []

            @contextlib.contextmanager
            def unreduced(opened=opened):
                opened.append(True)
                yield

            def model(x, y, weight=weight):
                return (weight(x.double()) - y).square().mean()

            job = Job(
                model=torch.nn.Identity,
                rank=0,
                world_size=1,
                batch=batch,
                accumulation=accumulation,
            )
            step = make_step(job, model, torch.optim.SGD(weight.parameters(), lr=0.1), unreduced)
            steps.append((step(tokens, targets).item(), weight.weight.detach()))
            assert len(opened) == accumulation - 1
        assert steps[0][0] == pytest.approx(steps[1][0])
        torch.testing.assert_close(steps[0][1], steps[1][1])


class TestDiscardRule:
    @pytest.mark.parametrize(
        ("shares", "is_clean"),
        [
            ({}, True),
            ({"wait": 0.5}, True),  # its own threads wanted its cores
            ({"foreign": 0.5}, True),  # others used cores that it left idle
            ({"wait": 0.06, "foreign": 0.06}, False),
            ({"wait": 0.05, "foreign": 0.5}, True),
            ({"steal": 0.05}, False),
        ],
    )
    def test_a_step_counts_unless_others_took_its_cores(self, shares, is_clean):
        step = sample("loom-3", 1.0, **shares)
        assert clean([step], step.arm) == [step] * is_clean

    def test_steps_are_compared_at_the_speed_that_all_arms_have_most_steps_at(self):
        def at(arm, low_ms, high_ms):
            probes = {"probe_low_s": low_ms / 1e3, "probe_s": high_ms / 1e3}
            return dataclasses.replace(sample(arm, 1.0), **probes)

        base, ours = "limit-eager", "loom-3"
        steps = [
            *(at(base, 10, 11) for _ in "abc"),
            at(base, 18, 20),
            at(base, 19, 21),
            at(base, 11, 19),  # one core was slow, or both for a while
            *(at(ours, low, low + 1) for low in (18, 19, 20)),
            at(ours, 10, 11),
        ]
        slow = [False] * 3 + [True] * 2 + [False] + [True] * 3 + [False]
        assert are_clean(steps) == slow
        unknown = sample(ours, 1.0)  # in old results nothing is said of the cores
        assert are_clean([*steps, unknown]) == [*slow, True]
        assert are_clean(steps[:4]) == [True] * 3 + [False]
        assert clean(steps, ours) == steps[6:9]

    def test_ranks_merge_into_one_step(self):
        ranks = [
            {"wall_s": 2.0, "cpu_s": 1.9, "wait_s": 0.1, "machine_busy_s": 4.0},
            {"wall_s": 2.2, "cpu_s": 1.7, "wait_s": 0.0, "machine_busy_s": 4.0},
        ]
        ranks = [{**rank, "machine_steal_s": 0.04} for rank in ranks]
        step = merge_ranks("loom-3", 3, ranks, num_cores=2)
        assert step.wall_s == pytest.approx(2.1)
        assert step.slowest_s == 2.2
        half = dataclasses.replace(step, arm="half", wall_s=1.05, slowest_s=1.05)
        assert paired_ratios([step, half], "half", step.arm) == pytest.approx([0.5])
        assert paired_ratios([step, half], "half", step.arm, to_slowest=True) == pytest.approx(
            [1.05 / 2.2]
        )
        assert step.wait_share == pytest.approx(0.05)
        assert step.foreign_share == pytest.approx((0.4 / 4.0 + 0.4 / 4.4) / 2)
        assert step.steal_share == pytest.approx((0.01 + 0.04 / 4.4) / 2)
        assert step.round == 3
        assert step.probe_s is None
        probes = ((0.02, 0.01), (0.012, 0.03))
        probed = [{**rank, "probes_s": each} for rank, each in zip(ranks, probes, strict=True)]
        step = merge_ranks("loom-3", 3, probed, num_cores=2)
        assert (step.probe_low_s, step.probe_s) == (0.01, 0.03)


class TestRatios:
    def test_are_paired_within_rounds_over_clean_steps(self):
        steps = [
            *(sample("a", wall, round=0) for wall in (1.0, 1.2, 1.1)),
            sample("b", 2.2, round=0),
            sample("b", 9.0, round=0, wait=0.5, foreign=0.5),
            sample("a", 10.0, round=1),
            sample("b", 30.0, round=1),
            sample("b", 99.0, round=2),
        ]
        assert paired_ratios(steps, "b", "a") == pytest.approx([2.0, 3.0])

    def test_an_arm_without_clean_steps_has_none(self):
        steps = [sample("a", 1.0), sample("b", 1.0, steal=0.5)]
        assert paired_ratios(steps, "b", "a") == []
        assert summarize([]) is None
        assert fastest(steps, ["b"]) is None


class TestMemory:
    @pytest.mark.parametrize(
        ("events", "found"),
        [
            ([100, 50, -50, 0, 30, 20, -20, 10, -10, -30, 0], [(100, 50)]),
            ([0, 8, 8, -8, 0, 4, -4, 0], [(0, 16), (8, 4)]),  # each from what was alive
            ([64, 0, 0], [(64, 0)]),
        ],
    )
    def test_peaks_are_counted_from_what_was_alive(self, events, found):
        assert integrate(events) == found


class TestCompileTimes:
    @staticmethod
    def step(arm, repeat, cache, compile_s):
        return FirstStep(
            arm=arm,
            repeat=repeat,
            cache=cache,
            first_step_s=compile_s + 1,
            compile_s=compile_s,
            cpu_s=compile_s,
        )

    def test_ratios_are_paired_by_repeat_and_cache(self):
        steps = [
            self.step("limit-compiled", 0, "cold", 20.0),
            self.step("loom-3", 0, "cold", 24.0),
            self.step("limit-compiled", 0, "warm", 4.0),
            self.step("loom-3", 0, "warm", 6.0),
            self.step("limit-compiled", 1, "cold", 20.0),
        ]
        assert compile_ratios(steps, "loom-3", "limit-compiled", "cold") == pytest.approx([1.2])
        cold, warm = judge_compile(steps)
        assert cold.startswith("kept")
        assert warm.startswith("BROKEN")


class TestReport:
    def test_table_names_every_arm_and_stars_the_thin_ones(self, result):
        text = table(result, ["limit-compiled", "loom-3", "deepspeed-eager"], min_clean=8)
        assert "torchloom 3, compiled" in text
        assert "not run: DeepSpeed is not installed" in text
        assert "1.050 [1.050-1.050]*" in text

    def test_verdicts_keep_and_break(self, result):
        kept = judge_pass(result)
        assert all("kept" in line for line in kept), kept
        assert len(kept) == 4
        result.facts["loom-3"] = facts(300, 405)
        result.losses["loom-3"] = [9.0, 7.4, 6.8]
        broken = [line for line in judge_pass(result) if "BROKEN" in line]
        assert [("memory" in line, "losses" in line) for line in broken] == [
            (True, False),
            (False, True),
        ]

    def test_shared_memory_is_held_against_the_limit(self, result):
        result.facts["loom-3-shared"] = facts(195, 350)
        walls = {0: 1.0, 1: 1.1 * 1.019, 2: 1.2 * 1.3}
        result.samples += [sample("loom-3-shared", wall, round=at) for at, wall in walls.items()]
        (line,) = (line for line in judge_pass(result) if "limit:" in line)
        assert line.startswith("batch 4: kept   limit: stage 3 in shared memory takes 1.019")
        result.samples += [sample("loom-3-shared", 2.0, round=1)]
        assert any("BROKEN limit" in line for line in judge_pass(result))

    def test_residents_are_held_against_gathering_each_time(self, result):
        for arm, gathers in (("loom-3", 128), ("loom-3-selective", 16)):
            result.facts[arm] = dataclasses.replace(facts(195, 350), said={"num_gathers": gathers})
        faster = [sample("loom-3-selective", 0.9 * (1 + 0.1 * at), round=at) for at in range(3)]
        plain = result.samples
        result.samples = plain + faster
        (line,) = (line for line in judge_pass(result) if "selective" in line)
        assert "kept   selective: gathers in a step fall from 128 to 16, its time to 0.857" in line
        result.samples = plain + [dataclasses.replace(each, wall_s=2.0) for each in faster]
        assert any("BROKEN selective" in line for line in judge_pass(result))

    def test_speed_is_not_judged_from_few_rounds(self, result):
        result.samples = result.samples[:3]
        assert "UNSURE speed" in judge_pass(result)[0]

    def test_json_holds_every_sample_with_its_verdict(self, result, tmp_path, monkeypatch):
        monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK", raising=False)
        environment = snapshot({"quick": True}, worker_environment(tmp_path))
        write_json(Report(environment=environment, passes=[result]), tmp_path / "train.json")
        text = (tmp_path / "train.json").read_text()
        record = json.loads(text)
        assert [one["is_clean"] for one in record["passes"][0]["samples"]] == [True] * 9
        assert record["environment"]["variables"]["TORCHINDUCTOR_VEC_ISA_OK"] == "1"
        assert str(tmp_path) not in text


def test_arms_are_picked_by_name_and_unknown_ones_refused():
    assert [arm.name for arm in pick_arms(["loom-3", "ddp-eager"])] == ["loom-3", "ddp-eager"]
    with pytest.raises(SystemExit, match=r"no such arm: ddp; known arms: limit-eager"):
        pick_arms(["ddp"])
    assert {name for name, arm in ARMS.items() if not arm.communicates} == {
        "limit-eager",
        "limit-compiled",
    }
