"""The first look at what is alive when."""

from __future__ import annotations

import torch

from torchloom.graph import live_bytes


def graph_of(fn, *inputs):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn, tracing_mode="fake")(*inputs).graph


def test_a_value_lives_until_its_last_use() -> None:
    def fn(x):
        a = x * 2  # 16 bytes each
        b = a + 1
        return b * x

    assert live_bytes(graph_of(fn, torch.ones(4))) == (16, 32, 32, 16, 0)


def test_a_view_keeps_what_it_views_and_costs_nothing() -> None:
    def fn(x):
        a = x * 2
        view = a.view(2, 2)
        return view.sum() + x.sum()

    curve = live_bytes(graph_of(fn, torch.ones(4)))
    assert curve[:3] == (16, 32, 32)
    assert max(curve) < 48
