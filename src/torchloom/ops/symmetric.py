"""Operators for weights that the ranks of one host hold once, whole, in memory that they share.

    symmetric_start(shards)   -> flat whole weights: views, nothing is copied
    wait_(wholes, shards)        all ranks have come this far: the weights may be read
    symmetric_done_(wholes)      all ranks have read them: the weights may change

Between the wait and the end no rank writes; outside of the two anyone may. The schema says that the
results alias the shards, so that no compiler takes their memory for another value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchloom.ops.library import define


def _fake_start(
    shards: Sequence[Tensor],
    params: Sequence[int],
    dtype: torch.dtype,
    world_size: int,
    weights: str,
) -> list[Tensor]:
    return [s.new_empty((s.numel() * world_size,), dtype=dtype) for s in shards]


def _fake_done(wholes: Sequence[Tensor], weights: str) -> None:
    return None


symmetric_start = define(
    "symmetric_start(Tensor(a)[] shards, int[] params, ScalarType dtype, int world_size, "
    "str weights) -> Tensor(a)[]",
    _fake_start,
)
"""Make this rank's shards ready for the others, and return flat views of the whole weights.

`params` are the parameters' places in the shared weights called `weights`."""

symmetric_done_ = define("symmetric_done_(Tensor(a!)[] wholes, str weights) -> ()", _fake_done)
"""Block until all ranks have read the weights that one `symmetric_start` returned."""
