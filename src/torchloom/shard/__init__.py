"""Sharding a model's parameters in place: layouts, properties, state dicts.

A sharded parameter is an ordinary `nn.Parameter`, the same object under the same name, whose data
is this rank's flat, padded, equally sized piece. Attribute access on the module returns the
gathered weight, in eager and in compiled code alike.
"""

from __future__ import annotations

from torchloom.shard.apply import layout_of, shard_module, unshard
from torchloom.shard.gather import gathered
from torchloom.shard.layout import Layout, ParamSpec, Precision, plan_layout
from torchloom.shard.meta import on_meta
from torchloom.shard.state import full_state_dict, sharded_state_dict, state_dict_mode

__all__ = [
    "Layout",
    "ParamSpec",
    "Precision",
    "full_state_dict",
    "gathered",
    "layout_of",
    "on_meta",
    "plan_layout",
    "shard_module",
    "sharded_state_dict",
    "state_dict_mode",
    "unshard",
]
