"""What a simulation predicts of one training step, in words and as plain data."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from torchloom.config import Config
from torchloom.costs import CostTable, collective_us
from torchloom.costs.collectives import between_copies_us
from torchloom.costs.hardware import peak_tflops
from torchloom.errors import PlanError
from torchloom.loop.step_log import work_of
from torchloom.pipeline.report import GraphReport
from torchloom.plan import Plan
from torchloom.shard import Layout
from torchloom.simulation.lower import Lowered, lowered
from torchloom.step import CompiledStep

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


class Captured(NamedTuple):
    """A captured step, its model and layout."""

    step: CompiledStep
    module: nn.Module
    layout: Layout
    num_params: int
    stepped: int
    """Elements that this rank's optimizer steps as shards or slices."""
    owned_us: float
    """Time of the exchanges and updates of what ranks own."""

    def result(
        self, table: CostTable, settings: Config, name: str, tokens: int, began: float
    ) -> Simulation:
        """Return what was found.

        Args:
            table: of the simulated hardware.
            settings: of the run.
            name: of the model.
            tokens: of a micro batch.
            began: when the simulation began, by `time.perf_counter`.

        Raises:
            PlanError: no graph has a backward.
        """
        graphs = [each for each in self.step.session.report.graphs if each.times is not None]
        if not graphs:
            raise PlanError(
                f"no graph of {name} has a backward: let the model return its loss, or pass loss="
            )
        standing, micro_steps = self.step.standing, settings.batch.accumulation_steps
        exposed, computed = Counter[str](), Counter[str]()
        for each in graphs:
            exposed.update(each.times.exposed_by if each.times else {})
            computed.update(each.times.compute_by if each.times else {})
        peak, batch_bytes = max(
            ((each.peak, each.batch_bytes) for each in graphs if each.peak),
            key=lambda found: found[0].peak_bytes + found[1],
        )
        boundary_us = _boundary_us(self.layout, table)
        plan = self.step.session.plan() if standing.budget_bytes is not None else None
        update_us = 1e6 * self.stepped / table.device.adamw_params_per_s + self.owned_us
        if plan is not None:
            update_us += micro_steps * max((e.states_us for e in plan.graphs), default=0.0)
        elif standing.states is not None:
            update_us += standing.states.added_us(0, table.device)
        kinds: Counter[str] = Counter()
        for group in peak.groups:
            kinds[group.kind] += group.num_bytes
        for kind, _, num_bytes in (
            self.step.session.standing.parts if self.step.session.standing else ()
        ):
            kinds[kind] += num_bytes
        kinds["batch"] += batch_bytes
        within_bytes = max(batch_bytes + peak.peak_bytes, standing.step_bytes)
        work = work_of(self.module, self.layout, torch.device("cpu"))
        return Simulation(
            model=name,
            num_params=self.num_params,
            world_size=self.layout.num_ranks,
            stage=settings.zero.stage,
            device=table.device.name,
            network=table.network.name,
            micro_steps=micro_steps,
            tokens=tokens * micro_steps,
            compute_by={kind: micro_steps * us / 1e6 for kind, us in computed.most_common()},
            compute_s=micro_steps * _sum(graphs, "compute_us"),
            exposed_s=micro_steps * _sum(graphs, "exposed_us") + boundary_us / 1e6,
            loaded_s=micro_steps * _sum(graphs, "loaded_us"),
            update_s=update_us / 1e6,
            network_s=micro_steps * sum(e.times.busy_us["network"] for e in graphs if e.times) / 1e6
            + boundary_us / 1e6,
            exposed_by={what: micro_steps * us / 1e6 for what, us in exposed.most_common()},
            peak_bytes=standing.base_bytes + within_bytes if plan is None else plan.peak_bytes,
            standing_bytes=standing.base_bytes,
            capacity_bytes=table.device.capacity_bytes,
            budget_bytes=standing.budget_bytes,
            peak_by_kind=dict(kinds.most_common()),
            flops_per_token=work.flops_per_token,
            plan=plan,
            flat_because=tuple(dict.fromkeys(why for each in graphs for why in each.flat_because)),
            lowered=lowered(graphs, peak.peak_bytes),
            simulated_in_s=time.perf_counter() - began,
        )


def _sum(graphs: Sequence[GraphReport], what: str) -> float:
    return sum(getattr(each.times, what) for each in graphs) / 1e6


def _boundary_us(layout: Layout, table: CostTable) -> float:
    """Return the time of what travels behind backward at stages 0 and 1, where nothing hides it."""
    whole = [spec for spec in layout if spec.requires_grad and spec.mode == "whole"]
    reduced = sum(spec.numel * spec.wire_dtype.itemsize for spec in whole)
    sliced = sum(spec.numel * spec.dtype.itemsize for spec in whole if spec.is_sliced)
    ranks, copies = layout.world_size, layout.num_replicas
    if not reduced:
        return 0.0
    if not sliced:
        return collective_us("all_reduce", reduced, ranks * copies, table)
    return (
        collective_us("reduce_scatter", reduced, ranks, table)
        + between_copies_us(reduced // ranks, ranks, copies, table)
        + collective_us("all_gather", sliced, ranks, table)
    )
