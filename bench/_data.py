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
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets) without end; targets are the tokens one byte later."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    while True:
        starts = torch.randint(len(corpus) - seq_len - 1, (batch, 1), generator=generator)
        yield _cut(corpus, starts, seq_len)


def _cut(corpus: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """A function, so that nothing but the batch lives on while a step runs."""
    windows = corpus[starts + torch.arange(seq_len + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
