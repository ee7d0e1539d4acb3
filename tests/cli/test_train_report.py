"""`torchloom train --report` on two real ranks, and what the page that it leaves holds."""

from __future__ import annotations

import json

import pytest

from support.commands import python
from support.page_records import packed_in, record_in
from torchloom.records import load_record
from torchloom.report.page.figures import run_figures

STEPS = 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
    "compile": {"enabled": True, "backend": "aot_eager"},
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Train three steps; return the folder of the run."""
    folder = tmp_path_factory.mktemp("report")
    data, config, out = folder / "text.txt", folder / "config.json", folder / "run"
    data.write_bytes(b"".join(f"{i * i} is the square of {i}\n".encode() for i in range(4000)))
    config.write_text(json.dumps(CONFIG))
    options = ["--data", data, "--config", config, "--out", out, "--steps", STEPS, "--nproc", 2]
    more = ["--seq-len", 32, "--eval-every", 100, "--report"]
    done = python("-m", "torchloom", "train", *options, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "report.html" in done.stdout
    return out


@pytest.fixture(scope="module")
def packed(run_dir):
    """Return what the page carries."""
    return packed_in((run_dir / "report.html").read_text("utf-8"))


@pytest.fixture(scope="module")
def shown(packed):
    """Return the record that the page carries."""
    return record_in(packed)


def of_kind(shown, kind: str) -> list[dict]:
    return [row["data"] for row in shown["events"] if row["kind"] == kind]


@pytest.mark.slow
def test_the_timeline_has_each_phase_of_each_step(shown) -> None:
    assert (shown["rank"], shown["world_size"]) == (0, 2)
    phases = of_kind(shown, "PhaseRan")
    steps = [row["step"] for row in phases if row["phase"] == "step"]
    assert sorted(set(steps)) == list(range(STEPS))
    for step in range(STEPS):
        backwards = [r for r in phases if r["phase"] == "backward" and r["step"] == step]
        assert len(backwards) == 2  # micro-steps
        assert all(row["duration_s"] > 0 for row in backwards)
    starts = [row["start_s"] for row in phases]
    assert starts == sorted(starts)
    # Compiling lies on the same clock, inside the first forward and backward that train.
    spans = [s for f in shown["functions"] for e in f["entries"] for s in e["spans"]]
    ends = max((s["start_us"] + s["duration_us"]) / 1e6 for s in spans)
    first = min(r["start_s"] for r in phases if r["phase"] == "step")
    assert starts[0] < ends < first + 1


@pytest.mark.slow
def test_collectives_lie_within_the_run(shown) -> None:
    moves = of_kind(shown, "CollectiveRan")
    assert {"gather", "reduce"} <= {row["op"] for row in moves}
    assert all(row["start_s"] <= row["wait_s"] <= row["end_s"] for row in moves)
    assert all(row["num_bytes"] > 0 and row["num_tensors"] > 0 for row in moves)
    phases = of_kind(shown, "PhaseRan")
    begin = min(row["start_s"] for row in phases)
    end = max(row["start_s"] + row["duration_s"] for row in phases)
    inside = [row for row in moves if begin <= row["start_s"] and row["end_s"] <= end + 1]
    assert len(inside) == len(moves)


@pytest.mark.slow
def test_memory_and_communication_are_told_by_layer(shown) -> None:
    moves = of_kind(shown, "CollectiveRan")
    assert all(len(row["params"]) == row["num_tensors"] for row in moves)
    assert "layers.0.attention.wq.weight" in {name for row in moves for name in row["params"]}
    (standing,), (peak,) = shown["standing"], shown["peaks"]
    assert shown["plans"] == []  # there is no budget
    kinds = {part["kind"] for part in standing["parts"]}
    assert kinds == {"parameters", "buffers", "gradients", "optimizer states"}
    total = sum(part["num_bytes"] for part in standing["parts"])
    assert 0 <= standing["base_bytes"] - total < 20_000
    assert peak["peak_bytes"] == sum(each["num_bytes"] for each in peak["alive"])
    assert any(each["layer"].startswith("layers.0.") for each in peak["alive"])


@pytest.mark.slow
def test_entries_have_passes_guards_graphs_and_hits(shown) -> None:
    (function,) = [f for f in shown["functions"] if f["entries"]]
    (entry,) = function["entries"]
    assert entry["status"] == "live"
    assert entry["num_hits"] == 2 * STEPS
    assert function["num_misses"] == 1
    assert any("int64 tensor of shape [2, 32]" in value for value in entry["trigger"].values())
    assert {"TENSOR_MATCH"} <= {guard["kind"] for guard in entry["guards"]}
    assert {"dynamo"} <= {artifact["kind"] for artifact in entry["artifacts"]}
    passes = {(run["name"], run["graph"].partition(".")[2]) for run in entry["passes"]}
    assert {("zero3", "joint"), ("place", "forward"), ("place", "backward")} <= passes
    edited = [run for run in entry["passes"] if run["num_edits"]]
    assert edited
    for run in edited:
        assert run["before"] != run["after"]
        assert max(run["curve"]) > 0


@pytest.mark.slow
def test_the_page_is_that_of_the_record_beside_it(run_dir, shown) -> None:
    session = load_record(run_dir / "record.json")
    assert [f.name for f in session.functions] == [f["name"] for f in shown["functions"]]
    assert len(session.events) == len(shown["events"])
    assert (run_dir / "report.html").stat().st_size < 3_000_000


@pytest.mark.slow
def test_the_page_holds_the_curves_of_the_run_and_the_times_of_both_ranks(run_dir, packed) -> None:
    charts = [node["title"] for node in packed["overview"][1][2][1:]]
    assert charts == ["Loss over steps", "Tokens per second over steps", "Memory over steps"]
    assert "is the slowest" in json.dumps(packed["overview"])
    run = run_figures(load_record(run_dir / "record.json"), run_dir)
    assert run is not None
    assert run.curves["step"] == [1, 2, 3]
    assert all(run.curves[name][-1] > 0 for name in ("loss", "tokens_per_s", "memory_bytes"))
    assert run.heldout["step"] == [0, 3]
    assert run.num_compiled == 1
    assert [rank.rank for rank in run.ranks] == [0, 1]
    for rank in run.ranks:
        assert rank.step_s.num == STEPS - 1
        assert 0 < rank.waits_s < rank.step_s.median
    other = load_record(run_dir / "record-rank1.json")
    assert {row.kind for row in other.events} == {"StepEnded", "CollectiveRan"}
    assert json.loads((run_dir / "config.json").read_text())["zero"]["stage"] == 3


@pytest.mark.slow
def test_lines_and_backend_are_the_users(shown) -> None:
    (entry,) = [e for f in shown["functions"] for e in f["entries"]]
    assert entry["backend"] == "torchloom(aot_eager)"
    assert {"input_ids", "labels"} <= set(entry["trigger"])
    lines = [guard["user_line"] for guard in entry["guards"] if guard["user_line"]]
    assert any("recipes/train/model.py" in line for line in lines)
    assert not [line for line in lines if "_torch/" in line or "shard/" in line]
