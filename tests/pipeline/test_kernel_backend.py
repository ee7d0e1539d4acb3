"""The plain backend with chosen kernels: `torch.compile(model, backend="torchloom", ...)`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchloom import ops
from torchloom._torch.onednn import has_onednn_linear
from torchloom.graph import find
from torchloom.pipeline.backend import weave
from torchloom.plan.costs import kernels

pytestmark = pytest.mark.skipif(not has_onednn_linear(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHLOOM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "MARGIN", 1e9)
    torch._dynamo.reset()


def train_once(fn, model, x):
    loss = fn(x)
    loss.backward()
    grads = [param.grad for param in model.parameters()]
    model.zero_grad()
    return loss, *grads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 14), nn.Linear(14, 5, bias=False)

    def forward(self, x):
        return F.gelu(self.second(F.silu(self.first(x)))).square().mean()


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor", "a compiler of one's own"])
def test_same_losses_and_gradients(lowering: str) -> None:
    num_chosen = []

    def own(gm, example_inputs):
        num_chosen.append(len(find(gm.graph, ops.matmul)))
        return gm.forward

    model, x = Net(), torch.randn(3, 7, 9)
    wanted = train_once(model, model, x)
    options = {"lowering": own if " " in lowering else lowering, "strict": True}
    compiled = torch.compile(model, backend=weave, options={**options, "choose_kernels": True})
    for result, value in zip(train_once(compiled, model, x), wanted, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-5, atol=1e-7)
    if " " in lowering:
        assert num_chosen == [2, 3]


def test_dynamic_sizes_keep_one_graph() -> None:
    model, num_graphs = Net(), []

    def own(gm, example_inputs):
        num_graphs.append(len(find(gm.graph, ops.matmul)))
        return gm.forward

    options = {"lowering": own, "choose_kernels": True}
    compiled = torch.compile(model, backend=weave, options=options, dynamic=True)
    for batch in (3, 6, 11):
        x = torch.randn(batch, 7, 9)
        for result, value in zip(
            train_once(compiled, model, x), train_once(model, model, x), strict=True
        ):
            torch.testing.assert_close(result, value, rtol=1e-5, atol=1e-7)
    assert num_graphs == [2, 3]


def test_half_precision_is_left_to_torch() -> None:
    seen = []

    def own(gm, example_inputs):
        seen.append(len(find(gm.graph, ops.matmul)))
        return gm.forward

    model = Net().bfloat16()
    compiled = torch.compile(
        model, backend=weave, options={"lowering": own, "choose_kernels": True}
    )
    compiled(torch.randn(3, 9).bfloat16()).backward()
    assert seen == [0, 0]


def test_a_fresh_process_needs_no_engine(tmp_path) -> None:
    code = (
        "import sys, torch\n"
        "from torchloom.plan.costs import kernels\n"
        "from torchloom.pipeline.backend import weave\n"
        "assert 'torchloom.runtime' not in sys.modules\n"
        "kernels.MARGIN = 1e9\n"
        "model, x = torch.nn.Linear(9, 4), torch.randn(3, 9)\n"
        "options = {'lowering': 'aot_eager', 'choose_kernels': True, 'strict': True}\n"
        "compiled = torch.compile(model, backend=weave, options=options)\n"
        "torch.testing.assert_close(compiled(x), model(x))\n"
        "assert 'torchloom.engine' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
