"""What becomes of each key of DeepSpeed 0.19.6: lists of what `check_config` says to one value of each.

A line of `KEYS` is a key and a value that asks for something, so the outcome is never that of a default. Keys
inside a feature that is refused as a whole stand for it in one line.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from docs_pages.lists import listed
from torchloom.config import Checked, Problem, check_config

_BASE = {
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}

KEYS: dict[str, str] = {
    "Batch, gradients and log": """
train_batch_size 8
train_micro_batch_size_per_gpu 4
gradient_accumulation_steps 2
gradient_clipping 0.5
managed_gradient_accumulation false
gradient_allreduce_op "sum"
prescale_gradients true
gradient_predivide_factor 2.0
sparse_gradients true
communication_data_type "bf16"
seq_parallel_communication_data_type "bf16"
disable_allgather true
dataloader_drop_last true
steps_per_print 5
wall_clock_breakdown true
memory_breakdown true
dump_state true
log_level "info"
vocabulary_size 50257
graph_harvesting true
zero_allow_untested_optimizer true
zero_force_ds_cpu_optimizer true
""",
    "Precision": """
bf16.enabled true
bf16.check_grad_overflow false {"bf16": {"enabled": true}}
bf16.immediate_grad_update true
bf16 {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true} {"zero_optimization": {"stage": 3}}
fp16.enabled true
fp16.auto_cast true
fp16.loss_scale 128
fp16.initial_scale_power 8
fp16.loss_scale_window 100
fp16.hysteresis 4
fp16.consecutive_hysteresis true
fp16.min_loss_scale 2
fp16.fp16_master_weights_and_grads true
torch_autocast {"enabled": true}
torch_autocast.dtype "torch.float16" {"torch_autocast": {"enabled": true}}
torch_autocast.lower_precision_safe_modules ["torch.nn.Linear"] {"torch_autocast": {"enabled": true}}
data_types.grad_accum_dtype "bf16"
data_types.param_dtype "bf16"
data_types.buffer_dtype "bf16"
amp.enabled true
""",
    "Optimizer and schedule": """
optimizer.type "Adam" {"optimizer": {"type": "SGD", "params": {}}}
optimizer.type "AdamW" {"optimizer": {"type": "SGD", "params": {}}}
optimizer.type "SGD"
optimizer.type "Lamb"
optimizer.type "OneBitAdam"
optimizer.type "OneBitLamb"
optimizer.type "ZeroOneAdam"
optimizer.type "Muon"
optimizer.type "Lion"
optimizer.type "Adagrad"
optimizer.params.lr 0.5
optimizer.params.betas [0.8, 0.9]
optimizer.params.eps 1e-6
optimizer.params.weight_decay 0.1
optimizer.params.bias_correction false
optimizer.params.adam_w_mode false {"optimizer": {"type": "Adam", "params": {}}}
optimizer.params.torch_adam true
optimizer.params.max_grad_norm 1.0
optimizer.legacy_fusion true
scheduler {"type": "WarmupLR", "params": {}}
scheduler {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_max_lr": 0.001}}
scheduler {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}}
scheduler {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 0.001}}
scheduler {"type": "LRRangeTest", "params": {}}
scheduler {"type": "StepLR", "params": {"step_size": 10}}
scheduler {"type": "LambdaLR", "params": {}}
""",
    "ZeRO": """
zero_optimization.stage 2
zero_optimization.stage3_param_persistence_threshold 10
zero_optimization.leaf_module.classes ["Experts"]
zero_optimization.leaf_module.names ["layers.0.experts"]
zero_optimization.leaf_module.name_suffixes ["experts"]
zero_optimization.stage3_gather_16bit_weights_on_model_save true
zero_optimization.stage3_gather_fp16_weights_on_model_save true
zero_optimization.offload_optimizer.device "cpu"
zero_optimization.offload_optimizer.device "nvme"
zero_optimization.offload_optimizer.pin_memory false
zero_optimization.offload_optimizer.nvme_path "/nvme"
zero_optimization.offload_optimizer.buffer_count 4
zero_optimization.offload_optimizer.pipeline_read true
zero_optimization.offload_optimizer.pipeline_write true
zero_optimization.offload_optimizer.fast_init true
zero_optimization.offload_optimizer.ratio 0.5
zero_optimization.offload_optimizer.super_offload true
zero_optimization.offload_optimizer.cpuadam_cores_perc 0.5
zero_optimization.offload_param.device "cpu"
zero_optimization.offload_param.device "nvme"
zero_optimization.offload_param.pin_memory false
zero_optimization.offload_param.nvme_path "/nvme"
zero_optimization.offload_param.buffer_count 4
zero_optimization.offload_param.buffer_size 1e6
zero_optimization.offload_param.max_in_cpu 1e6
zero_optimization.cpu_offload true
zero_optimization.cpu_offload_param true
zero_optimization.cpu_offload_use_pin_memory true
zero_optimization.reduce_bucket_size 1e6
zero_optimization.allgather_bucket_size 1e6
zero_optimization.stage3_prefetch_bucket_size 1e6
zero_optimization.stage3_max_live_parameters 1e6
zero_optimization.stage3_max_reuse_distance 1e6
zero_optimization.stage3_model_persistence_threshold 1e6
zero_optimization.stage3_module_granularity_threshold 1e6
zero_optimization.stage3_use_all_reduce_for_fetch_params true
zero_optimization.stage3_allgather_sequential true
zero_optimization.sub_group_size 1e6
zero_optimization.overlap_comm false
zero_optimization.contiguous_gradients false
zero_optimization.reduce_scatter false
zero_optimization.allgather_partitions false
zero_optimization.use_multi_rank_bucket_allreduce false
zero_optimization.round_robin_gradients true
zero_optimization.memory_efficient_linear false
zero_optimization.ignore_unused_parameters false
zero_optimization.load_from_fp32_weights false
zero_optimization.elastic_checkpoint true
zero_optimization.pipeline_loading_checkpoint true
zero_optimization.override_module_apply false
zero_optimization.log_trace_cache_warnings true
zero_optimization.enable_sanity_checks true
zero_optimization.save_muon_momentum_buffer_in_memory true
zero_optimization.legacy_stage1 true
zero_optimization.zenflow {"topk_ratio": 0.05}
zero_optimization.zero_hpz_partition_size 8
zero_optimization.zero_quantized_weights true
zero_optimization.zero_quantized_nontrainable_weights true
zero_optimization.zero_quantized_gradients true
zero_optimization.zeropp_loco_param {"err_beta": 0.8}
zero_optimization.mics_shard_size 8
zero_optimization.mics_hierarchical_params_gather true
""",
    "Compilation": """
compile.deepcompile true
compile.passes ["z1", "z3"]
compile.passes ["autosp"]
compile.passes ["autotp"]
compile.free_activation true
compile.free_activation_threshold 1000
compile.offload_activation true
compile.offload_activation_pin_memory false
compile.offload_opt_states true
compile.offload_parameters true
compile.double_buffer false
compile.symmetric_memory true
compile.debug_log true
compile.sync_before_reduce true
compile.sync_after_reduce true
compile.sync_before_allgather true
compile.sync_after_allgather true
compile.keep_int_input_tensors false
compile.keep_all_input_tensors true
""",
    "Checkpoints, monitors and profilers": """
checkpoint.tag_validation "FAIL"
checkpoint.load_universal true
checkpoint.use_node_local_storage true
checkpoint.checkpoint_serialization false
checkpoint.parallel_write {"pipeline_stage": true}
checkpoint.writer {"type": "FAST"}
nebula {"enabled": true}
datastates_ckpt {"host_cache_size": 16}
tensorboard {"enabled": true, "output_path": "runs", "job_name": "mine"}
wandb {"enabled": true, "project": "mine", "team": "us", "group": "a"}
csv_monitor {"enabled": true, "output_path": "runs", "job_name": "mine"}
comet {"enabled": true}
flops_profiler {"enabled": true}
comms_logger {"enabled": true}
timers {"throughput": {"enabled": true}}
activation_checkpointing {"partition_activations": true}
""",
    "Other features": """
aio {"block_size": 1048576}
pipeline {"stages": 2}
tensor_parallel {"autotp_size": 2}
sequence_parallel_size 2
expert_parallel {"enabled": true}
use_data_before_expert_parallelism true
hybrid_engine {"enabled": true}
compression_training {"weight_quantization": {"shared_parameters": {"enabled": true}}}
quantize_training {"enabled": true}
weight_quantization {"enabled": true}
data_efficiency {"enabled": true}
curriculum_learning {"enabled": true}
progressive_layer_drop {"enabled": true}
eigenvalue {"enabled": true}
sparse_attention {"mode": "fixed"}
elasticity {"enabled": true}
autotuning {"enabled": true}
""",
}

_DIFFERS = {
    "train_batch_size": "without any batch size the micro batch is 1, with a note; DeepSpeed raises an error",
    "gradient_clipping": "the default is 0 (off); DeepSpeed's is 1.0",
    "communication_data_type": "the default is fp32; DeepSpeed's is the type of the weights",
    "steps_per_print": "the default is 10; DeepSpeed's is to print nothing",
    "zero_optimization.stage": "stage 2 also shards weights at rest",
    "zero_optimization.reduce_bucket_size": "an upper bound, over gloo of 64 MiB at most",
    "zero_optimization.allgather_bucket_size": "an upper bound, over gloo of 64 MiB at most",
    "zero_optimization.stage3_prefetch_bucket_size": "an upper bound",
    "zero_optimization.offload_optimizer.device": "states live on the host; the optimizer steps on the device",
    "compile.passes": "each means the preset of that stage",
    "compile.deepcompile": "`engine.compile()` weaves with either value",
}


class Row(NamedTuple):
    """One key with the value that was asked for, and what came of it."""

    key: str
    value: object
    around: Mapping[str, object]
    """Sections that the key needs."""
    outcome: str
    """"works", "differs", "no effect" or "refused"."""
    why: str


def render_keys() -> str:
    """Return lists for each group of keys.

    Example:
        >>> "- `gradient_allreduce_op`: remove it" in render_keys()
        True
    """
    return "\n\n".join(_group(title, list(_rows(lines))) for title, lines in KEYS.items())


def all_rows() -> list[Row]:
    """Return the rows of all tables."""
    return [row for lines in KEYS.values() for row in _rows(lines)]


def _group(title: str, rows: list[Row]) -> str:
    """Return a list for each outcome, one line for keys with the same reason, without those that work."""
    keys = [row.key for row in rows]
    parts = [f"### {title}"]
    for outcome in ("differs", "no effect", "refused"):
        alike: dict[str, list[str]] = {}
        for row in rows:
            if row.outcome == outcome:
                value = json.dumps(row.value)
                why = row.why.removeprefix(f"{value}: ").removeprefix(f"{value} is ")
                alike.setdefault(why, []).append(_shown(row, keys.count(row.key) > 1))
        if alike:
            lines = ((", ".join(shown), "", why) for why, shown in alike.items())
            parts.append(f"*{outcome.capitalize()}*\n\n{listed(lines)}")
    return "\n\n".join(parts)


def _shown(row: Row, with_value: bool) -> str:
    if not with_value:
        return f"`{row.key}`"
    if isinstance(row.value, dict):
        return f"`{row.key}.type: {json.dumps(row.value['type'])}`"
    return f"`{row.key}: {json.dumps(row.value)}`"


def ask(key: str, value: object, around: Mapping[str, object]) -> Checked:
    """Check a configuration that asks for one thing; None asks for nothing.

    Args:
        key: the dotted path of a key.
        value: what it is set to.
        around: sections that the key needs.
    """
    tree: dict[str, Any] = copy.deepcopy({**_BASE, **around})
    if value is not None:
        *parents, last = key.split(".")
        place = tree
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return check_config(tree, world_size=2)


def _rows(lines: str) -> Iterator[Row]:
    for line in lines.strip().splitlines():
        key, _, rest = line.partition(" ")
        value, end = json.JSONDecoder().raw_decode(rest)
        around = json.loads(rest[end:] or "{}")
        yield Row(key, value, around, *_outcome(key, value, around))


def _outcome(key: str, value: object, around: Mapping[str, object]) -> tuple[str, str]:
    checked = ask(key, value, around)
    if checked.errors:
        return "refused", "; ".join(_refusal(error) for error in checked.errors)
    if key in _DIFFERS:
        return "differs", _DIFFERS[key]
    said = _said(checked, key)
    return ("no effect" if said else "works"), said


def _refusal(error: Problem) -> str:
    is_missing = error.what.endswith(", which this release does not have")
    return error.fix if is_missing else f"{error.what.removeprefix('asks for ')}: {error.fix}"


def _said(checked: Checked, key: str) -> str:
    said = [each.why for each in checked.hints if each.path.startswith(key) and each.used is None]
    said += [
        note.message.replace("): ", ": ", 1).partition(": ")[2]
        for note in checked.notes
        if note.level == "warning" and note.path.startswith(key) and "effect" in note.message
    ]
    return "; ".join(said)
