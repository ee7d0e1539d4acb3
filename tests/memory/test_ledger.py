"""What a ledger remembers of operators must not keep alive what it counts."""

from __future__ import annotations

import torch

from torchloom._torch.tensors import fake_mode
from torchloom.memory.ledger import Ledger
from torchloom.memory.workspace import WorkspaceTable


def test_operators_that_are_never_measured_keep_nothing_alive() -> None:
    with fake_mode():
        x = torch.empty(1000)
        ledger = Ledger(WorkspaceTable(measures=False))
        ledger.ignore([x])
        with ledger:
            for _ in range(5):
                y = x + 1
                ledger.extern(torch.ops.aten.mul.Tensor, (y, y), {})
                del y
    assert ledger.peak_bytes == 4000 and not ledger.calls


def test_operators_that_draw_again_in_backward_are_counted() -> None:
    rng_prims = torch._prims.rng_prims
    with fake_mode():
        x = torch.empty(1000)
        ledger = Ledger(WorkspaceTable(measures=False))
        ledger.ignore([x])
        with ledger:
            state, drawn = rng_prims.run_and_save_rng_state(torch.ops.aten.rand_like.default, x)
            again = rng_prims.run_with_rng_state(state, torch.ops.aten.rand_like.default, x)
    assert ledger.peak_bytes == 2 * 4000 + state.nbytes and drawn.shape == again.shape
