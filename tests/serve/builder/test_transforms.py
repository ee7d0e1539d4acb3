"""Transforms, autocast and gradient modes in layers that repeat: nothing is cut within them, nothing is left entered."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from torchloom._torch.modes import transform_level
from torchloom.errors import ServeError
from torchloom.regions import find_regions
from torchloom.serve import Contract, Dim, build, tensor


class Layer(nn.Module):
    """Uses a transform between operators of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        x = (self.inner(x).sin() * 2).tanh()
        if self.kind in ("vmap", "all"):
            x = torch.func.vmap(lambda row: row.sin() + row.sum())(x)
        if self.kind in ("grad", "all"):
            x = x + torch.func.grad(lambda each: (each.sin() * each).sum())(x)
        if self.kind in ("jvp", "all"):
            x = torch.func.jvp(torch.sin, (x,), (x,))[1]
        if self.kind in ("no_grad", "all"):
            with torch.no_grad():
                scale = (x.abs() + 1).sum(1, keepdim=True)
            x = x / scale
        if self.kind in ("autocast", "all"):
            with torch.autocast("cpu", torch.bfloat16):
                x = (x @ x.t() @ x).float()
        return (x + 1).relu() + x.cos()


def stacked(kind: str, num: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(kind) for _ in range(num)]).eval()


def state() -> tuple:
    return transform_level(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("kind", "backend"), [("all", "inductor"), ("vmap", "eager")])
def test_layers_that_repeat_are_cut_around_them(kind, backend):
    model, rows = stacked(kind, 2), Dim("rows", 2, 8)
    before = state()
    with torch.no_grad():
        program = build(
            model, Contract({"input": tensor(rows, 8)}), backend=backend, shapes="split"
        )
        for num in (2, 5, 8):
            x = torch.randn(num, 8)
            torch.testing.assert_close(program(x), model(x), atol=1e-2, rtol=1e-2)
    assert state() == before


def test_code_of_other_sizes_is_not_taken_for_that_of_these():
    """Torch cannot hash such a graph, and caches it under a random number: under one seed, the same one."""
    rows = Dim("rows", 2, 8)
    for shapes, sizes in (("split", []), ("split", [2])):
        random.seed(7)
        with torch.no_grad():
            model = stacked("all", 2)
            contract = Contract({"input": tensor(rows, 8)})
            program = build(model, contract, backend="inductor", shapes=shapes, sizes=sizes)
            x = torch.randn(5, 8)
            torch.testing.assert_close(program(x), model(x), atol=1e-2, rtol=1e-2)


def test_what_a_build_that_fails_has_entered_it_leaves():
    before = state()

    def failing(graph_module, inputs):
        torch._C._functorch._vmap_increment_nesting(3, "error")
        torch.set_grad_enabled(False)
        torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
        raise ValueError("a compiler's own")

    with torch.enable_grad(), pytest.raises((ServeError, ValueError)):
        build(stacked("vmap", 2), Contract({"input": tensor(4, 8)}, grad="grad"), backend=failing)
    assert state() == before
    torch.randn(2)


@pytest.mark.parametrize("kind", ["vmap", "no_grad"])
def test_regions_of_training_lie_around_them(kind):
    found = []

    def backend(graph_module, inputs):
        found.append(find_regions(graph_module.graph))
        return graph_module.forward

    torch.compile(stacked(kind, 6), backend=backend, fullgraph=True)(torch.ones(4, 8))
    for part in (part for group in found[0].groups for part in group):
        names = [str(node.target) for node in part.nodes]
        assert sum("set_grad" in name for name in names) in (0, 2)
        assert not any("nesting" in name for name in names)
        modes = [node.args[0] for node in part.nodes if "set_grad" in str(node.target)]
        assert modes in ([], [False, True])
