"""Sharding a model's parameters in place: layouts, properties, state dicts.

A sharded parameter is an `nn.Parameter`, the same object under the same name, whose data is this rank's flat, padded,
equally sized shard, and which answers for the whole weight (`shard.parameter`). Attribute access on the module returns the
gathered weight, in eager and in compiled code alike.
"""

from __future__ import annotations

from torchloom._torch.untraced import leave_frames_alone
from torchloom.shard import (
    apply,
    classes,
    direct_uses,
    gather,
    leaf_modules,
    optimizer_states,
    parameter,
    regather,
    roots,
    state,
    writes,
)
from torchloom.shard.apply import facts_of, shard_module, share_buffers, sync_in_backward, unshard
from torchloom.shard.direct_uses import look_at_backward
from torchloom.shard.gather import gathered
from torchloom.shard.layout import (
    ByModule,
    Layout,
    ParamSpec,
    Precision,
    default_threshold,
    plan_layout,
)
from torchloom.shard.leaf_modules import leaf
from torchloom.shard.meta import on_meta
from torchloom.shard.optimizer_states import full_optimizer_state_dict, whole_states
from torchloom.shard.parameter import local_shard
from torchloom.shard.roots import (
    Owners,
    class_of,
    detach_hooks,
    divided_by_id,
    is_sharded,
    keep_hook,
    known_params,
    layout_of,
    living_layouts,
    owners_of,
    sharded_models,
)
from torchloom.shard.shard_tensor import ShardTensor
from torchloom.shard.state import full_state_dict, sharded_state_dict, state_dict_mode

__all__ = [
    "ByModule",
    "Layout",
    "Owners",
    "ParamSpec",
    "Precision",
    "ShardTensor",
    "class_of",
    "default_threshold",
    "detach_hooks",
    "divided_by_id",
    "facts_of",
    "full_optimizer_state_dict",
    "full_state_dict",
    "gathered",
    "is_sharded",
    "keep_hook",
    "known_params",
    "layout_of",
    "leaf",
    "living_layouts",
    "local_shard",
    "look_at_backward",
    "on_meta",
    "owners_of",
    "plan_layout",
    "shard_module",
    "sharded_models",
    "sharded_state_dict",
    "share_buffers",
    "state_dict_mode",
    "sync_in_backward",
    "unshard",
    "whole_states",
]

# They are entered in the midst of a user's code, behind graph breaks too.
leave_frames_alone(
    apply,
    direct_uses,
    classes,
    gather,
    leaf_modules,
    optimizer_states,
    parameter,
    regather,
    roots,
    state,
    writes,
)
