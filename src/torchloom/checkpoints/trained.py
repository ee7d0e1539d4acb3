"""What a checkpoint asks of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.shard import ParamSpec


class Leaf(Protocol):
    """One trainable parameter, and what this rank's optimizer steps of it."""

    spec: ParamSpec
    param: nn.Parameter
    shard_shape: tuple[int, ...]
    is_divided: bool


class Trained(Protocol):
    """What a checkpoint holds of an engine."""

    module: nn.Module
    optimizer: Optimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    world: Any
    local: Any
    """Iterates over leaves."""
    scaler: Any
    offloads: Any

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps per optimizer step."""
        ...


@dataclass
class Counters:
    """Where a run stands."""

    global_steps: int
    global_samples: int
    micro_steps: int
    num_backwards: int = 0
    """Backward passes since the last micro-step ended."""
    forced_boundary: bool | None = None
    """What the caller said of the next micro-step."""


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by name."""
    found = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that keep more than parameters and buffers in a state dict."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def has_position(loader: Any) -> bool:
    """Say whether a data loader can tell and take its position."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
