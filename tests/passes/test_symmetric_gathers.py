"""symmetric_gathers: which weights become views, and where reading begins and ends."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx, nn

from support.graphs import CONTEXT, Tied, TwoLayers, apply, captured, copy_of
from torchloom import ops
from torchloom.graph import SharedWeights, args_of, find, graph_text, positions

X = torch.randn(4, 6)
JOINT = ["dedupe_gathers", "elide_copies", "zero3"]


def sharing(*names: str, dtype: torch.dtype = torch.float32, handle: str = "2x1#test"):
    shared = SharedWeights(
        name="2x1#test/0", handle=handle, params=tuple((name, dtype) for name in names)
    )
    return dataclasses.replace(CONTEXT, shared_weights=shared)


BOTH = sharing("first.weight", "second.weight")


@pytest.fixture(scope="module")
def two_layers() -> dict[str, fx.GraphModule]:
    return captured(TwoLayers(), [X], JOINT)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_golden(two_layers, kind: str, golden) -> None:
    gm = copy_of(two_layers[kind])
    apply(gm, ["symmetric_gathers", "place"], BOTH)
    golden(f"symmetric_gathers.{kind}", graph_text(gm.graph))


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_reading_is_bracketed(two_layers, kind: str) -> None:
    gm = copy_of(two_layers[kind])
    apply(gm, ["symmetric_gathers", "place", "bucket", "prefetch"], BOTH)
    where = positions(gm.graph)
    (start,), (done,) = find(gm.graph, ops.symmetric_start), find(gm.graph, ops.symmetric_done_)
    (wait,) = [n for n in find(gm.graph, ops.wait_) if args_of(n)[0][0].args[0] is start]
    assert not find(gm.graph, ops.gather)
    chain = [pick for pick in start.users if pick is not wait]
    for node in chain:
        for user in node.users:
            if user in (wait, done):
                continue
            assert where[wait] < where[user] < where[done]
            if user.target in (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor):
                chain.append(user)


def test_a_tied_weight_is_one_view() -> None:
    gm = captured(Tied(), [torch.arange(5)], JOINT)["forward"]
    assert apply(gm, ["symmetric_gathers"], sharing("table.weight")).passes[0].num_edits == 1
    (start,) = find(gm.graph, ops.symmetric_start)
    assert len(args_of(start)[0]) == 1


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8, bias=False)

    def forward(self, x):
        return self.inner(x), self.inner.weight.T[1:]


class Patched(Returned):
    def forward(self, x):
        weight = self.inner.weight.index_put((torch.tensor([1]),), torch.tensor(2.0))
        return nn.functional.linear(x, weight)


@pytest.mark.parametrize("model", [Returned, Patched])
def test_a_weight_that_leaves_or_may_be_written_is_gathered(model) -> None:
    gm = captured(model(), [X], JOINT)["forward"]
    apply(gm, ["symmetric_gathers"], sharing("inner.weight"))
    assert find(gm.graph, ops.gather)
    assert not find(gm.graph, ops.symmetric_start)
