"""Models as texts that are edited: built and stored before, asked for after.

There is no file, as in notebooks: what is found is found by facts alone.
"""

from __future__ import annotations

import itertools
import sys
import types

import torch

from serve.models import rows
from torchloom.errors import ArtifactError, ProofError
from torchloom.serve import Program, build, load

HEAD = """
import collections, enum, functools, torch
from torch import nn
import torch.nn.functional as F
"""
FORWARD = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        %s
    def forward(self, x):
        return %s
def model():
    return Model()
"""


def of(init: str, value: str) -> str:
    return HEAD + FORWARD % (init, value)


def pair(init: str, value: str, *edit: str) -> tuple[str, str]:
    text = of(init, value)
    old, new = edit
    assert old in text
    return text, text.replace(old, new)


def top(code: str, value: str, *edit: str) -> tuple[str, str]:
    text = HEAD + code + FORWARD % ("pass", value)
    old, new = edit
    assert old in text
    return text, text.replace(old, new)


COUNT = itertools.count()


def made(source: str, name: str):
    """Return the model that a source makes, as a module of its own under one name for all."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, "<cell>", "exec", dont_inherit=True), module.__dict__)
    torch.manual_seed(0)
    return module.model().eval()


def check(before: str, after: str, folder) -> Program | None:
    """Build a model, edit it and load: return the program that is found, which has to be right."""
    module, x = f"edited_{next(COUNT)}", torch.randn(3, 16)
    before, after = before.replace("NAME", module), after.replace("NAME", module)
    try:
        return _check(before, after, module, x, folder)
    finally:  # they answer to any name, and others go through all modules
        for name in [each for each in sys.modules if each.startswith(module)]:
            del sys.modules[name]


def _check(before, after, module, x, folder):
    first = made(before, module)
    with torch.no_grad():
        try:
            program = build(first, rows(), backend="eager", store=folder / "store")
        except ProofError:  # decimal numbers up to torch 2.12
            assert torch.__version__ < "2.13"
            return None
        torch.testing.assert_close(program(x), first(x), rtol=0, atol=0)
        if not program.variants[0].why_not_stored:  # the same program in another process is a hit
            again = made(before, module)
            torch.testing.assert_close(load(folder / "store", again)(x), first(x), rtol=0, atol=0)
        edited = made(after, module)
        try:
            loaded = load(folder / "store", edited)
        except ArtifactError:
            return None
        torch.testing.assert_close(loaded(x), edited(x), rtol=0, atol=0)
        return loaded
