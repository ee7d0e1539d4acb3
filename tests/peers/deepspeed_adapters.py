"""Calls of DeepSpeed that are written otherwise with torchloom: what docs/migrating/deepspeed.md says to write instead."""

from __future__ import annotations

import enum
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import torchloom
from torchloom.checkpoints.contents import read_contents
from torchloom.checkpoints.save_model import export
from torchloom.config import load_config
from torchloom.shard import layout_of, local_shard, sharded_models
from torchloom.shard.shards import cut
from torchloom.shard.state import gather_whole

VERSION = "0.19.6"
TORCH_INFO = {"version": torch.__version__, "cuda_version": "12.0", "nccl_version": "2.20"}
LOGGER = logging.getLogger("torchloom")
ADAM_OPTIMIZER = "adam"
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
MIN_SWAPPABLE_BYTES = 1024 * 1024
COMPATIBLE_OPS = {"async_io": False, "cpu_adam": True, "fused_adam": True, "fused_lamb": False}


class OffloadDeviceEnum(str, enum.Enum):
    none, cpu, nvme = "none", "cpu", "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    optim_states, hp_params, lp_params = "optim_states", "hp_params", "lp_params"
    lp_grads, contiguous_grad_buffer = "lp_grads", "contiguous_grad_buffer"


class ZeroParamStatus(enum.Enum):
    AVAILABLE, NOT_AVAILABLE, INFLIGHT = 1, 2, 3


class AsyncIOBuilder:
    NAME = "async_io"


class CPUAdamBuilder:
    NAME = "cpu_adam"


class FusedAdamBuilder:
    NAME = "fused_adam"


class FusedLambBuilder:
    NAME = "fused_lamb"


def required_torch_version(min_version: float = 0, max_version: float = 99) -> bool:
    """Return whether torch lies between two versions such as 2.6."""
    major, minor = torch.__version__.split(".")[:2]
    found = (int(major), int(minor))
    low, high = (
        tuple(map(int, str(float(each)).split("."))) for each in (min_version, max_version)
    )
    return low <= found <= high


def is_deepcompile_supported() -> bool:
    return True


def not_needed(*args: Any, **kwargs: Any) -> None:
    """Stand for calls that a program with torchloom leaves out."""


def init_distributed(dist_backend: str = "gloo", **kwargs: Any) -> None:
    if not dist.is_initialized():
        named = {"rank", "world_size", "init_method"} & kwargs.keys()
        dist.init_process_group(dist_backend, **{each: kwargs[each] for each in named})


def all_gather_into_tensor(out: Tensor, tensor: Tensor, **kwargs: Any) -> Any:
    """Call torch's with a tensor of one dim at least, which gloo demands."""
    return dist.all_gather_into_tensor(out, tensor.reshape(-1), **kwargs)


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Call torchloom, and set what tests ask DeepSpeed's internals for beside their point."""
    found = torchloom.initialize(*args, **kwargs)
    engine = found[0]
    engine._get_optimizer_ckpt_name = not_needed
    engine.sparse_tensor_module_names = set()
    if isinstance(found[1], torch.optim.Optimizer):
        found[1].optimizer, found[1].loss_scaler = found[1], engine
        found[1].dynamic_loss_scale = engine.dynamic_loss_scale()
        found[1].needs_scaler = engine.fp16_enabled
    params = dict(engine.module.named_parameters())
    layout = layout_of(engine.module)
    for index, spec in enumerate(layout):
        param, is_sharded = params[spec.name], spec.mode == "sharded"
        param.peers_optimizer = found[1]
        if layout.stage < 3:
            continue
        param.ds_tensor = local_shard(param)
        param.ds_id, param.ds_shape, param.ds_persist = (
            index,
            torch.Size(spec.shape),
            not is_sharded,
        )
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE if is_sharded else ZeroParamStatus.AVAILABLE
    return found


def DeepSpeedConfig(config: Any, *args: Any, **kwargs: Any) -> Any:
    return load_config(config, world_size=dist.get_world_size() if dist.is_initialized() else 1)


class Init(nullcontext):
    """Whole models: torchloom shards them in `initialize`."""

    def __init__(self, module: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__()


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    given = [params] if isinstance(params, Tensor) else list(params)
    if enabled and any(_place(each) for each in given):
        with torchloom.shard.gathered(given, modifier_rank=modifier_rank):
            yield
        return
    yield  # the model is whole
    if modifier_rank is not None and dist.is_initialized():
        for each in given:
            dist.broadcast(each.data, modifier_rank)


@contextmanager
def unwrap_model_for_generation(engine: Any) -> Iterator[nn.Module]:
    with torchloom.shard.gathered(engine.module):
        yield engine.module


def groups_without_experts(groups: Any) -> list[Any]:
    return [groups] if isinstance(groups, dict) else list(groups)


def set_z3_leaf_modules(model: nn.Module, classes: Any) -> list[nn.Module]:
    found = [each for each in model.modules() if isinstance(each, tuple(classes))]
    torchloom.leaf(*found)
    return found


def _place(param: Tensor) -> tuple[Any, Any] | None:
    """Return the layout of a parameter's model, and its own facts."""
    for model in sharded_models():
        for name, each in model.named_parameters():
            if each is param:
                return layout_of(model), layout_of(model)[name]
    return None


def safe_get_full_fp32_param(param: Any) -> Tensor | None:
    if not param.requires_grad:
        return None
    with torchloom.shard.gathered(param):
        return param.detach().clone().float()


def safe_set_full_fp32_param(param: Any, value: Tensor) -> None:
    with torchloom.shard.gathered(param, modifier_rank=0), torch.no_grad():
        param.copy_(value)


def safe_get_full_grad(param: Any) -> Tensor | None:
    layout, spec = _place(param)
    if param.grad is None:
        return None
    if spec.mode == "sharded":
        return gather_whole(param.grad, spec, layout.handle)
    mean = param.grad.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def safe_set_full_grad(param: Any, value: Tensor) -> None:
    layout, spec = _place(param)
    is_sharded = spec.mode == "sharded"
    param.grad.copy_(cut(value, layout.rank, spec.shard_numel) if is_sharded else value)


def safe_get_full_optimizer_state(param: Any, key: str) -> Tensor | None:
    optimizer = param.peers_optimizer
    states = torchloom.shard.full_optimizer_state_dict(optimizer)["state"]
    params = [id(each) for group in optimizer.param_groups for each in group["params"]]
    return states[params.index(id(param))][key] if id(param) in params else None


def safe_set_full_optimizer_state(param: Any, value: Tensor, key: str) -> None:
    state, (layout, _) = param.peers_optimizer.state[param][key], _place(param)
    is_whole = state.shape == value.shape
    state.copy_(value if is_whole else cut(value, layout.rank, state.numel()))


def safe_get_local_fp32_param(param: Any) -> Tensor | None:
    return local_shard(param) if param.requires_grad else None


def safe_set_local_fp32_param(param: Any, value: Tensor) -> None:
    local_shard(param).copy_(value)


def safe_get_local_grad(param: Any) -> Tensor | None:
    return param.grad


def safe_set_local_grad(param: Any, value: Tensor) -> None:
    param.grad.copy_(value)


def safe_get_local_optimizer_state(param: Any, key: str) -> Tensor | None:
    return param.peers_optimizer.state.get(param, {}).get(key)


def safe_set_local_optimizer_state(param: Any, value: Tensor, key: str) -> None:
    param.peers_optimizer.state[param][key].copy_(value)


def get_fp32_state_dict_from_zero_checkpoint(
    folder: Any, tag: str | None = None
) -> dict[str, Tensor]:
    chosen = Path(folder) / (tag or (Path(folder) / "latest").read_text().strip())
    with tempfile.TemporaryDirectory() as exported:
        files = export(read_contents(chosen), Path(exported), torch.float32, 1 << 40)
        return load_file(files[-1])


def load_state_dict_from_zero_checkpoint(
    model: Any, folder: Any, tag: str | None = None
) -> nn.Module:
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(folder, tag), strict=False)
    return model
