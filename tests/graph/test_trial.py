"""Trials on copies of a graph look up what calls return."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchloom.graph import KnownValues, call

aten = torch.ops.aten


def fake(*, static_shapes: bool = True) -> torch.Tensor:
    """Return a fake tensor of 3 rows and 5 columns."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        return mode.from_tensor(torch.ones(3, 5), static_shapes=static_shapes)


def placed(value: object, scale: float) -> list[torch.Tensor]:
    """Insert the same product twice, and a view of the second, into a graph of its own."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    first = call(graph, aten.mul.Tensor, (x, scale))
    second = call(graph, aten.mul.Tensor, (x, scale))
    return [
        each.meta["val"] for each in (first, second, call(graph, aten.view.default, (second, [-1])))
    ]


def test_later_trials_find_the_values_of_the_first() -> None:
    x = fake()
    known = KnownValues()
    with known.trial():
        first = placed(x, 2.0)
    with known.trial():
        again = placed(x, 2.0)
        other = placed(x, 2)
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert not any(a is b for a, b in zip(first, other, strict=True))


def test_equal_calls_of_one_trial_have_memory_of_their_own() -> None:
    x = fake()
    with KnownValues().trial():
        first, second, view = placed(x, 2.0)
    storages = [each.untyped_storage()._cdata for each in (first, second, view)]
    assert storages[0] != storages[1] == storages[2]


def test_sizes_that_vary() -> None:
    x = fake(static_shapes=False)
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    with KnownValues().trial():
        shape = [x.shape[1], x.shape[0]]
        for _ in range(2):
            assert list(call(graph, aten.view.default, (node, shape)).meta["val"].shape) == shape
