"""Compiled pieces that run as their generated text alone: which do, and that they do the same."""

from __future__ import annotations

import pytest
import torch

from serve.models import BATCH, Kinds, Stack, made
from serve.processes import run
from torchloom.errors import ArtifactError, ContractError, ServeError
from torchloom.serve import Contract, Program, build, load, tensor

ROWS = Contract({"x": (BATCH, 16)})


PLAIN = [
    "returns an argument",
    "returns a view of an argument",
    "returns views of what it writes to",
    "returns views of one result",
    "writes to a buffer",
    "writes to its argument",
    "holds a table",
    "convolves",
]
WRITING = ("writes to its argument", "returns views of what it writes to")
TORCH = ["returns the bits of an argument"]

LOADED = """
import os, sys, torch
from serve.models import Kinds
from torchloom.serve import load
def copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else tuple(map(copied, value))
for kind in sys.argv[1:]:
    torch.manual_seed(3)
    model = Kinds(kind).eval()
    program = load(f"{kind}/store", model)
    x = torch.load(f"{kind}/x.pt")
    with torch.no_grad():
        torch.save(copied((program(x), x, model.seen)), f"{kind}/found.pt")
print("compiler" if "torch._dynamo" in sys.modules or "torch._inductor" in sys.modules else "plain")
"""


def stored(program: Program) -> list[str]:
    """Return in which form each piece is stored."""
    pieces = [piece for variant in program.variants for piece in variant.stored["pieces"]]
    return ["plain" if "plain" in piece else "torch" for piece in pieces]


def views_in(found: object) -> list[torch.Tensor]:
    """Return the results that are views of arguments or of the model's tensors."""
    result, *inputs = found
    owned = {each.untyped_storage().data_ptr() for each in inputs}
    results = result if isinstance(result, tuple) else (result,)
    return [each for each in results if each.untyped_storage().data_ptr() in owned]


@pytest.mark.parametrize(("kinds", "form"), [(PLAIN, "plain"), (TORCH, "torch")])
def test_a_loaded_piece_does_what_the_model_does(kinds, form, tmp_path):
    found = {}
    for kind in kinds:
        torch.manual_seed(3)
        model = Kinds(kind).eval()
        program = build(model, ROWS, shapes="split", store=tmp_path / kind / "store")
        assert set(stored(program)) == {form}
        x = torch.randn(7, 16)[2:]  # which does not begin where its memory does
        torch.save(x, tmp_path / kind / "x.pt")
        here, expected = Kinds(kind).eval(), torch.cat([x[:2], x])[2:]
        here.load_state_dict(model.state_dict())
        with torch.no_grad():
            wanted = here(expected), expected, here.seen
            version = x._version
            found[kind] = program(x), x, model.seen
        assert x._version == version + (kind in WRITING)
        torch.testing.assert_close(found[kind], wanted)
        for one, its in zip(views_in(found[kind]), views_in(wanted), strict=True):
            assert (one.stride(), one.storage_offset()) == (its.stride(), its.storage_offset())
            assert form == "torch" or one._version == one._base._version
    done = run(LOADED, *kinds, cwd=tmp_path)
    assert done.stdout.strip() == ("plain" if form == "plain" else "compiler")
    for kind in kinds:
        again = torch.load(tmp_path / kind / "found.pt")
        torch.testing.assert_close(again, found[kind], rtol=0, atol=0)


def test_loading_and_calling_import_no_compiler(tmp_path):
    build(
        made(Stack, 2),
        Contract({"ids": tensor(BATCH, 5, dtype=torch.int64, below=31)}),
        store=tmp_path,
    )
    code = """
import sys, torch
from serve.models import Stack, made
from torchloom.serve import build, load
program = load(sys.argv[1], made(Stack, 2))
with torch.no_grad():
    program(torch.zeros(3, 5, dtype=torch.int64))
again = build(made(Stack, 2), program.contract, store=sys.argv[1])
assert again.origin == "loaded"
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
    assert run(code, tmp_path, cwd=tmp_path).stdout.strip() == "[]"


def test_calls_and_builds_under_autocast_are_refused():
    model = Kinds("computes").eval()
    program = build(model, ROWS, backend="eager")
    with torch.no_grad(), torch.autocast("cpu"):
        with pytest.raises(ContractError, match="without autocast"):
            program(torch.zeros(3, 16))
        with pytest.raises(ServeError, match="outside"):
            build(model, ROWS, backend="eager")


def test_another_default_dtype_is_a_miss(tmp_path):
    model = Kinds("computes").eval()
    build(model, ROWS, backend="eager", store=tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(
            ArtifactError, match=r"default_dtype.* was torch.float32, is torch.float64"
        ):
            load(tmp_path, model)
    finally:
        torch.set_default_dtype(torch.float32)
