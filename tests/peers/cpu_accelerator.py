"""DeepSpeed's accelerator as its tests use it: a CPU on which no test skips itself."""

from __future__ import annotations

from typing import Any

import torch


class _Name(str):
    """Is "cpu" for torch, and not equal to "cpu" for a test that would skip itself there."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class Cpu:
    """The methods of DeepSpeed's accelerator that its tests call."""

    _name = "cpu"
    FloatTensor, HalfTensor, BFloat16Tensor = (
        torch.FloatTensor,
        torch.HalfTensor,
        torch.BFloat16Tensor,
    )

    has_half = True
    """Whether tests that choose a precision choose bf16: they compare with looser tolerances then."""

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return self.has_half

    is_fp16_supported = is_bf16_supported

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def device_name(self, index: int | None = None) -> str:
        return _Name("cpu")

    def current_device_name(self) -> str:
        return "cpu"

    current_device = current_device_name

    def device_count(self) -> int:
        return 8

    def communication_backend_name(self) -> str:
        return "gloo"

    def random(self) -> Any:
        return torch.random

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self) -> int:
        return 0

    def nothing(self, *_: Any) -> None:
        """Do nothing: there is one device, and it is never behind."""

    synchronize = set_device = empty_cache = reset_peak_memory_stats = nothing


_CPU = Cpu()


def get_accelerator() -> Cpu:
    """Return the CPU."""
    return _CPU


def is_supported() -> bool:
    """Return whether the accelerator is one of those that tests know."""
    return True
