"""Rates of devices and networks: what a cost is computed from until it is measured.

Rated figures come from the makers' data sheets; the fractions of them that kernels reach are marked
with where they were seen. `torchloom calibrate` replaces a row by what was measured here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from torchloom.errors import PlanError

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
"""As torchloom's own transport runs them over messages; `shm_` in front: through shared memory;
`c10d_`: the process group's own ones."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Alpha-beta model of collectives between ranks: a latency per message, a time per byte."""

    name: str
    alpha_us: float
    """Latency of one message between two ranks."""
    bytes_per_s: float
    """What one rank sends per second while it receives as much."""
    load: float = 0.0
    """Part of a collective's time that compute beside it loses: cores, memory, multiprocessors."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Measured time over modelled time, by kind of collective."""
    prefix: str = ""
    """What stands in front of the kinds of its measured collectives; see `CollectiveKind`."""
    is_tree: bool = False
    """Whether latencies add up with the logarithm of the number of ranks, not with the number: NCCL's trees for
    small messages, and its rings for large ones, whose steps overlap."""
    inner: Network | None = None
    """What connects the ranks of one host, where this row connects hosts."""
    ranks_per_host: int = 8

    def collective_us(self, kind: CollectiveKind, num_bytes: int, world_size: int) -> float:
        """Return the time of one collective by the ring model.

        Over hosts, a ring leaves each host through all of its adapters, one for each rank, so a rank sends as
        fast as they do together, unless the links inside of the host are slower: MPT-13B on 16 to 64 H100s
        keeps the step time of 8 (mosaicml/llm-foundry, scripts/train/benchmarking), which one adapter at 45 GB/s
        for each rank would double.

        Args:
            kind: which collective.
            num_bytes: bytes of the whole tensor: what an all-gather returns, what a reduce-scatter
                or an all-reduce takes.
            world_size: ranks that take part.
        """
        if world_size <= 1:
            return 0.0
        rate = self.bytes_per_s
        if self.inner is not None:
            if world_size <= self.ranks_per_host:
                return self.inner.collective_us(kind, num_bytes, world_size)
            rate = min(self.ranks_per_host * rate, self.inner.bytes_per_s)
        share = (world_size - 1) / world_size
        once = math.ceil(math.log2(world_size)) if self.is_tree else world_size - 1
        rounds, volume = {
            "all_gather": (once, share),
            "reduce_scatter": (once, share),
            "all_reduce": (2 * once, 2 * share),
            "broadcast": (once, 1.0),
        }[kind.removeprefix("c10d_")]
        modelled = rounds * self.alpha_us + 1e6 * volume * num_bytes / rate
        return self.factors.get(kind, 1.0) * modelled


def _cuda(name: str, tflops: float, hbm_tb_s: float, link_gb_s: float, gib: int) -> Device:
    """Return a row from rated dense bf16 TFLOP/s, TB/s of memory and GB/s of the host link."""
    # Of the rated figures, large kernels reach about two thirds of the products and four fifths of
    # the memory: 650 of 989 TFLOP/s and 2.6 of 3.35 TB/s on an H100, as commonly reported.
    dense, memory = 0.66 * tflops * 1e12, 0.78 * hbm_tb_s * 1e12
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
        _cuda("a100-40gb", 312, 1.56, 25, 40),
        _cuda("a100-80gb", 312, 2.0, 25, 80),
        _cuda("h100-80gb", 989, 3.35, 55, 80),
        _cuda("h200-141gb", 989, 4.8, 55, 141),
        _cuda("b200-180gb", 2250, 8.0, 55, 180),
    )
}
"""Known devices by name. Adding one is one row."""

NETWORKS: dict[str, Network] = {
    row.name: row
    for row in (
        # Two ranks of one host, measured: 16 MB all-gather 6-7 ms, 1 MB 0.4 ms; a reduction adds
        # what it gets, and takes about 2.5 times as long.
        Network(
            name="gloo",
            alpha_us=120.0,
            bytes_per_s=1.2e9,
            load=0.5,  # estimated: its threads run on the cores that compute
            factors={"reduce_scatter": 2.2, "all_reduce": 0.8},
        ),
        # Measured beside gloo: small messages take half as long, a gather with its copy as long, a
        # reduction a third. The thread that computes does it all: nothing runs beside compute.
        Network(
            name="shared-memory",
            alpha_us=60.0,
            bytes_per_s=1.3e9,
            load=1.0,
            factors={"reduce_scatter": 0.85, "all_reduce": 0.9},
            prefix="shm_",
        ),
        Network(name="nvlink", alpha_us=6.0, bytes_per_s=3.6e11, load=0.1, is_tree=True),
        Network(name="infiniband-400", alpha_us=12.0, bytes_per_s=4.5e10, load=0.1, is_tree=True),
        # Hosts of eight A100s with 1,600 Gb/s in all, as clouds rent them.
        Network(name="ethernet-200", alpha_us=20.0, bytes_per_s=2.2e10, load=0.1, is_tree=True),
    )
}
"""Known networks by name."""
_SHORT = {"ib400": "infiniband-400", "eth200": "ethernet-200"}


def device_row(name: str) -> Device:
    """Return a device's row.

    Raises:
        PlanError: no such row.
    """
    if name not in DEVICES:
        raise PlanError(f"unknown device {name!r}: known are {', '.join(DEVICES)}")
    return DEVICES[name]


def network_row(name: str) -> Network:
    """Return a network's row, or two of them as one: "nvlink+ib400" inside of hosts of eight, and between them.

    Raises:
        PlanError: no such row.
    """
    inside, plus, between = name.partition("+")
    rows = [_SHORT.get(each, each) for each in ((inside, between) if plus else (inside,))]
    unknown = [each for each in rows if each not in NETWORKS]
    if unknown:
        raise PlanError(
            f"unknown network {unknown[0]!r}: known are {', '.join(NETWORKS)}, and two joined by + such as nvlink+ib400"
        )
    if not plus:
        return NETWORKS[rows[0]]
    return replace(NETWORKS[rows[1]], name=name, inner=NETWORKS[rows[0]])


def row_for_cuda_name(full_name: str) -> Device:
    """Return the row that fits a CUDA device's marketing name best, an A100 where none does."""
    text = full_name.lower()
    for mark, row in (
        ("b200", "b200-180gb"),
        ("h200", "h200-141gb"),
        ("h100", "h100-80gb"),
        ("a100-sxm4-40", "a100-40gb"),
    ):
        if mark in text:
            return DEVICES[row]
    return DEVICES["a100-80gb"]


def local_device(device: torch.device | str = "cpu") -> Device:
    """Return the row of a device of this machine."""
    kind = torch.device(device)
    if kind.type == "cuda":
        return row_for_cuda_name(torch.cuda.get_device_name(kind))
    return DEVICES["cpu"]
