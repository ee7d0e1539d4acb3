"""What becomes of each public name of DeepSpeedEngine 0.19.6: lists for docs/migrating/deepspeed.md."""

from __future__ import annotations

from collections.abc import Mapping

from docs_pages.lists import listed

_WORKS = """
amp_enabled backward bfloat16_enabled coalesce_grad_reduction communication_data_type compile destroy device
dp_world_size dynamic_loss_scale empty_partition_cache eval forward fp16_enabled get_batch_info get_compile_time
get_data_parallel_rank get_global_grad_norm get_lr get_model_parallel_rank get_mom get_tensor_parallel_rank
global_rank global_samples global_steps gradient_accumulation_steps gradient_clipping is_compiled
is_deepcompile_active is_deepcompile_enabled is_gradient_accumulation_boundary load_checkpoint local_rank
lr_scheduler managed_gradient_accumulation micro_steps module_state_dict mp_world_size no_sync offload_states
optimizer optimizer_name optimizer_params register_compile_pass reload_states save_checkpoint scale
scheduler_name scheduler_params seq_dp_world_size sequence_parallel_size set_gradient_accumulation_boundary
skipped_steps step steps_per_print torch_autocast_dtype torch_autocast_enabled train train_batch_size
train_micro_batch_size_per_gpu training_dataloader wall_clock_breakdown was_step_applied world_size
zero_gather_16bit_weights_on_model_save zero_grad zero_optimization zero_optimization_partition_gradients
zero_optimization_partition_weights zero_optimization_stage zero_param_persistence_threshold
"""
WORKS = tuple(_WORKS.split())

DIFFERS: Mapping[str, str] = {
    "config": "the settings in use, a `torchloom.config.Config`; DeepSpeed's is the file or dict that was given",
    "load_module_state_dict": "whole weights by name, at each stage; `z3_params_to_fetch` and `allowed_missing_keys` are not there",
    "loss_scale": "a number, without `()`",
    "save_16bit_model": "it writes safetensors, unless the file is named otherwise, and has all weights, frozen ones too",
    "save_fp16_model": "as `save_16bit_model`",
    "timers": "seconds by phase, where `wall_clock_breakdown` is on; the names of phases are torchloom's",
}


def render_engine() -> str:
    """Return the names that work or differ; the error for any other says why.

    Example:
        >>> "- `loss_scale`: a number" in render_engine()
        True
    """
    works = ", ".join(f"`{name}`" for name in WORKS)
    differs = listed((f"`{name}`", "", how) for name, how in DIFFERS.items())
    return f"The same: {works}.\n\nDifferent:\n\n{differs}"
