"""Measuring a device and its link to the host: the figures that costs are computed from.

    products     FLOP/s of large matrix products, by dtype; of fused attention
    memory       bytes per second of a large copy, read and written
    launch       microseconds of the smallest operator
    AdamW        parameters per second of one fused fp32 step
    link         bytes per second from host to device and back; on a CPU, of a copy in memory

A CUDA device is asked for more: both directions at once, how fast memory is pinned, and how much
slower products become beside a copy.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchloom.costs.hardware import Device, known_device
from torchloom.costs.timing import median_us
from torchloom.errors import PlanError

_MIB = 1 << 20
_DUPLEX_GAIN = 1.5
"""Both directions at once must be this much faster than one to count as full duplex."""


def find_device(name: str) -> torch.device:
    """Return the device called `name`.

    Raises:
        PlanError: there is no such device here.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PlanError(f"{name!r} is not a device: write cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise PlanError(f"a {device.type} device cannot be calibrated: use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise PlanError(
            f"there is no {name} here ({torch.cuda.device_count()} CUDA devices): use --device cpu"
        )
    return device


def calibrate_device(device: torch.device, quick: bool = False) -> tuple[Device, dict[str, float]]:
    """Measure a device; return its row, and figures that no row has, by name with unit.

    Takes some seconds; `quick` uses small operands, for trying out. Random number generators are
    left as they were.
    """
    is_cuda = device.type == "cuda"
    cuda = [device] if is_cuda else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        base = known_device(device)
        side = 256 if quick else (8192 if is_cuda else 1024)
        dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if is_cuda else [])]
        products = {_name(each): _gemm_flops(side, each, device) for each in dtypes}
        num_mib = 8 if quick else (1024 if is_cuda else 64)
        row = dataclasses.replace(
            base,
            name=torch.cuda.get_device_name(device) if is_cuda else "cpu",
            gemm_flops={**base.gemm_flops, **products},
            memory_bytes_per_s=_copy_rate(num_mib * _MIB, device),
            launch_us=_launch_us(device),
            attention_fraction=_attention_fraction(products, device, quick),
            adamw_params_per_s=_adamw_rate((1 if quick else 8) * _MIB, device),
        )
        if is_cuda:
            row = dataclasses.replace(
                row, capacity_bytes=torch.cuda.get_device_properties(device).total_memory
            )
            return _cuda_link(row, device, 16 * _MIB if quick else 256 * _MIB, side)
        # Host and device are one memory here: a copy reads and writes it.
        rate = row.memory_bytes_per_s / 2
        return dataclasses.replace(row, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate), {}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gemm_flops(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / (median_us(lambda: torch.mm(a, b), device, 0.5) / 1e6)


def _copy_rate(num_bytes: int, device: torch.device) -> float:
    """Return bytes read and written per second by a copy that no cache holds."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / (median_us(lambda: target.copy_(source), device, 0.5) / 1e6)


def _launch_us(device: torch.device) -> float:
    one = torch.ones(1, device=device)
    return median_us(lambda: one + one, device)


def _attention_fraction(products: dict[str, float], device: torch.device, quick: bool) -> float:
    """Return the rate of causal attention as a part of that of products."""
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    shape = (1, 2, 128, 64) if quick else ((4, 16, 4096, 128) if is_cuda else (2, 8, 512, 64))
    q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    us = median_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    batch, heads, length, dim = shape
    flops = 2 * batch * heads * length * length * dim  # two products, half of each masked
    return min(1.0, max(0.01, flops / (us / 1e6) / products[_name(dtype)]))


def _adamw_rate(num_params: int, device: torch.device) -> float:
    param = torch.randn(num_params, device=device).requires_grad_()
    param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW([param], lr=1e-4, fused=True)
    return num_params / (median_us(optimizer.step, device, 0.5) / 1e6)


def _cuda_link(
    row: Device, device: torch.device, num_bytes: int, side: int
) -> tuple[Device, dict[str, float]]:
    """Measure copies between pinned host memory and a CUDA device."""
    started = time.perf_counter()
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pin_s = time.perf_counter() - started
    back = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there, out = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def h2d() -> None:
        with torch.cuda.stream(up):
            there.copy_(host, non_blocking=True)

    def d2h() -> None:
        with torch.cuda.stream(down):
            back.copy_(out, non_blocking=True)

    def rate(*copies: Callable[[], None]) -> float:
        return len(copies) * num_bytes / _synchronized_s(copies, device)

    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    alone, beside = (_gemms_s(a, device, each) for each in (None, h2d))
    h2d_rate, d2h_rate, both = rate(h2d), rate(d2h), rate(h2d, d2h)
    figures = {
        "link_both_bytes_per_s": both,
        "pin_bytes_per_s": num_bytes / pin_s,
        "gemm_beside_copy_slowdown": beside / alone,
    }
    row = dataclasses.replace(
        row,
        h2d_bytes_per_s=h2d_rate,
        d2h_bytes_per_s=d2h_rate,
        full_duplex=both >= _DUPLEX_GAIN * max(h2d_rate, d2h_rate),
        link_load=min(1.0, max(0.0, beside / alone - 1)),
    )
    return row, figures


def _synchronized_s(calls: tuple[Callable[[], None], ...], device: torch.device) -> float:
    """Return the median seconds of asynchronous calls that run at once, waited for."""
    found = []
    for _ in range(7):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return sorted(found)[len(found) // 2]


def _gemms_s(a: Tensor, device: torch.device, copy: Callable[[], None] | None) -> float:
    """Return the seconds of products on the device, with copies queued beside them if asked."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.mm(a, a)
    torch.cuda.synchronize(device)
    if copy is not None:
        for _ in range(20):
            copy()
    start.record()
    for _ in range(10):
        torch.mm(a, a)
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3
