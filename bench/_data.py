"""Real text for every configuration: the sources of Python's standard library, one token a byte.

A batch depends on the seed, the step and the rank only, so all configurations see the same data.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_MAX_BYTES = 4 << 20

Batch = tuple[Tensor, Tensor]
"""Tokens and targets."""


def read_corpus() -> Tensor:
    """Return the first 4 MiB of the standard library's top-level sources as token ids."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _MAX_BYTES:
            break
    return torch.frombuffer(text[:_MAX_BYTES], dtype=torch.uint8)


def batches(
    corpus: Tensor, *, batch: int, seq_len: int, rank: int, seed: int = 0
) -> Iterator[Batch]:
    """Yield (tokens, targets) without end; targets are the tokens one byte later."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    while True:
        yield _cut(corpus, batch, seq_len, generator)


def _cut(corpus: Tensor, batch: int, seq_len: int, generator: torch.Generator) -> Batch:
    """A function, so that nothing but the batch lives on while a step runs."""
    starts = torch.randint(len(corpus) - seq_len - 1, (batch, 1), generator=generator)
    windows = corpus[starts + torch.arange(seq_len + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
