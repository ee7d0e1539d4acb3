"""Code for a GPU, made where there is none. `UPDATE_GOLDEN=1` writes the expected orders anew."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from torchloom._torch import no_driver
from torchloom.cli import make_app
from torchloom.errors import PlanError
from torchloom.simulation.lower import order_of, prepare

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = """
from torchloom.recipes.train.model import Llama, LlamaConfig

def tiny(batch, seq_len):
    return Llama(LlamaConfig(
        vocab_size=1024, dim=512, num_layers=8, num_heads=8, hidden_dim=1408, max_seq_len=seq_len
    ))
"""
WRAPPER = """
def body_1_forward(args):
    a, b = args
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        triton_poi_fused_0.run(a, b, 8, stream=raw_stream0)
        extern_kernels.mm(a, b, out=c)
        extern_kernels.mm(c, b, out=a)
    return (a, )

def segment_0(args):
    a, b, = args
    args.clear()
    more = torch.ops.torchloom.gather_start([b], ['c'], torch.float32, 2, '2x1#0')
    c = more[0]
    more = None
    args = [a, b]
    a = None
    d = body_1_forward(args)
    return [c, d]

class Runner:
    def call(self, args):
        x, = args
        with torch.cuda._DeviceGuard(0):
            buf0 = torch.ops.torchloom.gather_start.default([x, y], ['a', 'b'], torch.float32, 2, '2x1#0')
            buf1 = buf0[0]
            buf2 = buf0[1]
            del buf0
            buf3 = empty_strided_cuda((8, ), (1, ), torch.float32)
            torch.ops.torchloom.wait_.default([buf1, buf2], [x, y], '2x1#0')
            body_1_forward_args = [buf1, buf2]
            buf4 = body_1_forward(body_1_forward_args)
            segment_0_args = [buf1, buf4]
            del buf1
            buf7 = segment_0(segment_0_args)
            buf8 = buf7[0]
            buf4 = buf7[1]
            torch.ops.torchloom.wait_.default([buf8], [x], '2x1#0')
            del buf2; del buf3  # reuse
            buf5 = torch.ops.torchloom.offload_start.default([buf4])
            buf6 = buf5[0]
            torch.ops.torchloom.wait_.default([buf6], [buf4], '')
        return (buf6, )
"""


def test_the_order_of_a_wrapper() -> None:
    assert order_of(ast.parse(WRAPPER)) == [
        "start gather a and 1 more",
        "wait gather a and 1 more",
        "call body 1",
        "start gather c",
        "free gather a",
        "call body 1",
        "wait gather c",
        "free gather b",
        "start offload buf4",
        "wait offload buf4",
        "body 1:",
        "  run kernel, 2 mm",
    ]


def test_what_is_lacking_is_named(monkeypatch) -> None:
    command = ["plan", "simulate", "--model", "tiny", "--world-size", "8", "--lower"]
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    result = CliRunner().invoke(make_app("plan"), command)
    assert result.exit_code and "has no CUDA or no Triton: install a build that has" in str(
        result.exception
    )
    assert "there is no CUDA architecture for device 'cpu'" in no_driver.why_not_lowered("cpu")
    with pytest.raises(PlanError, match="only below"):
        prepare("h100-80gb", 1)


needs_cuda_build = pytest.mark.skipif(
    bool(no_driver.why_not_lowered("h100-80gb")), reason=no_driver.why_not_lowered("h100-80gb")
)


def simulated(folder: Path, compiling: dict, *options: str) -> dict:
    """Return what the command finds for 8 ranks at stage 3."""
    (folder / "model.py").write_text(MODEL)
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "compile": compiling}
    (folder / "config.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "torchloom", "plan", "simulate", "--lower", "--json"]
    command += ["--model", f"{folder / 'model.py'}:tiny", "--config", f"{folder}/config.json"]
    command += ["--world-size", "8", "--network", "nvlink", "--batch", "2", "--seq-len", "320"]
    ended = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, env=os.environ
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    (found,) = json.loads(ended.stdout)
    lowered = found["lowered"]
    assert lowered["refused"] == {} and len(lowered["kernels"]) > 15
    assert all(num_bytes > 1000 for num_bytes in lowered["kernels"].values())
    # Fusion makes code need less than its graphs.
    assert 0.5 < lowered["code_peak_bytes"] / lowered["graph_peak_bytes"] <= 1
    return found


@needs_cuda_build
@pytest.mark.skipif(
    torch.__version__.split(".")[:2] != ["2", "13"], reason="orders were written with torch 2.13"
)
@pytest.mark.parametrize(
    ("name", "compiling"),
    [
        ("plain", {}),
        ("budget", {"memory_budget": "150MB"}),
        ("offload", {"offload_activation": True}),
    ],
)
def test_eight_layers_become_machine_code_in_the_planned_order(
    name: str, compiling: dict, tmp_path: Path
) -> None:
    found = simulated(tmp_path, compiling)
    lowered = found["lowered"]
    if found["plan"] is not None:
        assert found["plan"]["graphs"][0]["peak_bytes"] == lowered["code_peak_bytes"]
    text = "\n".join(lowered["order"]) + "\n"
    expected = GOLDEN / f"lower.{name}.expected"
    if os.environ.get("UPDATE_GOLDEN"):
        expected.write_text(text)
    assert text == expected.read_text()


@needs_cuda_build
def test_attention_that_checkpointed_layers_compute_again_is_replayed(tmp_path: Path) -> None:
    found = simulated(tmp_path, {"regions": False}, "--checkpointing", "full")
    assert any("graphsafe_run_with_rng_state" in line for line in found["lowered"]["order"])
