"""Random operators that backward runs again: graphs say what they return, as of any other call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from support.planned import Captured
from torchloom.graph import Choices

AGAIN = ("run_and_save_rng_state", "run_with_rng_state")


def dropped(x: Tensor) -> Tensor:
    return functional.dropout(x, 0.3, training=True)


def several_kinds(x: Tensor) -> Tensor:
    noise = torch.rand(3, 1) + torch.randint(0, 5, (7,))
    leaky = functional.rrelu(x.unsqueeze(1), training=True).squeeze(1)
    return functional.dropout1d(leaky + noise, 0.4) * torch.bernoulli(x.sigmoid())


def attended(x: Tensor) -> Tensor:
    heads = x.view(1, 1, 3, 7)
    return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).view(3, 7)


class Layers(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.draw = draw

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = checkpoint(lambda layer, x: self.draw(layer(x)), layer, x, use_reentrant=False)
        return (x.square().sum(),)


class Compared(fx.Interpreter):
    """Runs a graph, and compares each value with what the graph says of it."""

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n.op == "call_function":
            told = fx.node.map_aggregate(n.meta["val"], _facts)
            assert fx.node.map_aggregate(found, _facts) == told, n
        return found


def _facts(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)


@pytest.mark.parametrize("draw", [dropped, several_kinds, attended])
def test_what_draws_return_is_recorded(draw) -> None:
    torch.manual_seed(0)
    model = Layers(draw)
    planned = Captured(model, [torch.randn(3, 7)]).planned(Choices())
    counts = [
        [str(node.target) for node in gm.graph.nodes].count(name)
        for gm, name in zip((planned.forward, planned.backward), AGAIN, strict=True)
    ]
    assert counts[0] == counts[1] > 0
    with torch.no_grad():
        results = Compared(planned.forward).run(*planned.inputs)
        inputs = planned.backward.graph.find_nodes(op="placeholder")
        assert [each.name.startswith("tangents") for each in inputs[-2:]] == [False, True]
        assert len(results) == len(inputs)  # one result, and what is kept
        Compared(planned.backward).run(*results[1:], torch.ones_like(results[0]))
