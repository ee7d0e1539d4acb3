"""The time of a step: lowered graphs on four engines, each of which does one thing at a time.

    compute    operators in order; waits where a graph waits
    network    collectives, in the order in which they start
    d2h, h2d   copies to and from host memory; one engine where the link is not full duplex

This is list scheduling of the order that the graphs hold, so it says what their overlap is worth:
the time that compute stands still, and what transfers beside it take from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from torchloom import ops
from torchloom.costs import CostTable, collective_us, link_us, node_us
from torchloom.costs.collectives import between_copies_us
from torchloom.costs.fusion import fused_us
from torchloom.costs.roofline import kind_of_work
from torchloom.graph import args_of, is_fetched, nbytes
from torchloom.ops.regions import half_of_node, is_call_of_body

_LINKS = {ops.offload_start: "d2h", ops.reload_start: "h2d"}
_BODY = "body"
_COLLECTIVES = (ops.gather_start, ops.reduce_start, ops.sync_start)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where the time of a step goes, in microseconds."""

    compute_us: float
    """Operators, without a pause."""
    exposed_us: float
    """Compute stands still for a transfer."""
    busy_us: dict[str, float] = field(default_factory=dict)
    """Work of the other engines."""
    loaded_us: float = 0.0
    """Compute loses to transfers that run beside it."""
    copy_us: float = 0.0
    """Of these two, because of copies to host memory and back."""
    exposed_by: dict[str, float] = field(default_factory=dict)
    """What compute stands still for, by what is waited for: `gather layers.0.wq.weight and 8 more`."""
    compute_by: dict[str, float] = field(default_factory=dict)
    """Operators by kind: "products", "attention", "elementwise"."""

    @property
    def overhead_us(self) -> float:
        """What transfers add to the time of compute."""
        return self.exposed_us + self.loaded_us

    @property
    def total_us(self) -> float:
        """From the first node to the last."""
        return self.compute_us + self.overhead_us


def timeline(
    graphs: Iterable[fx.Graph],
    table: CostTable,
    world_size: int,
    *,
    copies: int = 1,
    gathers_per_use: float = 1.0,
    bucket_bytes: int = 16 << 20,
) -> Timeline:
    """Run lowered graphs one after the other on modelled engines.

    Args:
        graphs: forward and backward as passes leave them.
        table: times of operators, collectives and copies.
        world_size: ranks that share the weights.
        copies: of the weights, between which gradients are averaged as well.
        gathers_per_use: of a resident weight, per run of the graphs: one over the micro-steps of an
            optimizer step. It blocks, with the others, up to `bucket_bytes` at a time, and so does
            the copy of its piece where that waits on the host.
        bucket_bytes: see above.
    """
    clock = 0.0
    computed: defaultdict[str, float] = defaultdict(float)
    exposed: defaultdict[str, float] = defaultdict(float)
    exposed_by: defaultdict[str, float] = defaultdict(float)
    free: defaultdict[str, float] = defaultdict(float)
    busy: defaultdict[str, float] = defaultdict(float)
    ends: dict[fx.Node, tuple[float, str]] = {}
    residents: dict[str, int] = {}
    fetched_us, compute = 0.0, _Compute(table)
    for graph in graphs:
        for node, kind, compute_us in compute.of(graph):
            engine = _engine_of(node, table)
            if engine is not None:
                duration = transfer_us(node, table, world_size, copies)
                free[engine] = max(clock, free[engine]) + duration
                ends[node] = free[engine], engine
                busy[engine] += duration
            elif node.target is ops.wait_:
                start = args_of(node)[0][0].args[0]
                end, engine = ends.get(start, (clock, ""))
                if end > clock:
                    exposed[engine] += end - clock
                    exposed_by[transfer_name(start)] += end - clock
                    clock = end
            elif node.target is ops.resident:
                piece, *_, name = args_of(node)
                if is_fetched(node) and name not in residents:
                    fetched_us += link_us("h2d", nbytes(piece), table)
                residents[name] = nbytes(node)
            else:
                parts = compute.of_body(node) if kind == _BODY else {kind: compute_us}
                for each, us in parts.items():
                    computed[each] += us
                clock += compute_us
    blocked = gathers_per_use * _gathered_us(residents, table, world_size, bucket_bytes)
    fetched_us *= gathers_per_use
    hidden = {engine: max(0.0, us - exposed[engine]) for engine, us in busy.items()}
    beside = table.network.load * hidden.pop("network", 0.0)
    copying = table.device.link_load * sum(hidden.values())
    return Timeline(
        compute_us=sum(computed.values()),
        exposed_us=sum(exposed.values()) + blocked + fetched_us,
        busy_us={**busy, "network": busy["network"] + blocked},
        loaded_us=beside + copying,
        copy_us=sum(exposed[link] for link in hidden) + copying + fetched_us,
        exposed_by=dict(exposed_by),
        compute_by=dict(computed),
    )


class _Compute:
    """Times of operators, fused where the device's compiler fuses; each body is summed up once."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._bodies: dict[str, dict[str, float]] = {}

    def of(self, graph: fx.Graph) -> Iterator[tuple[fx.Node, str, float]]:
        """Yield each node with the kind of its work and its time in microseconds."""
        device = self._table.device
        fused = fused_us(graph, device) if device.fuses else {}
        for node in graph.nodes:
            if is_call_of_body(node):
                yield node, _BODY, sum(self.of_body(node).values())
            elif node in fused:
                yield node, "elementwise", fused[node]
            else:
                yield node, kind_of_work(node), node_us(node, self._table)

    def of_body(self, call: fx.Node) -> dict[str, float]:
        half = half_of_node(call)
        if half.name not in self._bodies:
            found: defaultdict[str, float] = defaultdict(float)
            for _, kind, us in self.of(half.graph_module.graph):
                found[kind] += us
            self._bodies[half.name] = found
        return self._bodies[half.name]


def transfer_name(start: fx.Node) -> str:
    """Return what a node transfers, in words: the operation, and the first of its parameters or values."""
    kind = str(start.target).split(".")[1].removesuffix("_start")
    names = args_of(start)[1] if start.target in _COLLECTIVES else _moved_names(start)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{kind} {names[0]}{more}"


def _moved_names(start: fx.Node) -> list[str]:
    """Return the parameters whose shards a copy brings for a gather; of another copy the name of its node."""
    found = [
        args_of(user)[1][args_of(user)[0].index(arrived)]
        for arrived in start.users
        for user in arrived.users
        if user.target is ops.gather_start
    ]
    return found or [start.name]


def transfer_us(start: fx.Node, table: CostTable, world_size: int, copies: int = 1) -> float:
    """Return the time of the transfer that a node starts, in microseconds; 0 for other nodes.

    Args:
        start: any node of a lowered graph.
        table: times of collectives and copies.
        world_size: ranks that share the weights.
        copies: of the weights, between which gradients are averaged as well.
    """
    if start.target is ops.gather_start:
        return collective_us("all_gather", nbytes(start), world_size, table)
    if start.target in _COLLECTIVES:
        kind = "reduce_scatter" if start.target is ops.reduce_start else "all_reduce"
        num_bytes = sum(nbytes(node) for node in args_of(start)[0])
        held_bytes = num_bytes // world_size if kind == "reduce_scatter" else num_bytes
        return collective_us(kind, num_bytes, world_size, table) + between_copies_us(
            held_bytes, world_size, copies, table
        )
    if start.target is ops.symmetric_start:
        return table.network.alpha_us  # ranks meet; nothing is sent
    if start.target in _LINKS:
        kind = "d2h" if start.target is ops.offload_start else "h2d"
        return link_us(kind, nbytes(start), table)
    return 0.0


def _engine_of(node: fx.Node, table: CostTable) -> str | None:
    if node.target in _COLLECTIVES or node.target is ops.symmetric_start:
        return "network"
    if node.target in _LINKS:
        return _LINKS[node.target] if table.device.full_duplex else "link"
    return None


def _gathered_us(
    residents: dict[str, int], table: CostTable, world_size: int, bucket_bytes: int
) -> float:
    total, held = 0.0, 0
    for size in residents.values():
        if held and held + size > bucket_bytes:
            total += collective_us("all_gather", held, world_size, table)
            held = 0
        held += size
    return total + (collective_us("all_gather", held, world_size, table) if held else 0.0)
