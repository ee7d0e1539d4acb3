"""The wrapper that Inductor writes runs without data: here as it is written for a GPU, which this machine lacks."""

from __future__ import annotations

import pytest
import torch

from torchloom._torch.tensors import fake_mode
from torchloom.memory.ledger import Ledger
from torchloom.memory.workspace import WorkspaceTable
from torchloom.pieces.wrapper import load_wrapper

CHECKED = """
from torch._C._dynamo.guards import copy_if_misaligned
async_compile = AsyncCompile()
def call(args):
    x, = args
    args.clear()
    x = copy_if_misaligned(x)
    assert_alignment(x, 16, 'input')
    buf0 = empty_strided_cpu((8, ), (1, ), torch.float32)
    return (x, buf0, )
"""


def test_inputs_that_are_checked_for_alignment_are_not_copied(monkeypatch) -> None:
    # Since torch 2.13 code for GPUs asks for addresses, of which fake tensors have none.
    monkeypatch.setattr(torch._C._dynamo.guards, "copy_if_misaligned", pytest.fail, raising=False)
    head = "import torch\nclass AsyncCompile: pass\n"
    ledger = Ledger(WorkspaceTable(measures=False))
    run = load_wrapper(head + CHECKED, ledger.extern)
    assert run is not None
    with fake_mode():
        x = torch.empty(8)
        ledger.ignore([x])
        with ledger:
            same, made = run([x])
    assert same is x and made.shape == (8,) and ledger.peak_bytes == 32
