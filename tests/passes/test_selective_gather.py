"""Residents in the graph: which gathers go, which stay."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from support.graphs import CONTEXT, TwoLayers, apply, captured, copy_of
from torchloom import ops
from torchloom.deepcompile.site import Book
from torchloom.graph import Choices, args_of, find
from torchloom.ops.match import gathers


def with_residents(joint, *names: str):
    page = Book().page("digest")
    page.read_joint(joint, needs_backward=True)
    choices = Choices(resident=frozenset(names))
    return dataclasses.replace(CONTEXT, choices=choices, params=page.params)


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("bucketed", [False, True])
def test_only_the_chosen_gather_goes(kind: str, bucketed: bool) -> None:
    graphs = captured(TwoLayers(), [torch.randn(4, 6, requires_grad=True)], ["zero3"])
    context = with_residents(graphs["joint"], "second.weight")
    gm = graphs[kind]
    apply(gm, ["place", "bucket"] if bucketed else ["place"], context)
    before = [node.name for each in gathers(gm.graph) for node in each.inputs]
    apply(gm, ["selective_gather"], context)
    (resident,) = find(gm.graph, ops.resident)
    assert args_of(resident)[-1] == "second.weight"
    assert resident.meta["val"].shape == (40,)
    after = [node.name for each in gathers(gm.graph) for node in each.inputs]
    assert sorted([*after, args_of(resident)[0].name]) == sorted(before)
    assert len(after) == len(before) - 1


def test_all_gathers_go_with_their_waits() -> None:
    graphs = captured(TwoLayers(), [torch.randn(4, 6)], ["zero3"])
    context = with_residents(graphs["joint"], "first.weight", "second.weight")
    gm = graphs["forward"]
    apply(gm, ["place", "bucket", "selective_gather"], context)
    assert find(gm.graph, ops.gather_start) == find(gm.graph, ops.wait_) == []
    assert len(find(gm.graph, ops.resident)) == 2


class Overwrites(nn.Module):
    """Returns one weight, and writes into a copy of the other as far as a graph tells."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Parameter(torch.randn(6, 5))
        self.into = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.tensor([1, 3])
        changed = torch.index_put(self.into, (index,), x)
        return changed.sum(), self.out.view(-1)


def test_a_weight_that_leaves_or_may_be_overwritten_stays_a_gather() -> None:
    graphs = captured(Overwrites(), [torch.randn(2, 5)], ["zero3"])
    context = with_residents(graphs["joint"], "out", "into")
    apply(graphs["forward"], ["place", "selective_gather"], context)
    assert find(graphs["forward"].graph, ops.resident) == []
    assert len(find(graphs["forward"].graph, ops.gather_start)) == 2


def test_stage_2_does_not_save_a_resident_weight() -> None:
    model = TwoLayers()
    graphs = captured(model, [torch.randn(4, 6, requires_grad=True)], stage=2)
    joint = copy_of(graphs["joint"])
    context = with_residents(joint, "second.weight")
    apply(joint, ["zero2"], context)
    tags = {
        args_of(node)[-1]: node.meta["recompute"].name for node in find(joint.graph, ops.gather)
    }
    assert tags == {"first.weight": "MUST_SAVE", "second.weight": "MUST_RECOMPUTE"}
