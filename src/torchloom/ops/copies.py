"""Operators that move tensors between the device and host memory.

    offload(x)             x -> a copy of x in host memory            traced
    reload(host, device)   a copy on the host -> x on the device      traced
    offload_start(xs)      -> host copies, not yet arrived            lowered
    reload_start(hosts)    -> device copies, not yet arrived          lowered

`wait_` with the handle `HOST` ends both: it takes what is being copied as its inputs, so that the
memory of neither side is given away while a copy reads it. A host copy has the shape, strides and
dtype of its tensor, and the tensor comes back with them. On a CPU the device is the CPU as well:
both sides are then pools that are counted apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchloom.ops.library import define

HOST = "host"
"""The handle under which `wait_` finds a copy; no communicator has this name."""


_CPU = torch.device("cpu")


def _on(x: Tensor, device: torch.device) -> Tensor:
    """Return what a copy of `x` on `device` looks like: dense strides stay, others are packed."""
    return torch.empty_like(x, device=device, memory_format=torch.preserve_format)


offload = define("offload(Tensor x, bool pin=True) -> Tensor", lambda x, pin=True: _on(x, _CPU))
"""Copy a tensor into host memory; `pin` asks for page-locked memory where a device needs it."""

reload = define("reload(Tensor host, Device device) -> Tensor", _on)
"""Copy a tensor of host memory to the device."""

offload_start = define(
    "offload_start(Tensor[] xs, bool pin=True) -> Tensor[]",
    lambda xs, pin=True: [_on(x, _CPU) for x in xs],
)
"""Begin to copy tensors into host memory."""

reload_start = define(
    "reload_start(Tensor[] hosts, Device device) -> Tensor[]",
    lambda hosts, device: [_on(host, device) for host in hosts],
)
"""Begin to copy tensors of host memory to the device."""
