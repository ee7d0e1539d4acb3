"""What programs return and write is what the model returns and writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from serve.models import BATCH, Plain, made, rows
from torchloom.errors import ProofError, ServeError
from torchloom.serve import Contract, build, load, maybe


@dataclass
class Pair:
    """Two tensors."""

    first: Tensor
    second: Tensor


class Named(NamedTuple):
    """Two results."""

    left: Tensor
    right: Tensor | None


class Structured(nn.Module):
    """Returns what it is told to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> object:
        y = x * 2
        match self.kind:
            case "tuple":
                return y, x.sum()
            case "dict":
                return {"y": y, "nested": (y + 1, None)}
            case "dataclass":
                return Pair(y, y + 1)
            case "named":
                return Named(y, None)
            case "input":
                return x, y
        return y


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "named", "input"])
def test_the_structure_of_results_is_kept_fresh_and_loaded(kind, tmp_path):
    model = Structured(kind).eval()
    fresh = build(model, rows(), backend="eager", store=tmp_path)
    for program in (fresh, load(tmp_path, model)):
        x = torch.randn(3, 16)
        with torch.no_grad():
            wanted, found = model(x), program(x)
        assert type(found) is type(wanted)
        assert repr(found) == repr(wanted)
        if kind == "input":
            assert found[0] is x


class Masked(nn.Module):
    """Has an optional argument and a switch."""

    def forward(self, x: Tensor, mask: Tensor | None = None, negate: bool = False) -> Tensor:
        if mask is not None:
            x = x * mask
        return -x if negate else x


def test_optional_arguments_have_programs_for_both():
    contract = Contract({"x": (BATCH, 16), "mask": maybe(BATCH, 16)}, fixed={"negate": True})
    program = build(Masked().eval(), contract, backend="eager")
    x, mask = torch.randn(3, 16), torch.rand(3, 16)
    with torch.no_grad():
        assert torch.equal(program(x, negate=True), -x)
        assert torch.equal(program(x, mask), -x * mask)
        assert torch.equal(program(mask=mask, x=x), -x * mask)


def test_calls_from_many_threads():
    model = made(Plain)
    program = build(model, rows())
    wrong: list[int] = []

    def call(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for n in range(1, 65):
                x = torch.randn(n, 16, generator=draw)
                if not torch.allclose(program(x), model(x), atol=1e-5):
                    wrong.append(n)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))
    assert not wrong


class Pools(nn.Module):
    def forward(self, x):
        return torch.nn.functional.avg_pool1d(x.t()[None], 2)


class Counts(nn.Module):
    def forward(self, x):
        return len(x)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Pools(), r"Pools itself, run on example arguments at batch 1, fails with RuntimeError"),
        (Counts(), "the call computes nothing on tensors"),
    ],
)
def test_models_that_cannot_run_are_refused_in_a_sentence(model, text):
    with pytest.raises(ServeError, match=text):
        build(model.eval(), rows(), shapes="bucket", sizes=[64], backend="eager")


def test_random_numbers_are_named_as_the_cause_of_a_difference():
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).train()
    contract = Contract({"input": (BATCH, 16)}, training=True)
    with torch.no_grad():
        with pytest.raises(ProofError, match="draws random numbers"):
            build(model, contract, shapes="split")
        build(model, contract, options={"fallback_random": True})
