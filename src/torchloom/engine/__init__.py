"""DeepSpeed's calls: `initialize` and the engine; beside them the names of `loop` for loops of one's own."""

from __future__ import annotations

from torchloom.checkpoints.save_model import save_model
from torchloom.engine.api import initialize
from torchloom.engine.engine import Engine
from torchloom.loop.across_ranks import all_reduce
from torchloom.loop.clip import clip_grad_norm_
from torchloom.loop.compile import compile_model
from torchloom.loop.optimizer_hooks import no_sync
from torchloom.loop.shard_model import shard_model

__all__ = [
    "Engine",
    "all_reduce",
    "clip_grad_norm_",
    "compile_model",
    "initialize",
    "no_sync",
    "save_model",
    "shard_model",
]
