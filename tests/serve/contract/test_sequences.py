"""Arguments that are lists and tuples of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from serve.models import BATCH
from torchloom.errors import ContractError
from torchloom.serve import Contract, Dim, build, load, tensor


class Sums(nn.Module):
    """Takes a list of pairs, as caches are."""

    def forward(self, x, layers):
        for keys, values in layers:
            x = x + keys * values
        return x


class Writes(nn.Module):
    """Writes into what a list holds."""

    def forward(self, x, caches):
        for place, cache in enumerate(caches):
            cache.add_(x * (place + 1))
        return x + caches[-1]


def pairs(n: int):
    return [(torch.randn(n, 16), torch.randn(n, 16)) for _ in range(2)]


CONTRACT = Contract({"x": (BATCH, 16), "layers": [((BATCH, 16), (BATCH, 16))] * 2})


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_lists_of_tuples(backend, tmp_path):
    model = Sums().eval()
    with torch.no_grad():
        program = build(model, CONTRACT, backend=backend, store=tmp_path)
        for each in (program, load(tmp_path, model)):
            for n in (1, 3, 64):
                x, layers = torch.randn(n, 16), pairs(n)
                torch.testing.assert_close(each(x, layers), model(x, layers))
                torch.testing.assert_close(each(x, layers=layers), model(x, layers))


def test_what_is_no_such_list_says_so():
    with torch.no_grad():
        program = build(Sums().eval(), CONTRACT, backend="eager")
        x = torch.randn(3, 16)
        for layers, text in (
            (pairs(3)[:1], "'layers' holds 1 values, the contract wants 2"),
            (tuple(pairs(3)), "'layers' is a tuple, the contract wants a list"),
            (
                [pairs(3)[0], list(pairs(3)[1])],
                r"'layers\.1' is a list, the contract wants a tuple",
            ),
            ([pairs(3)[0], pairs(4)[1]], r"'layers\.1\.0'"),
            ([pairs(3)[0], (x, None)], r"'layers\.1\.1' is NoneType"),
            (None, "'layers' is a NoneType"),
        ):
            with pytest.raises(ContractError, match=text):
                program(x, layers)


def test_caches_in_a_list_are_written_in_place():
    model, contract = Writes().eval(), Contract({"x": (BATCH, 16), "caches": [(BATCH, 16)] * 3})
    with torch.no_grad():
        program = build(model, contract, backend="inductor")
        x = torch.randn(4, 16)
        ours, theirs = ([torch.zeros(4, 16) for _ in range(3)] for _ in "ab")
        for _ in range(2):
            torch.testing.assert_close(program(x, ours), model(x, theirs))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
        with pytest.raises(ContractError, match=r"'caches\.0' and 'caches\.1' share memory"):
            program(x, [ours[0], ours[0], ours[2]])


def test_lists_are_padded():
    model = Sums().eval()
    dim = Dim("batch", 1, 8)
    contract = Contract({"x": tensor(dim, 16), "layers": [(tensor(dim, 16), tensor(dim, 16))]})
    with torch.no_grad():
        program = build(model, contract, backend="eager", shapes="bucket", sizes=[4, 8])
        for n in (1, 3, 4, 7):
            x, layers = torch.randn(n, 16), pairs(n)[:1]
            torch.testing.assert_close(program(x, layers), model(x, layers))
