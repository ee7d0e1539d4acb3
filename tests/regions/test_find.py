"""Equal parts of graphs that Dynamo captured."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from torchloom.regions import Found, find_regions


def captured(model: Any, *args: Any) -> torch.fx.GraphModule:
    found = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()  # sizes that were seen to vary would be symbols
    torch.compile(model, backend=backend)(*args)
    (gm,) = found
    return gm


def regions(model: Any, *args: Any, min_repeats: int = 4) -> Found:
    return find_regions(captured(model, *args).graph, min_repeats)


def layer(dim: int = 6, act: type[nn.Module] = nn.GELU) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), act(), nn.Linear(2 * dim, dim))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = self.first(x)
        for each in self.layers:
            x = x + each(x)
        return x.sum()


def test_parts_are_cut_where_one_value_crosses() -> None:
    (group,) = regions(Stack(*(layer() for _ in range(5))), torch.randn(3, 6)).groups
    assert len(group) == 5
    for part in group:
        assert len(part.results) == 1
        values = {node.name for node in part.operands if node.op != "placeholder"}
        assert len(values) == 1
    for part, after in itertools.pairwise(group):
        assert part.results[0] in after.operands


def test_other_shapes_dtypes_and_constants_are_other_forms() -> None:
    x = torch.randn(3, 6)
    stacks = {
        "widths": [
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, n), nn.GELU(), nn.Linear(n, 6))
            for n in range(4, 8)
        ],
        "constants": [
            nn.Sequential(
                nn.LayerNorm(6, eps=10.0**-n), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)
            )
            for n in range(3, 7)
        ],
        "operators": [layer(act=act) for act in (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh)],
        "biases": [
            nn.Sequential(
                nn.LayerNorm(6),
                nn.Linear(6, 6, bias=n % 3 == 0),
                nn.Linear(6, 6, bias=n % 2 == 0),
                nn.GELU(),
            )
            for n in range(4)
        ],
    }
    for name, layers in stacks.items():
        assert regions(Stack(*layers), x).groups == (), name


def test_frozen_layers_are_another_form() -> None:
    layers = [layer() for _ in range(9)]
    for each in layers[5:]:
        each.requires_grad_(False)
    groups = regions(Stack(*layers), torch.randn(3, 6)).groups
    assert [len(each) for each in groups] == [5, 4]


def test_an_encoder_and_a_decoder_are_two_groups() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(layer() for _ in range(4))
            self.decoder = nn.ModuleList(layer(act=nn.SiLU) for _ in range(6))
            self.first = nn.Linear(6, 6)

        def forward(self, x, y):
            x, y = self.first(x), self.first(y)
            for each in self.encoder:
                x = x + each(x)
            for each in self.decoder:
                y = y + each(y) * x
            return y.sum()

    groups = regions(Both(), torch.randn(3, 6), torch.randn(3, 6)).groups
    assert [len(each) for each in groups] == [4, 6]


def test_a_result_that_shows_the_memory_of_an_operand_is_refused() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(6)) for _ in range(5))

        def forward(self, x):
            states = []
            for scale in self.scales:
                states.append(x.view(-1, 2))
                x = torch.tanh(x * scale) + torch.sin(x) * 2
            return x.sum() + sum(each.sum() for each in states)

    for group in regions(Views(), torch.randn(3, 6)).groups:
        for part in group:
            storages = {n.meta["example_value"].untyped_storage()._cdata for n in part.operands}
            for node in part.results:
                assert node.meta["example_value"].untyped_storage()._cdata not in storages


def test_what_makes_layers_differ_is_told() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer() for _ in range(5))

        def forward(self, x):
            for index, each in enumerate(self.layers):
                x = x + each(x) * (index + 1) ** -0.5
            return x.sum()

    found = regions(Scaled(), torch.randn(3, 6))
    assert found.groups == ()
    (reason,) = found.reasons
    assert "5 parts of" in reason
    assert "%mul and %mul_1 differ in arguments" in reason
