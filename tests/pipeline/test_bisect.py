"""Finding the stage or the pass that changes a result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens
from support.pool import run_ranks
from support.runs import make_engine
from torchloom.errors import BackendError
from torchloom.graph import GraphPass


def fn(inputs):
    x = inputs["x"].sin()
    return {"out": torch.exp(x) * 2, "x": x}


def arguments():
    return {"x": torch.linspace(-1, 1, 7, requires_grad=True)}


def wrong_exp(gm, example_inputs):
    for node in gm.graph.nodes:
        if node.target is torch.exp:
            node.target = torch.expm1
    gm.recompile()
    return gm.forward


def test_nothing_differs() -> None:
    found = torchloom.bisect(fn, arguments(), backend="aot_eager")
    assert found == (None, None, None, "")
    assert str(found) == "every stage equals eager"
    compiled = torch.compile(fn, backend="eager")
    compiled(arguments())
    before = len(torchloom.entries(compiled))
    assert torchloom.bisect(compiled, arguments(), backend="eager").stage is None
    assert len(torchloom.entries(compiled)) == before


def test_a_wrong_backend_and_its_node() -> None:
    found = torchloom.bisect(fn, arguments(), backend=wrong_exp)
    assert found.stage == "wrong_exp"
    assert found.node is not None
    assert "node 'exp' = torch.exp" in found.node
    assert "elements differ" in found.text


def forget_a_factor(gm, ctx):
    """A pass that loses a multiplication."""
    num_edits = 0
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.mul.Tensor and node.args[1] == 2:
            node.replace_all_uses_with(node.args[0])
            num_edits += 1
    return num_edits


def do_nothing(gm, ctx):
    return 0


def test_a_wrong_pass_of_ones_own() -> None:
    good = GraphPass(name="good", fn=do_nothing, stage="joint")
    bad = GraphPass(name="bad", fn=forget_a_factor, stage="joint")
    found = torchloom.bisect(fn, arguments(), backend="aot_eager", passes=[good, bad])
    assert (found.stage, found.pass_name) == (None, "bad")
    assert "pass 'bad' is the first" in str(found)


def test_a_module_with_its_parameters_and_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    assert torchloom.bisect(model, torch.randn(8, 4), backend="aot_eager").stage is None


def test_the_preset_of_a_sharded_model() -> None:
    def run(rank):
        _, model = make_engine(3)
        return torchloom.bisect(model, tokens(0, rank), backend="aot_eager", rtol=1e-4, atol=1e-5)

    assert run_ranks(2, run) == [(None, None, None, "")] * 2


def test_bad_input() -> None:
    with pytest.raises(BackendError, match="together"):
        torchloom.bisect(fn, arguments(), rtol=1e-3)
