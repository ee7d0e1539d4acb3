"""torchloom: sharding, communication and memory movement woven into the graph of torch.compile.

Names load lazily: importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchloom import backends, compiler, config, events, records, report, serve, shard
    from torchloom.checkpoints.save_model import save_model
    from torchloom.custom_ops import check_op, custom_op
    from torchloom.engine import Engine, initialize
    from torchloom.errors import PassContractError, TorchloomError
    from torchloom.graph import GraphPass, PassContext
    from torchloom.inspect import entries, expect, explain, explain_call, jit, overhead, watch
    from torchloom.inspect import jit as just_in_time_compile
    from torchloom.loop.across_ranks import all_reduce, pad_tensors
    from torchloom.loop.clip import clip_grad_norm_
    from torchloom.loop.compile import compile_model as compile
    from torchloom.loop.optimizer_hooks import no_sync
    from torchloom.loop.shard_model import shard_model
    from torchloom.pipeline import PassContract, register_compile_pass, validate_schedule
    from torchloom.pipeline.bisect import bisect
    from torchloom.records.diff import diff
    from torchloom.serve import support_torch_compile
    from torchloom.shard.leaf_modules import leaf
    from torchloom.simulation import simulate

__version__ = "0.1.0.dev0"

_EXPORTS = {
    "Engine": ("torchloom.engine", "Engine"),
    "GraphPass": ("torchloom.graph", "GraphPass"),
    "PassContext": ("torchloom.graph", "PassContext"),
    "PassContract": ("torchloom.pipeline", "PassContract"),
    "PassContractError": ("torchloom.errors", "PassContractError"),
    "TorchloomError": ("torchloom.errors", "TorchloomError"),
    "all_reduce": ("torchloom.loop.across_ranks", "all_reduce"),
    "backends": ("torchloom.backends", None),
    "bisect": ("torchloom.pipeline.bisect", "bisect"),
    "check_op": ("torchloom.custom_ops", "check_op"),
    "clip_grad_norm_": ("torchloom.loop.clip", "clip_grad_norm_"),
    "compile": ("torchloom.loop.compile", "compile_model"),
    "compiler": ("torchloom.compiler", None),
    "config": ("torchloom.config", None),
    "custom_op": ("torchloom.custom_ops", "custom_op"),
    "diff": ("torchloom.records.diff", "diff"),
    "entries": ("torchloom.inspect", "entries"),
    "events": ("torchloom.events", None),
    "expect": ("torchloom.inspect", "expect"),
    "explain": ("torchloom.inspect", "explain"),
    "explain_call": ("torchloom.inspect", "explain_call"),
    "inspect": ("torchloom.inspect", None),
    "jit": ("torchloom.inspect", "jit"),
    "just_in_time_compile": ("torchloom.inspect", "jit"),
    "leaf": ("torchloom.shard.leaf_modules", "leaf"),
    "no_sync": ("torchloom.loop.optimizer_hooks", "no_sync"),
    "overhead": ("torchloom.inspect", "overhead"),
    "pad_tensors": ("torchloom.loop.across_ranks", "pad_tensors"),
    "records": ("torchloom.records", None),
    "register_compile_pass": ("torchloom.pipeline", "register_compile_pass"),
    "report": ("torchloom.report", None),
    "validate_schedule": ("torchloom.pipeline", "validate_schedule"),
    "watch": ("torchloom.inspect", "watch"),
    "initialize": ("torchloom.engine", "initialize"),
    "save_model": ("torchloom.checkpoints.save_model", "save_model"),
    "serve": ("torchloom.serve", None),
    "shard": ("torchloom.shard", None),
    "shard_model": ("torchloom.loop.shard_model", "shard_model"),
    "simulate": ("torchloom.simulation", "simulate"),
    "support_torch_compile": ("torchloom.serve", "support_torch_compile"),
}

__all__ = [
    "Engine",
    "GraphPass",
    "PassContext",
    "PassContract",
    "PassContractError",
    "TorchloomError",
    "all_reduce",
    "backends",
    "bisect",
    "check_op",
    "clip_grad_norm_",
    "compile",
    "compiler",
    "config",
    "custom_op",
    "diff",
    "entries",
    "events",
    "expect",
    "explain",
    "explain_call",
    "initialize",
    "inspect",
    "jit",
    "just_in_time_compile",
    "leaf",
    "no_sync",
    "overhead",
    "pad_tensors",
    "records",
    "register_compile_pass",
    "report",
    "save_model",
    "serve",
    "shard",
    "shard_model",
    "simulate",
    "support_torch_compile",
    "validate_schedule",
    "watch",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'torchloom' has no attribute {name!r}")
    module, attr = _EXPORTS[name]
    loaded = import_module(module)
    return loaded if attr is None else getattr(loaded, attr)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
