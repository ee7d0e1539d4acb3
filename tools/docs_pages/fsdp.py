"""What becomes of the calls and options of FSDP2, FSDP1 and DDP: rows of data for docs/migrating/fsdp2.md.

A row that changes its mind changes in one line. `ours` names what the row relies on: `name`, `name:argument` of a
function, or `config:key`; a test finds each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from docs_pages.lists import listed

Outcome = Literal["works", "differs", "not needed", "not there"]


class Row(NamedTuple):
    """One call or option of theirs."""

    theirs: str
    outcome: Outcome
    how: str
    ours: tuple[str, ...] = ()


_CONFIG = "torchloom.compile:config"
_GATHERED = "torchloom.shard.gathered"
_BY_GRAPH = "the passes schedule and merge collectives in the graph"

FULLY_SHARD = (
    Row("module", "differs", "`shard_model(model)`, once for the whole model, not for each block", ("torchloom.shard_model",)),
    Row("mesh", "works", "`mesh=`: one dim, or two for hybrid sharding", ("torchloom.shard_model:mesh",)),
    Row("reshard_after_forward", "differs", "for the whole model: `stage=3` is True, `stage=2` is False; an int is not there", ("torchloom.shard_model:stage",)),
    Row("shard_placement_fn", "not there", "each parameter is a flat shard of equal size, whatever its shape"),
    Row("mp_policy", "works", "`precision=`, of the model or by module, see below", ("torchloom.shard_model:precision",)),
    Row("offload_policy", "differs", '`CPUOffloadPolicy` is `compile(model, config={"offload_parameters": True}, optimizer=optimizer)`: shards live on the host, the optimizer steps on the device', (_CONFIG, "config:compile.offload_parameters")),
    Row("ignored_params", "works", "`ignored_params=`, any iterable", ("torchloom.shard_model:ignored_params",)),
    Row("dp_mesh_dims", "not there", "pass the axes to shard over as `mesh=`", ("torchloom.shard_model:mesh",)),
)  # fmt: skip

POLICY = (
    Row("param_dtype", "works", "`Precision(compute=...)`", ("torchloom.shard.Precision:compute",)),
    Row("reduce_dtype", "differs", "`Precision(reduce=...)`; the default is fp32, FSDP2's is `param_dtype`", ("torchloom.shard.Precision:reduce",)),
    Row("output_dtype", "works", "`Precision(output=...)`, where `cast_inputs=True`", ("torchloom.shard.Precision:output",)),
    Row("cast_forward_inputs", "differs", "`cast_inputs=`, for the model or the modules that `precision` names; off unless given", ("torchloom.shard_model:cast_inputs",)),
)  # fmt: skip

METHODS = (
    Row("unshard", "differs", "`with gathered(model):`, for the length of a block", (_GATHERED,)),
    Row("reshard", "not needed", "the end of `gathered` does it", (_GATHERED,)),
    Row("set_requires_gradient_sync", "not there", "each backward reduces, and gradients add up to the same"),
    Row("set_requires_all_reduce", "not there", "each backward reduces over both axes, and gradients add up to the same"),
    Row("set_is_last_backward", "not needed", "each backward reduces"),
    Row("set_reshard_after_forward", "differs", "`stage=`, when the model is sharded", ("torchloom.shard_model:stage",)),
    Row("set_reshard_after_backward", "not needed", "weights are released after backward"),
    Row("set_unshard_in_backward", "not needed", "a weight is gathered only where the graph reads it"),
    Row("set_modules_to_forward_prefetch", "not needed", "the pass `prefetch` moves gathers in the graph"),
    Row("set_modules_to_backward_prefetch", "not needed", "the pass `prefetch` moves gathers in the graph"),
    Row("set_gradient_divide_factor", "differs", "`gradient_divide_factor=`, when the model is sharded", ("torchloom.shard_model:gradient_divide_factor",)),
    Row("set_reduce_scatter_divide_factor", "differs", "`gradient_divide_factor=`, when the model is sharded", ("torchloom.shard_model:gradient_divide_factor",)),
    Row("set_force_sum_reduction_for_comms", "not needed", "it chooses how the mean is computed, not the result"),
    Row("set_all_reduce_hook", "not there", "write a [pass](../passes.md), or change `param.grad` after backward"),
    Row("set_custom_all_gather", "not there", "transports are chosen by device and backend"),
    Row("set_custom_reduce_scatter", "not there", "transports are chosen by device and backend"),
    Row("set_allocate_memory_from_process_group_for_comm", "not needed", _BY_GRAPH),
    Row("set_symm_mem_for_comm", "differs", '`compile(config={"symmetric_memory": True})`, for ranks of one host', (_CONFIG, "config:compile.symmetric_memory")),
    Row("set_separate_reduce_scatter_group", "not needed", _BY_GRAPH),
    Row("set_reduce_scatter_max_input_buffers", "not needed", _BY_GRAPH),
    Row("set_reduce_scatter_unused_params", "not there", "ranks use the same parameters, or an error says where they differ"),
    Row("set_post_optim_event", "not needed", _BY_GRAPH),
    Row("reset_iter_state", "not needed", "a backward that failed does not spoil the next"),
)  # fmt: skip

FSDP1 = (
    Row("process_group", "differs", "`mesh=`", ("torchloom.shard_model:mesh",)),
    Row("sharding_strategy", "works", "`FULL_SHARD` is `stage=3`, `SHARD_GRAD_OP` is `stage=2`, `NO_SHARD` is `stage=0`; hybrid ones are `mesh=` with two dims", ("torchloom.shard_model:stage", "torchloom.shard_model:mesh")),
    Row("cpu_offload", "differs", '`compile(model, config={"offload_parameters": True}, optimizer=optimizer)`; the optimizer steps on the device', (_CONFIG, "config:compile.offload_parameters")),
    Row("auto_wrap_policy", "not needed", "a weight is gathered where it is read, without wrapped modules"),
    Row("backward_prefetch", "not needed", "the pass `prefetch` moves gathers in the graph"),
    Row("forward_prefetch", "not needed", "the pass `prefetch` moves gathers in the graph"),
    Row("limit_all_gathers", "not needed", '`compile(config={"memory_budget": ...})` bounds the memory of a step', (_CONFIG, "config:compile.memory_budget")),
    Row("mixed_precision", "differs", "`precision=`; buffers keep their type", ("torchloom.shard_model:precision",)),
    Row("ignored_modules", "differs", "`ignored_params=`, with the parameters of the modules", ("torchloom.shard_model:ignored_params",)),
    Row("ignored_states", "works", "`ignored_params=`", ("torchloom.shard_model:ignored_params",)),
    Row("param_init_fn", "works", "`init=`, with a model made inside `with on_meta():`", ("torchloom.shard_model:init", "torchloom.shard.on_meta")),
    Row("device_id", "not needed", "call `torch.cuda.set_device`, or move the model before"),
    Row("sync_module_states", "not needed", "rank 0 always broadcasts its weights"),
    Row("use_orig_params", "not needed", "`model.parameters()` gives the model's own parameters, which hold shards"),
    Row("device_mesh", "works", "`mesh=`", ("torchloom.shard_model:mesh",)),
    Row("no_sync", "differs", "`with torchloom.no_sync(model):`; each backward reduces, and gradients add up to the same", ("torchloom.no_sync:model",)),
    Row("clip_grad_norm_", "works", "`torch.nn.utils.clip_grad_norm_`, or `torchloom.clip_grad_norm_(model, max_norm, norm_type)`", ("torchloom.clip_grad_norm_:norm_type",)),
    Row("summon_full_params", "works", "`with gathered(model):`; what rank 0 writes is kept with `modifier_rank=0`", (f"{_GATHERED}:modifier_rank",)),
    Row("state_dict_type", "works", '`with state_dict_mode("full")`, the default, or `"local"`', ("torchloom.shard.state_dict_mode",)),
    Row("set_state_dict_type", "differs", '`with state_dict_mode("local"):`', ("torchloom.shard.state_dict_mode",)),
    Row("optim_state_dict", "works", "torch's `get_optimizer_state_dict`, or `full_optimizer_state_dict(optimizer)`", ("torchloom.shard.full_optimizer_state_dict",)),
    Row("full_optim_state_dict", "works", "`full_optimizer_state_dict(optimizer)`", ("torchloom.shard.full_optimizer_state_dict",)),
    Row("optim_state_dict_to_load", "works", "torch's `set_optimizer_state_dict`"),
    Row("register_comm_hook", "not there", "write a [pass](../passes.md), or set `Precision(reduce=...)`", ("torchloom.shard.Precision:reduce",)),
)  # fmt: skip

OTHERS = (
    Row("DistributedDataParallel(model)", "works", "`shard_model(model, stage=0)`", ("torchloom.shard_model:stage",)),
    Row("DistributedDataParallel.no_sync()", "differs", "`with torchloom.no_sync(model):`; each backward reduces, and gradients add up to the same", ("torchloom.no_sync:model",)),
    Row("DistributedDataParallel(broadcast_buffers=True)", "differs", "`broadcast_buffers=` of `shard_model`, by default on at stages 0 and 1: persistent buffers are rank 0's after each step, not before each forward"),
    Row("register_fsdp_forward_method(model, name)", "not needed", "a weight is gathered wherever it is read"),
    Row("torch.compile(model), or of each block", "works", "`torchloom.compile(model)`: one graph for the model", ("torchloom.compile",)),
    Row("checkpoint_wrapper, torch.utils.checkpoint", "works", 'as it is, or `compile(config={"memory_budget": "40GB"})`', (_CONFIG, "config:compile.memory_budget")),
    Row("torch.nn.utils.clip_grad_norm_", "works", "as it is"),
    Row("ShardedGradScaler, GradScaler", "works", "as they are"),
    Row("param.full_tensor()", "differs", "`with gathered(param): param.clone()`", (_GATHERED,)),
    Row("param.to_local()", "differs", "`local_shard(param)`: flat"),
    Row("get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))", "works", "as it is, or `full_state_dict(model, rank0_only=True, cpu=True)`", ("torchloom.shard.full_state_dict:rank0_only", "torchloom.shard.full_state_dict:cpu")),
    Row("get_model_state_dict(model)", "differs", '`with state_dict_mode("local"): model.state_dict()` for shards', ("torchloom.shard.state_dict_mode",)),
    Row("get_optimizer_state_dict, set_optimizer_state_dict", "works", 'as they are, inside `state_dict_mode("local")` for shards', ("torchloom.shard.state_dict_mode",)),
    Row("set_model_state_dict(model, whole)", "works", "`model.load_state_dict(whole)`"),
    Row('torch.device("meta"), to_empty, init_weights', "differs", "`with on_meta():`, then `shard_model(model, init=...)`", ("torchloom.shard.on_meta", "torchloom.shard_model:init")),
)  # fmt: skip

TABLES: Mapping[str, Sequence[Row]] = {
    "Arguments of `fully_shard`": FULLY_SHARD,
    "Fields of `MixedPrecisionPolicy`": POLICY,
    "Methods of `FSDPModule`": METHODS,
    "Arguments and methods of `FullyShardedDataParallel` (FSDP1)": FSDP1,
    "DDP, and what stands around them": OTHERS,
}


def render_calls() -> str:
    """Return lists for each group of calls.

    Example:
        >>> "- `shard_placement_fn`: each parameter" in render_calls()
        True
    """
    return "\n\n".join(f"### {title}\n\n{_by_outcome(rows)}" for title, rows in TABLES.items())


def _by_outcome(rows: Sequence[Row]) -> str:
    """Return a list for each outcome, one line for calls that have the same counterpart."""
    parts = []
    for outcome in get_args(Outcome):
        groups: dict[str, list[str]] = {}
        for row in rows:
            if row.outcome == outcome:
                groups.setdefault(row.how, []).append(f"`{row.theirs}`")
        if groups:
            lines = ((", ".join(names), "", how) for how, names in groups.items())
            parts.append(f"*{outcome.capitalize()}*\n\n{listed(lines)}")
    return "\n\n".join(parts)
