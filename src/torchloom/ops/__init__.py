"""Schemas and fakes of torchloom's operators; their bodies live in `torchloom.runtime`.

A pass knows an operator by its schema alone, so passes, planner and their tests run on fake
tensors with no process group. Two families:

* *traced* operators are what a model's properties call, and what the joint graph holds: one node
  for a whole gather or reduction, differentiable.
* *lowered* operators replace them after the forward/backward split: `*_start` issues
  communication for a bucket of tensors, `wait_` blocks until it has arrived, `resident` reads a
  weight that stays gathered.

`gather`, `reduce`, `replicate` and `sync` move tensors between ranks; `offload` and `reload` move
them between the device and host memory (`torchloom.ops.lowered`); `free_` ends their life.

Operators that communicate name their communicator by a `handle` string, the same on all ranks, so that all
ranks build byte-identical graphs and share compile caches.
"""

from __future__ import annotations

from torchloom._torch.untraced import leave_frames_alone
from torchloom.ops import library, losses, lowered, traced
from torchloom.ops.lowered import (
    HOST,
    broadcast_,
    free_,
    gather_start,
    offload,
    offload_start,
    reduce_start,
    reload,
    reload_start,
    resident,
    symmetric_done_,
    symmetric_start,
    sync_start,
    wait_,
)
from torchloom.ops.traced import cast, gather, reduce, replicate, sync

__all__ = [
    "HOST",
    "broadcast_",
    "cast",
    "free_",
    "gather",
    "gather_start",
    "offload",
    "offload_start",
    "reduce",
    "reduce_start",
    "reload",
    "reload_start",
    "replicate",
    "resident",
    "symmetric_done_",
    "symmetric_start",
    "sync",
    "sync_start",
    "wait_",
]

# Autograd calls derivatives, also those that a forward pass takes behind a graph break.
leave_frames_alone(library, losses, lowered, traced)
