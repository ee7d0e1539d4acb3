"""Names of DeepSpeed 0.19.6 and what stands for them: torchloom's, torch's, or an adapter of `peers.deepspeed_adapters`."""

from __future__ import annotations

_ADAPTERS = "peers.deepspeed_adapters"

NAMES: dict[str, str] = {
    "deepspeed.initialize": f"{_ADAPTERS}:initialize",
    "deepspeed.init_distributed": f"{_ADAPTERS}:init_distributed",
    "deepspeed.comm.all_gather_into_tensor": f"{_ADAPTERS}:all_gather_into_tensor",
    "deepspeed.comm.init_distributed": f"{_ADAPTERS}:init_distributed",
    "deepspeed.DeepSpeedEngine": "torchloom:Engine",
    "deepspeed.DeepSpeedConfigError": "torchloom.errors:ConfigError",
    "deepspeed.__version__": f"{_ADAPTERS}:VERSION",
    "deepspeed.accelerator.get_accelerator": "peers.cpu_accelerator:get_accelerator",
    "deepspeed.accelerator.is_current_accelerator_supported": "peers.cpu_accelerator:is_supported",
    "deepspeed.git_version_info.torch_info": f"{_ADAPTERS}:TORCH_INFO",
    "deepspeed.utils.torch.required_torch_version": f"{_ADAPTERS}:required_torch_version",
    "deepspeed.utils.logger": f"{_ADAPTERS}:LOGGER",
    "deepspeed.zero.Init": f"{_ADAPTERS}:Init",
    "deepspeed.zero.GatheredParameters": f"{_ADAPTERS}:GatheredParameters",
    "deepspeed.zero.register_external_parameter": f"{_ADAPTERS}:not_needed",
    "deepspeed.zero.unregister_external_parameter": f"{_ADAPTERS}:not_needed",
    "deepspeed.runtime.zero.GatheredParameters": f"{_ADAPTERS}:GatheredParameters",
    "deepspeed.runtime.zero.partition_parameters.GatheredParameters": f"{_ADAPTERS}:GatheredParameters",
    "deepspeed.runtime.zero.ZeroParamStatus": f"{_ADAPTERS}:ZeroParamStatus",
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus": f"{_ADAPTERS}:ZeroParamStatus",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": f"{_ADAPTERS}:OffloadDeviceEnum",
    "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum": f"{_ADAPTERS}:OffloadStateTypeEnum",
    "deepspeed.runtime.zero.utils.ZeRORuntimeException": "torchloom.errors:TorchloomError",
    "deepspeed.runtime.zero.unwrap_model_for_generation": f"{_ADAPTERS}:unwrap_model_for_generation",
    "deepspeed.runtime.engine.DeepSpeedEngine": "torchloom:Engine",
    "deepspeed.runtime.config.DeepSpeedConfig": f"{_ADAPTERS}:DeepSpeedConfig",
    "deepspeed.runtime.config.ADAM_OPTIMIZER": f"{_ADAPTERS}:ADAM_OPTIMIZER",
    "deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": f"{_ADAPTERS}:MIN_SWAPPABLE_BYTES",
    "deepspeed.runtime.utils.see_memory_usage": f"{_ADAPTERS}:not_needed",
    "deepspeed.ops.__compatible_ops__": f"{_ADAPTERS}:COMPATIBLE_OPS",
    "deepspeed.ops.aio.AsyncIOBuilder": f"{_ADAPTERS}:AsyncIOBuilder",
    "deepspeed.ops.op_builder.CPUAdamBuilder": f"{_ADAPTERS}:CPUAdamBuilder",
    "deepspeed.ops.op_builder.FusedAdamBuilder": f"{_ADAPTERS}:FusedAdamBuilder",
    "deepspeed.ops.op_builder.FusedLambBuilder": f"{_ADAPTERS}:FusedLambBuilder",
    "deepspeed.ops.adam.FusedAdam": "torch.optim:AdamW",
    "deepspeed.ops.adam.DeepSpeedCPUAdam": "torch.optim:AdamW",
    "deepspeed.compile.util.is_deepcompile_supported": f"{_ADAPTERS}:is_deepcompile_supported",
    "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer": f"{_ADAPTERS}:groups_without_experts",
    **{
        f"deepspeed.utils.{name}": f"{_ADAPTERS}:{name}"
        for name in (
            "z3_leaf_module",
            "get_z3_leaf_modules",
            "set_z3_leaf_modules",
            "unset_z3_leaf_modules",
            "set_z3_leaf_modules_by_name",
            "set_z3_leaf_modules_by_suffix",
        )
    },
    "deepspeed.checkpoint.UNIVERSAL_CHECKPOINT_INFO": f"{_ADAPTERS}:UNIVERSAL_CHECKPOINT_INFO",
    "deepspeed.checkpoint.ds_to_universal.main": f"{_ADAPTERS}:not_needed",
    "deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES": f"{_ADAPTERS}:VALID_LR_SCHEDULES",
    **{
        f"deepspeed.runtime.lr_schedules.{name}": f"torchloom.engine.schedules:{name}"
        for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle")
    },
    **{
        f"deepspeed.utils.safe_{verb}_{which}": f"{_ADAPTERS}:safe_{verb}_{which}"
        for verb in ("get", "set")
        for what in ("fp32_param", "grad", "optimizer_state")
        for which in (f"full_{what}", f"local_{what}")
    },
    **{
        f"deepspeed.utils.zero_to_fp32.{name}": f"{_ADAPTERS}:{name}"
        for name in (
            "get_fp32_state_dict_from_zero_checkpoint",
            "load_state_dict_from_zero_checkpoint",
        )
    },
}
"""DeepSpeed's name -> `module:attribute`."""

MODULES: dict[str, str] = {"deepspeed.comm": "torch.distributed"}
"""Modules of DeepSpeed's whose names are those of another module, where `NAMES` has none."""

_SCHEDULES = {
    "WARMUP_LR": "WarmupLR", "WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_COSINE_LR": "WarmupCosineLR",
    "LR_RANGE_TEST": "LRRangeTest", "ONE_CYCLE": "OneCycle", "WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear",
}  # fmt: skip


def key_of_schedule(name: str) -> str | None:
    """Return the value of a constant of DeepSpeed's schedules: a name or a key of the configuration."""
    return _SCHEDULES.get(name, name.lower()) if name.isupper() else None
