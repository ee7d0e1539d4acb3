"""`place` where the sizes of a weight are values of the graph."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from support.graphs import apply
from torchloom import ops
from torchloom.graph import find


@pytest.mark.parametrize("sizes", [(5,), (5, 3, 1)])
def test_padding_is_cut_off_by_a_value_of_the_graph(sizes: tuple[int, ...]) -> None:
    numel = torch.Size(sizes).numel()

    def weight(shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        shape = list(like.shape)
        return ops.gather(shard, shape, torch.float32, torch.float32, "2x1#test", "w") + like

    shard, like = torch.randn(-(-numel // 2)), torch.randn(sizes)
    gm = make_fx(weight, tracing_mode="symbolic")(shard, like)
    apply(gm, ["place"])
    assert not find(gm.graph, ops.gather)
    for node in find(gm.graph, torch.ops.aten.slice.Tensor):
        end = node.args[3]
        assert isinstance(end, (int, torch.fx.Node)), "a symbol has no name in the code of a graph"
    gm.graph.lint()
    assert "sym" in gm.code


def test_numbers_stay_numbers() -> None:
    def weight(shard: torch.Tensor) -> torch.Tensor:
        return ops.gather(shard, [5, 3], torch.float32, torch.float32, "2x1#test", "w") + 1

    gm = make_fx(weight, tracing_mode="fake")(torch.randn(8))
    apply(gm, ["place"])
    (cut,) = find(gm.graph, torch.ops.aten.slice.Tensor)
    assert cut.args[3] == 15
