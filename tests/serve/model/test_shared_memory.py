"""Tensors that share memory are another model than tensors that do not."""

from __future__ import annotations

import torch
from torch import nn

from torchloom.serve.model.target import Target


class Held(nn.Module):
    def __init__(self, **tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return x


def test_a_structure_names_the_tensor_whose_memory_it_is():
    memory = torch.zeros(64)
    one = Target(Held(a=torch.zeros(8), b=memory, c=memory[12:20], d=memory[40:])).structure()
    assert one["c"].endswith("in the memory of b, 48 bytes on")
    assert one["d"].endswith("in the memory of b, 160 bytes on")
    assert not any("memory" in one[name] for name in "ab")
    apart = Target(Held(a=memory[:8], b=memory[8:], c=torch.zeros(0))).structure()
    assert not any("memory" in text for text in apart.values())  # parts that do not touch
    moved = Held(a=torch.zeros(8), b=memory, c=memory[16:24], d=memory[40:])
    assert Target(moved).structure()["c"] != one["c"]
