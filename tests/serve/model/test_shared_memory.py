"""Tensors that share memory are another model than tensors that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve.model.edits import COUNT, FORWARD, HEAD, made
from serve.models import rows
from torchloom.errors import ArtifactError
from torchloom.serve import build, load
from torchloom.serve.model.shared_memory import overlaps
from torchloom.serve.model.target import Target


def pair(init: str, value: str, old: str, new: str, top: str = "") -> tuple[str, str]:
    text = HEAD + top + FORWARD % (init, value)
    assert old in text
    return text, text.replace(old, new)


A = "self.register_buffer('a', torch.ones(16)); "
WRITES = "(self.a.add_(1), x * self.b + self.a)[1]"
CASES = {
    "view": pair(
        A + "self.register_buffer('b', torch.ones(16))",
        WRITES,
        "'b', torch.ones(16)",
        "'b', self.a.view(16)",
    ),
    "part": pair(
        "c = torch.ones(32); self.register_buffer('a', c[:16]); self.register_buffer('b', c[16:])",
        WRITES,
        "c[16:]",
        "c[8:24]",
    ),
    "another part": pair(
        "c = torch.ones(32); self.register_buffer('a', c[:16]); self.register_buffer('b', c[8:24])",
        WRITES,
        "c[8:24]",
        "c[4:20]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tensors_that_share_other_memory_are_a_miss(name, tmp_path):
    before, after = CASES[name]
    module, store = f"shared_{next(COUNT)}", tmp_path / "store"
    build(made(before, module), rows(), backend="eager", store=store, check="off")
    load(store, made(before, module))
    with pytest.raises(ArtifactError, match="memory"):
        load(store, made(after, module))


def test_overlaps_are_told_by_the_earliest_tensor():
    memory = torch.zeros(64)
    tensors = [torch.zeros(8), memory[8:16], memory[:4], memory[12:20], memory, memory[40:]]
    assert overlaps(tensors) == {3: (1, 16), 4: (1, -32), 5: (4, 160)}
    array = np.zeros(8, np.float32)
    assert overlaps([torch.from_numpy(array), torch.from_numpy(array[2:])]) == {1: (0, 8)}
    assert (
        overlaps([torch.zeros(0), torch.zeros(3, device="meta"), torch.zeros(2).to_sparse()]) == {}
    )


def test_a_structure_names_the_tensor_whose_memory_it_is(tmp_path):
    model = made(CASES["view"][1], f"shared_{next(COUNT)}")
    structure = Target(model).structure()
    assert structure["b"].endswith("in the memory of a, 0 bytes on")
    assert "memory" not in structure["a"]
