"""A plan: what was decided for each captured graph, with the figures that it rests on. Pure data.

The names of fields are those of plan.json, of events and of sidecar files, all of which older versions
wrote: they stay. `pieces` are shards, `again` is recomputed from offloaded values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchloom.errors import PlanError
from torchloom.files import from_plain, write_whole
from torchloom.graph import digest_of

VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What a plan does with one value between forward and backward, and why."""

    value: str
    """Name of the node that makes it."""
    op: str
    num_bytes: int
    action: str
    """"keep"; "recompute"; "offload": it waits in host memory; "unused": backward does not need it."""
    cost_us: float
    """Time to compute this one again, in microseconds."""
    where: str = ""
    """Module or line that made it, where known."""
    place: int = -1
    """Which of the graph's calls of this operator makes it, counted from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPlan:
    """The decisions for one joint graph."""

    graph: str
    """Digest of the graph: a plan fits no other one."""
    budget_bytes: int | None
    """What forward and backward may add to what is live before and beside them; None: no bound."""
    peak_bytes: int
    """Predicted highest sum of allocations above what is live before."""
    graph_peak_bytes: int
    """The same for the graphs as they are given to the compiler. A compiler that fuses and reuses
    buffers may need less or more; the budget is kept by `peak_bytes`."""
    saved_bytes: int
    """Of these, live when backward begins."""
    batch_bytes: int = 0
    """Inputs of the step, which live as long as it does; not part of the peaks here."""
    min_peak_bytes: int
    """The least that any plan found for this graph needs."""
    compute_us: float
    """Time of forward and backward without recomputation, operator by operator."""
    measured_us: float = 0.0
    """Of this, the time of operators that were measured on this machine; the rest is modelled."""
    extra_us: float
    """Time of what backward computes again."""
    overhead_us: float = 0.0
    """What collectives and copies add: compute waits for them, or shares cores with them."""
    copy_us: float = 0.0
    """Of this, because of copies to host memory and back."""
    states_us: float = 0.0
    """Extra time to stream optimizer states that do not fit on the device, per run of the graph."""
    bound_us: float
    """No plan of the family within the budget adds less than this to compute: by computing again, by
    collectives and copies, and for states."""
    decisions: tuple[Decision, ...] = ()
    again: frozenset[str] = frozenset()
    """Values that backward computes again where they come from one that waited in host memory."""
    resident: Mapping[str, int] = field(default_factory=dict)
    """Parameters whose weights stay gathered from step to step, for this graph or for those planned
    before it, with the bytes of the whole weights. These add to the peak."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """Parameters whose shard stays on the device though it could wait on the host, for this graph or
    for those planned before it, with the bytes of the shards. These add to the peak as well."""
    calls_bodies: bool = False
    """Whether equal parts of the graph were calls of one body: as one body or each on its own, they are
    scheduled differently."""
    prefetch_bytes: int | None = None
    """Weights gathered ahead of their use hold at most this much; None: as the config says."""
    bucket_bytes: int | None = None
    """Gathers and reductions are merged up to this size, 0: not at all; None: as far as the config lets
    them, which is a bound in any case."""

    loss_rows: tuple[int, ...] = ()
    """For each loss that never makes all logits, the rows whose logits it computes at a time."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    @property
    def step_us(self) -> float:
        """Predicted time."""
        return self.compute_us + self.extra_us + self.overhead_us + self.states_us

    @property
    def gap(self) -> float:
        """How far the predicted time can be above the best, as a fraction of it."""
        added = self.extra_us + self.overhead_us + self.states_us
        return (added - self.bound_us) / max(self.compute_us + self.bound_us, 1e-9)

    @property
    def recompute(self) -> frozenset[str]:
        """Names of the values that backward computes again."""
        return frozenset(each.value for each in self.decisions if each.action == "recompute")

    @property
    def offload(self) -> frozenset[str]:
        """Names of the values that wait in host memory."""
        return frozenset(each.value for each in self.decisions if each.action == "offload")

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that stay gathered."""
        return sum(self.resident.values())

    @property
    def beside_bytes(self) -> int:
        """Bytes of the weights and shards that stay on the device beside the peak."""
        return self.resident_bytes + sum(self.pieces.values())

    @property
    def digest(self) -> str:
        """Short hash, equal for equal plans."""
        text = json.dumps(asdict(self), sort_keys=True, default=sorted)
        return digest_of(text)

    @property
    def traffic_key(self) -> tuple[object, ...]:
        """All that decides which collectives run, equal for graphs that differ in sizes alone."""
        crossing = ("recompute", "offload")
        return (
            frozenset((d.op, d.place, d.action) for d in self.decisions if d.action in crossing),
            frozenset(self.resident),
            self.bucket_bytes,
            self.prefetch_bytes,
            self.calls_bodies,
        )

    @property
    def choices(self) -> tuple[object, ...]:
        """All that was decided, for comparison."""
        return (
            self.recompute,
            self.offload,
            self.again,
            frozenset(self.resident),
            frozenset(self.pieces),
            self.bucket_bytes,
            self.prefetch_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a run: one part for each captured graph.

    Example:
        >>> plan = Plan(world_size=2, budget_bytes=None, base_bytes=0)
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    world_size: int
    budget_bytes: int | None
    """What the user gave, for everything."""
    base_bytes: int
    """Parameters, gradients and optimizer states: live before and after forward and backward."""
    optimizer_bytes: int = 0
    """What the optimizer's step adds to the base at most: gradients that are not in it, temporaries."""
    graphs: tuple[GraphPlan, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Predicted highest sum of everything, over the whole step."""
        beside = max((g.beside_bytes for g in self.graphs), default=0)
        within = max((g.batch_bytes + g.peak_bytes for g in self.graphs), default=0)
        return self.base_bytes + beside + max(within, self.optimizer_bytes)

    @property
    def digest(self) -> str:
        """Short hash, equal for equal plans: what ranks compare."""
        return digest_of(self.to_json())

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        facts = {"version": VERSION, **asdict(self)}
        return json.dumps(facts, indent=1, sort_keys=True, default=sorted)  # sets

    @classmethod
    def from_json(cls, text: str, where: str = "the plan") -> Plan:
        """Read a plan.

        Raises:
            PlanError: not JSON, not a plan, or of another version of the format.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{where} is not a plan: {error}") from error
        if not isinstance(data, dict):
            raise PlanError(f"{where} is not a plan: it holds no JSON object")
        version = data.pop("version", None)
        if version != VERSION:
            raise PlanError(
                f"{where} is of version {version!r} of the format, this torchloom reads version "
                f"{VERSION}: make it again"
            )
        try:
            return from_plain(cls, data, is_exact=True)
        except (TypeError, ValueError) as error:
            raise PlanError(f"{where} lacks or adds fields: {error}") from error

    def save(self, path: str | Path) -> Path:
        """Write plan.json."""
        return write_whole(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read plan.json.

        Raises:
            PlanError: no such file, or not a plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise PlanError(f"no plan can be read from {path}: {reason}") from error
        return cls.from_json(text, str(path))

    def check_world(self, world_size: int) -> None:
        """Refuse a plan that was made for another number of ranks.

        Raises:
            PlanError: it was.
        """
        if self.world_size != world_size:
            raise PlanError(
                f"this plan was made for {self.world_size} ranks, the run has {world_size}: "
                "shards, buckets and peaks differ; plan again, without a pinned plan"
            )
