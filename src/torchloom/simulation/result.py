"""What a simulation predicts of one training step, in words and as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchloom.costs.hardware import peak_tflops
from torchloom.plan import Plan
from torchloom.simulation.lower import Lowered

_SHOWN = 5
"""Transfers that compute waits for, in the text: what is worth a change is among the first."""
_COMPARED = {
    "a100-80gb": (8, 0.06),
    "h100-80gb": (6, 0.05),
    "h100-96gb": (4, 0.06),
    "h200-141gb": (2, 0.11),
}
"""How many published runs on a device were simulated, and how far step times were off at most: `bench/simulate.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Peak memory and time of one training step of each of N equal ranks."""

    model: str
    num_params: int
    world_size: int
    stage: int
    device: str
    network: str
    micro_steps: int
    tokens: int
    """Of one rank, in one optimizer step."""
    compute_s: float
    """Operators of forward and backward."""
    compute_by: Mapping[str, float]
    """Its seconds by kind: "products", "attention", "elementwise"."""
    exposed_s: float
    """Compute stands still for a transfer."""
    loaded_s: float
    """Compute loses to transfers that run beside it."""
    update_s: float
    """The optimizer's own."""
    network_s: float
    """How long the network is busy."""
    exposed_by: Mapping[str, float]
    """Seconds that compute stands still, by what it waits for; the longest first."""
    peak_bytes: int
    standing_bytes: int
    """Of the peak: what lives between steps."""
    capacity_bytes: int | None
    budget_bytes: int | None
    peak_by_kind: Mapping[str, int]
    flops_per_token: float | None
    plan: Plan | None
    """What the ranks would plan; None without a budget."""
    flat_because: tuple[str, ...]
    """Why equal layers were not compiled as one."""
    lowered: Lowered | None
    """The code for the device, where it was asked for."""
    simulated_in_s: float

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.compute_s + self.exposed_s + self.loaded_s + self.update_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of each rank."""
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization from 0 to 1: of matrices alone, without attention (`engine.work`)."""
        peak = peak_tflops(self.device.upper())
        if peak is None or self.flops_per_token is None:
            return None
        return self.tokens_per_s * self.flops_per_token / (1e12 * peak)

    @property
    def room_bytes(self) -> int | None:
        """Bytes left below the device's memory; negative where the step does not fit; None where unknown."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak fits the device's memory and the budget."""
        limits = [each for each in (self.capacity_bytes, self.budget_bytes) if each is not None]
        return all(self.peak_bytes <= limit for limit in limits)

    @property
    def step_error(self) -> float | None:
        """How far step times of published runs on this device were off at most, as a part; None: none compared."""
        return _COMPARED[self.device][1] if self.device in _COMPARED else None

    def first_change(self) -> str:
        """Return the change of the settings that promises most."""
        share = self.exposed_s / self.step_s
        if not self.fits:
            return _advice_on_memory(self)
        if share > 0.1:
            worst = next(iter(self.exposed_by), "the gradients of the accumulation boundary")
            return (
                f"compute waits {share:.0%} of the step, most for {worst}: use a larger micro batch, gradient "
                "accumulation, zero_optimization.shard_size within one host, or a faster network"
            )
        room = self.room_bytes
        if room is not None and room > 0.25 * (self.capacity_bytes or 0):
            return f"{_gb(room)} of memory are free: use a larger micro batch"
        return "nothing stands out"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, derived figures included."""
        data = asdict(self)
        data["plan"] = None if self.plan is None else json.loads(self.plan.to_json())
        derived = ("step_error", "step_s", "tokens_per_s", "mfu", "fits", "room_bytes")
        return {**data, **{name: getattr(self, name) for name in derived}}

    def text(self) -> str:
        """Return the prediction in lines for a terminal."""
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        parts = ", ".join(f"{kind} {_ms(s).strip()}" for kind, s in self.compute_by.items())
        room, capacity = self.room_bytes, self.capacity_bytes
        fit = ""
        if room is not None and capacity is not None:
            verdict = f"{_gb(room)} free" if room >= 0 else f"{_gb(-room)} too much"
            fit = f" of {_gb(capacity)}: {verdict}"
        lines = [
            f"{self.model}, {self.num_params / 1e9:.3g} B parameters, on {self.world_size} x {self.device} over "
            f"{self.network}, ZeRO stage {self.stage}",
            "",
            f"  peak       {_gb(self.peak_bytes)}{fit}",
            *(f"    {_gb(size):>9}  {kind}" for kind, size in self.peak_by_kind.items() if size),
            f"  step       {self.step_s:.3g} s, {self.tokens_per_s:,.0f} tokens/s per rank{mfu}",
            f"    {_ms(self.compute_s)}  compute: {parts}",
            f"    {_ms(self.exposed_s)}  waiting for transfers (the network is busy {_ms(self.network_s).strip()})",
            *(f"      {_ms(s)}  {what}" for what, s in list(self.exposed_by.items())[:_SHOWN]),
            f"    {_ms(self.loaded_s)}  lost to transfers beside compute",
            f"    {_ms(self.update_s)}  optimizer",
            f"  first      {self.first_change()}",
        ]
        if self.step_error is None:
            lines.append(f"  trust      no published run on {self.device} was compared")
        else:
            lines.append(
                f"  trust      {_COMPARED[self.device][0]} published runs on {self.device}: step times within "
                f"{self.step_error:.0%}; the peak is what tensors hold, allocators reserve more"
            )
        if self.flat_because:
            lines.append(
                f"  note       equal layers were compiled one by one: {self.flat_because[0]}"
            )
        if self.lowered is not None:
            lines.append(self.lowered.text())
        return "\n".join(lines)


def _advice_on_memory(found: Simulation) -> str:
    if found.budget_bytes is None:
        limit = _gb(found.capacity_bytes or 0)
        return f"it does not fit: plan for it with a budget (--budget {limit.replace(' ', '')}) or use more ranks"
    return "it does not fit: use more ranks, a higher ZeRO stage, or offload_optimizer"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:8,.1f} ms"
