"""The engine answers for its model: attributes, modes and weights; names of DeepSpeed's that it lacks say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from torchloom.engine.state import EngineState
from torchloom.errors import EngineAttributeError
from torchloom.shard import gathered

if TYPE_CHECKING:
    from typing_extensions import Self


class ModuleAccess(EngineState):
    """Part of `Engine`: it answers for the model where it has no attribute of its own."""

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute, e.g. `named_parameters`, `state_dict` or `generate`.

        Raises:
            EngineAttributeError: the model has none of that name; names of DeepSpeed's engine that torchloom
                refuses say why.
        """
        module = self.__dict__.get("module")
        if module is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(module, name)
        except AttributeError as error:
            if name in REFUSED:
                raise EngineAttributeError(
                    f"{name!r} of DeepSpeed's engine is not here: {REFUSED[name]}"
                ) from None
            raise EngineAttributeError(
                f"neither the engine nor its model {type(module).__name__} has an attribute {name!r}: set it "
                "on the model, or see the list of the engine's names in docs/migrating/deepspeed.md"
            ) from error

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, or with `mode=False` into evaluation mode; return the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode; return the engine."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the model's parameters; sharded ones hold this rank's shard."""
        return self.module.parameters()

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's whole weights and its buffers; all ranks must call.

        Args:
            destination: the dict to fill; default: a new one.
            prefix: put in front of each name.
            keep_vars: do not detach tensors from autograd.
            exclude_frozen_parameters: leave out parameters that need no gradient.
        """
        given: Any = {} if destination is None else {"destination": destination}
        state = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **given)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., object] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load whole weights into the model; all ranks must call.

        Args:
            checkpoint: a state dict, or a dict that has it under "module".
            strict: it must hold exactly this model's names.
            custom_load_fn: called as `fn(src=..., dst=...)` with whole weights instead; rank 0's results count.
            fetch_z3_params: accepted for DeepSpeed compatibility; no effect.
        """
        inner = checkpoint.get("module")
        weights = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is None:
            self.module.load_state_dict(weights, strict=strict)
            return
        with gathered(self.module, modifier_rank=0):
            custom_load_fn(src=weights, dst=self.module)


_NAMES = {
    "it changes no result here; engine.config holds the settings in use": """
        bf16_master_weights_and_gradients bf16_optimizer_states checkpoint_serialization_enabled
        checkpoint_tag_validation_enabled checkpoint_tag_validation_fail checkpoint_writer_enabled
        compile_zero_optimization_stage dataloader_drop_last dump_state dynamic_loss_scale_args fp16_auto_cast
        fp16_master_weights_and_gradients get_data_types gradient_predivide_factor graph_harvesting
        initial_dynamic_scale is_sanity_checks_enabled load_universal_checkpoint log_level memory_breakdown
        optimizer_legacy_fusion postscale_gradients sparse_gradients_enabled
        torch_autocast_lower_precision_safe_modules use_node_local_storage zero_allgather_bucket_size
        zero_allgather_partitions zero_allgather_sequential zero_allow_untested_optimizer zero_contiguous_gradients
        zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_grad_hooks zero_ignore_unused_parameters
        zero_legacy_stage1 zero_load_from_fp32_weights zero_log_trace_cache_warnings zero_max_live_parameters
        zero_max_reuse_distance zero_model_persistence_threshold zero_module_granularity_threshold
        zero_multi_rank_bucket_allreduce zero_overlap_comm zero_prefetch_bucket_size zero_reduce_bucket_size
        zero_reduce_scatter zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory
        zero_sub_group_size""",
    "engine.config.offload says what waits on the host, and the optimizer steps on the device": """
        cpuadam_cores_perc super_offload zero_cpu_offload zero_offload_optimizer zero_offload_param
        zero_partial_offload zero_use_cpu_optimizer""",
    "nothing is offloaded to NVMe; set the offload devices to cpu": """
        aio_config swap_tensor_config zero_nvme_offload_optimizer""",
    "there is no quantized communication, and shard groups are set by zero_optimization.shard_size": """
        is_first_weights_partition_group mics_shard_size zero_hpz_partition_size zero_quantized_gradients
        zero_quantized_nontrainable_weights zero_quantized_weights zeropp_loco_param""",
    "there is no tensor, pipeline, sequence or expert parallelism; ZeRO stage 3 divides a large model": """
        all_to_all_group autotp_size compile_autosp compile_autotp expert_data_parallel_group
        expert_parallel_group gate_modules get_autosp_backend get_autotp_backend get_sequence_parallel_group
        has_moe_layers load_moe_state_dict local_all_to_all_group mesh_device moe_layers mpu num_experts
        optimized_linear_base_weight_sharding optimized_linear_lora_enabled pipeline_parallelism
        print_forward_breakdown seq_data_parallel_group seq_parallel_group tensor_parallel_config
        uses_parallelization_pass_only""",
    "there is no such profiler; use torch.profiler, engine.log_to or wall_clock_breakdown": """
        engine_timers engine_timers_cache flops flops_profiler flops_profiler_detailed flops_profiler_enabled
        flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step
        flops_profiler_recompute_fwd_factor flops_profiler_top_modules fwd_duration get_wall_clock_timers monitor
        summary_events tput_timer""",
    "settings are not searched; write them, or ask `torchloom plan`": """
        autotuning_enabled autotuning_end_profile_step autotuning_metric autotuning_metric_path
        autotuning_model_info autotuning_model_info_path autotuning_profile_model_info
        autotuning_start_profile_step""",
    "the engine neither compresses models nor chooses data or layers; do so outside of it": """
        block_eigenvalue compression_scheduler curriculum_enabled_legacy curriculum_learning_config
        curriculum_learning_enabled curriculum_params_legacy curriculum_scheduler_legacy data_efficiency_config
        data_efficiency_enabled data_sampling_config data_sampling_enabled eigenvalue eigenvalue_enabled
        eigenvalue_gas_boundary_resolution eigenvalue_layer_name eigenvalue_layer_num eigenvalue_max_iter
        eigenvalue_stability eigenvalue_tol eigenvalue_verbose get_pld_theta pld_enabled pld_gamma pld_params
        pld_theta progressive_layer_drop quantize_training quantizer random_ltd_config random_ltd_enabled
        random_ltd_initialize random_ltd_scheduler set_custom_curriculum_learning_schedule
        set_data_post_process_func update_interval zenflow_config""",
    "batch sizes are fixed; write them into the configuration": """
        elasticity_enabled is_elastic_model_parallel_supported set_train_batch_size
        set_train_micro_batch_size""",
    "the engine averages and clips gradients in step() itself; torchloom.all_reduce is for values of yours": """
        all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain
        buffered_allreduce_fallback clip_fp32_gradients enable_backward_allreduce flatten gradient_average
        sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain
        sparse_tensor_module_names unflatten""",
    "initialize(training_data=, collate_fn=) makes the loader engine.training_dataloader": """
        collate_fn deepspeed_io is_iterable_style_dataset is_map_style_dataset training_data""",
    "engine.optimizer and engine.lr_scheduler are those that you passed, or that the configuration names": """
        amp_params basic_optimizer client_lr_scheduler client_optimizer get_type torch_autocast_z0_gradscaler""",
    "passes of DeepCompile run by engine.compile(backend=, schedule=)": """
        get_deepcompile_backend get_deepspeed_compile_backend""",
    "it is internal to DeepSpeed; torch.distributed, engine.global_steps, engine.module and engine.save_checkpoint "
    "serve its purposes": """
        checkpoint_engine checkpoint_mp_rank data_parallel_group dist_backend dont_change_device
        first_dataloader_check gas_boundary_ctr inside_no_sync_ctxt loaded_checkpoint_dp_world_size
        loaded_checkpoint_mp_world_size losses module_forward_post_hook module_forward_pre_hook param_names
        save_non_zero_checkpoint save_zero_checkpoint scale_wrt_gas use_ds_comm warn_unscaled_loss""",
}

REFUSED: dict[str, str] = {name: why for why, names in _NAMES.items() for name in names.split()}
"""Name -> what to do, as the end of a sentence."""
