"""How much memory the device of this process has."""

from __future__ import annotations

import os

import torch

from torchloom.config.budget import AUTO_FRACTION


def device_bytes(device: torch.device | None = None) -> int:
    """Return the memory of a device in bytes; the host's where there is no accelerator.

    Args:
        device: default: the current CUDA device, or the host.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_budget_bytes() -> int:
    """Return the device memory in bytes that a step may use if no budget is given."""
    return int(AUTO_FRACTION * device_bytes())
