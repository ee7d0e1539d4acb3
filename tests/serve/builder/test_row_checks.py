"""Buckets: what decides by size is refused by proof, and what decides by values of all rows by trials."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from serve.models import Of, rows
from torchloom.errors import ProofError
from torchloom.serve import Contract, Dim, build, tensor

BUCKETS = {"shapes": "bucket", "sizes": [8, 50, 64], "backend": "eager"}


@functools.cache
def factor(n: int) -> int:
    return 2 if n == 21 else 1


BY_SIZE = {
    "remainder": lambda x: x * 5 if x.shape[0] % 12 == 0 else x,
    "range": lambda x: x * 5 if 30 < x.shape[0] <= 37 else x,
    "cached function": lambda x: x * factor(x.shape[0]),
}
SAID = r"is not the same program for all of batch 9 to 50(?s:.)*test_row_checks\.py"


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", BY_SIZE)
def test_what_decides_by_a_size_that_is_not_tried_is_refused(name):
    said = SAID if name == "range" else None
    with torch.no_grad(), pytest.raises(ProofError, match=said):
        build(Of(BY_SIZE[name]).eval(), rows(), **BUCKETS)


BY_VALUES = {
    "all": lambda x: torch.where((x > 5).all(), x, -x),
    "vmap": lambda x: torch.vmap(lambda c: c * (c > 5).all(), 1, 1)(x),
    "condition": lambda x: torch.cond((x > 5).all(), lambda x: x * 2, lambda x: x * 3, (x,)),
}


@pytest.mark.parametrize("name", BY_VALUES)
def test_what_decides_by_values_of_all_rows_is_refused(name):
    with torch.no_grad(), pytest.raises(Exception, match="cannot be") as caught:
        build(Of(BY_VALUES[name]).eval(), rows(Dim("batch", 2, 64)), **BUCKETS)
    assert caught.type.__name__ in ("ProofError", "ServeError")


class Net(nn.Module):
    """Works on rows in most of the ways that there are."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.group, self.embed = nn.GroupNorm(2, 4), nn.Embedding(10, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x, ids):
        y = self.group(self.norm(self.conv(x[:, None])).relu())
        z = y.reshape(y.shape[0], -1, 8) + self.embed(ids)[:, None]
        z = z + self.attend(z, z, z, need_weights=False)[0]
        weights = (z @ z.transpose(1, 2)).softmax(-1)
        kept = torch.where(z > 0, z, z.new_zeros(z.shape)).amax(1)
        best = kept.topk(2, 1).values + weights.sum((1, 2))[:, None]
        return {"out": self.out(kept), "best": best, "ids": ids, "order": z.argsort(1)}


def test_models_that_work_within_rows_are_padded():
    torch.manual_seed(0)
    model = Net().eval()
    batch = Dim("batch", 1, 64)
    contract = Contract({"x": (batch, 16), "ids": tensor(batch, dtype=torch.int64, below=10)})
    with torch.no_grad():
        program = build(model, contract, **BUCKETS)
        for n in (1, 3, 9, 37, 64):
            x, ids = torch.randn(n, 16), torch.randint(0, 10, (n,))
            found, wanted = program(x, ids), model(x, ids)
            for name, each in wanted.items():
                torch.testing.assert_close(found[name], each)


WITHIN = {
    "first row": lambda x: x + x[0] + x[:1] + x.select(0, 0) + x.narrow(0, 0, 1),
    "places": lambda x: x + torch.arange(x.shape[0])[:, None],
    "convolution": lambda x: nn.functional.conv1d(x[:, None], torch.ones(16, 1, 3)).sum(1),
    "vmap": lambda x: torch.vmap(lambda row: row.softmax(0))(x),
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_reads_real_rows_alone_is_padded(name):
    model = Of(WITHIN[name]).eval()
    with torch.no_grad():
        program = build(model, rows(), **BUCKETS)
        for n in range(1, 65):
            x = torch.randn(n, 16)
            torch.testing.assert_close(program(x), model(x))
