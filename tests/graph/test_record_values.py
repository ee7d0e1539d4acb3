"""Values of calls that a pass of somebody else inserted."""

from __future__ import annotations

import torch
from torch import fx

from torchloom._torch.tensors import fake_mode
from torchloom.graph import record_values, storage_of

aten = torch.ops.aten


def test_calls_get_values_of_their_own() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    missing = graph.call_function(torch.sin, (x,))
    lent = graph.call_function(aten.mul.Tensor, (x, 2.0))
    in_place = graph.call_function(aten.add_.Tensor, (lent, x))
    view = graph.call_function(aten.view.default, (lent, [2, 3]))
    graph.output((missing, in_place, view))
    with fake_mode():
        x.meta["val"] = torch.empty(6)
    lent.meta["val"] = x.meta["val"]
    record_values(graph)
    assert missing.meta["val"].shape == (6,) and view.meta["val"].shape == (2, 3)
    assert storage_of(lent) == storage_of(in_place) == storage_of(view)
    assert len({storage_of(each) for each in (x, missing, lent)}) == 3
