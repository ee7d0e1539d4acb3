"""Rates of devices: what a cost is computed from until it is measured.

Rated figures come from the makers' data sheets; the fractions of them that kernels reach are marked
with where they were seen. `torchloom calibrate` replaces a row by what was measured here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from torchloom.errors import PlanError
from torchloom.log import get_logger

logger = get_logger(__name__)

LinkKind = Literal["h2d", "d2h"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Rates that one device reaches, and of its link to the host.

    Example:
        >>> device_row("h100-80gb").flops_of("bfloat16") > 1e14
        True
    """

    name: str
    gemm_flops: Mapping[str, float]
    """FLOP/s of a large matrix product, by dtype (`"float32"`); other dtypes run as float32."""
    memory_bytes_per_s: float
    """Bytes read and written per second by a large elementwise kernel."""
    launch_us: float
    """Fixed cost of starting one operator."""
    attention_fraction: float = 0.7
    """Rate of fused attention as a part of `gemm_flops`."""
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    link_latency_us: float = 10.0
    full_duplex: bool = True
    """Whether both directions of the link to the host run at full rate at once."""
    link_load: float = 0.0
    """Part of a copy's time that compute beside it loses."""
    adamw_params_per_s: float
    """Parameters that one fused fp32 AdamW step updates per second."""
    capacity_bytes: int | None = None
    """Bytes of device memory; None where the host decides."""
    fuses: bool = False
    """Whether code that is compiled for it computes chains of elementwise operators at once (`costs.fusion`)."""

    def round_trip_us(self, *, at_once: bool = False) -> float:
        """Return the time of a byte to the host and of one back, in microseconds.

        Args:
            at_once: whether they may run beside each other where the link is full duplex.
        """
        down, up = 1e6 / self.d2h_bytes_per_s, 1e6 / self.h2d_bytes_per_s
        return max(down, up) if at_once and self.full_duplex else down + up

    def flops_of(self, dtype: str) -> float:
        """Return the rate of matrix products in a dtype, in FLOP/s."""
        found = self.gemm_flops.get(dtype)
        return self.gemm_flops["float32"] if found is None else found


def _cuda(
    name: str,
    tflops: float,
    hbm_tb_s: float,
    link_gb_s: float,
    gib: int,
    reached: float = 0.66,
) -> Device:
    """Return a row from rated dense bf16 TFLOP/s, TB/s of memory and GB/s of the host link.

    `reached` is the part of the rated products that large ones reach, with what surrounds them in a step.
    """
    # Large elementwise kernels reach about four fifths of the memory: 2.6 of 3.35 TB/s on an H100, as commonly reported.
    dense, memory = reached * tflops * 1e12, 0.78 * hbm_tb_s * 1e12
    return Device(
        name=name,
        gemm_flops={
            "bfloat16": dense,
            "float16": dense,
            "float32": dense / 16,  # plain fp32 units, TF32 off as torch has it
            "float64": dense / 16,
            "float8_e4m3fn": 2 * dense,
            "float8_e5m2": 2 * dense,
        },
        memory_bytes_per_s=memory,
        launch_us=4.0,
        h2d_bytes_per_s=link_gb_s * 1e9,
        d2h_bytes_per_s=link_gb_s * 1e9,
        # fused AdamW in fp32 reads four and writes three words for each parameter
        adamw_params_per_s=memory / 28,
        capacity_bytes=gib << 30,
        fuses=True,
    )


DEVICES: dict[str, Device] = {
    row.name: row
    for row in (
        # One thread of a recent server processor; measured on 2 shared cores with AVX-512.
        Device(
            name="cpu",
            gemm_flops={"float32": 1.1e11, "float64": 5e10, "bfloat16": 1.1e11, "float16": 5e10},
            memory_bytes_per_s=1.2e10,
            launch_us=4.0,
            attention_fraction=0.4,
            h2d_bytes_per_s=5e9,  # 68 MB that no cache holds: 12.5 ms
            d2h_bytes_per_s=5e9,
            # From 64 bytes to 64 KiB a copy takes 160 to 250 us, half of it calls by the thread that
            # computes: to start it, to hand it over, to wait for it.
            link_latency_us=200.0,
            full_duplex=False,
            link_load=0.5,  # estimated: a thread copies in the memory that compute works in
            adamw_params_per_s=4e8,
        ),
        # The parts of rated products are fitted to published training runs (`bench/simulate.py`), those of one row
        # each; 0.66 is commonly reported.
        _cuda("a100-40gb", 312, 1.56, 25, 40, reached=0.69),
        _cuda("a100-80gb", 312, 2.0, 25, 80, reached=0.69),
        _cuda("h100-80gb", 989, 3.35, 55, 80, reached=0.535),
        # Of HBM2e, held at 500 W: the machine of torchtitan's published runs.
        _cuda("h100-96gb", 989, 2.4, 55, 96, reached=0.515),
        _cuda("h200-141gb", 989, 4.8, 55, 141, reached=0.72),
        _cuda("b200-180gb", 2250, 8.0, 55, 180),
    )
}
"""Known devices by name. Adding one is one row."""


def device_row(name: str) -> Device:
    """Return a device's row.

    Raises:
        PlanError: no such row.
    """
    if name not in DEVICES:
        raise PlanError(f"unknown device {name!r}: known are {', '.join(DEVICES)}")
    return DEVICES[name]


@functools.cache
def row_for_cuda_name(full_name: str) -> Device:
    """Return the row that fits a CUDA device's marketing name best; an A100 where none does, with a warning."""
    text = full_name.lower()
    for mark, row in (
        ("b200", "b200-180gb"),
        ("h200", "h200-141gb"),
        ("h100", "h100-80gb"),
        ("a100-sxm4-40", "a100-40gb"),
        ("a100-pcie-40", "a100-40gb"),
        ("a100", "a100-80gb"),
    ):
        if mark in text:
            return DEVICES[row]
    logger.warning(
        "%s is not a known device: its operators are costed as an A100's; "
        "run `torchloom calibrate --device cuda` to measure it",
        full_name,
    )
    return DEVICES["a100-80gb"]


def known_device(device: torch.device | str = "cpu") -> Device:
    """Return the row of a device of this machine."""
    kind = torch.device(device)
    if kind.type == "cuda":
        return row_for_cuda_name(torch.cuda.get_device_name(kind))
    return DEVICES["cpu"]


_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A10G": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "MI300X": 1307.0,
}
"""Dense bf16 peak per device in TFLOP/s, from the vendors' data sheets; the first match counts."""


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s, or None where it is not known (any processor).

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("CPU")
        (989.0, None)
    """
    words = device_name.replace("-", " ").split()
    for name, peak in _PEAK_TFLOPS.items():
        if all(word in words for word in name.split()):
            return peak
    return None
