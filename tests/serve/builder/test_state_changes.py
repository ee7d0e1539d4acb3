"""A call that changes what the next one reads: refused by name, unless what it makes stays what it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from serve.models import rows
from torchloom.errors import ServeError
from torchloom.serve import Contract, build, maybe

X = torch.randn(3, 16)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, x):
        self.n += 1
        return x * self.n


class LooksBack(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = None

    def forward(self, x):
        y = x if self.before is None else x + self.before.sum()
        self.before = x * 1
        return y


class SetsAnother(nn.Module):
    """Changes for some sizes what it reads for others."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        if x.shape[0] < 4:
            self.scale = 2.0
            return x + 1
        return x * self.scale


REFUSED = {Counts: r"self\.n was 0, is 1", LooksBack: r"self\.before was None, is tensor"}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_changes_what_it_reads_is_refused_by_name(kind):
    with (
        torch.no_grad(),
        pytest.raises(ServeError, match="forward changes what it reads") as caught,
    ):
        build(kind().eval(), rows(), backend="eager")
    assert caught.match(REFUSED[kind])


def test_what_sizes_of_another_program_read_counts_too():
    with torch.no_grad(), pytest.raises(ServeError, match=r"self\.scale was 1\.0, is 2\.0"):
        build(SetsAnother().eval(), rows(), backend="eager", shapes="split")


class Remembers(nn.Module):
    """Writes what it never reads, and a buffer that it does read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.rows = 0

    def forward(self, x, mask=None):
        if not torch.compiler.is_compiling():
            self.calls = getattr(self, "calls", 0) + 1
        self.rows = x.shape[0]
        self.total.add_(1)
        return x * self.total if mask is None else x * mask


def test_what_nothing_reads_and_buffers_may_change():
    model, twin = Remembers().eval(), Remembers().eval()
    contract = Contract({**rows().args, "mask": maybe(*rows().args["x"].shape)})
    with torch.no_grad():
        program = build(model, contract, backend="eager")
        for _ in range(3):
            assert torch.equal(program(X), twin(X))
    assert model.rows == 3
