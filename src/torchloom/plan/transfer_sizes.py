"""What a graph sends, and how large a transfer is: default sizes of buckets and of prefetching, and those that a plan may try.

The defaults are those of FSDP2, a layer in use and one on its way. A layer is what its name counts and what repeats:
`layers.3` of `layers.3.mlp.up.weight`, where another item of `layers` has the same weights. Compute of a layer cannot
begin before its weights have arrived, so smaller buckets hide no more of a transfer, and larger ones hold memory for
weights that are not used yet. When a bucket was 16 MiB, small models held many layers at once (12 layers of width 256,
2 ranks: a peak of 200 MiB, now 186), and large ones sent every weight by itself and hid nothing (8 B on 64 simulated
H100: 2.45 s a step, now 1.29).

Traffic is what a joint graph sends whatever a plan decides, and what that costs at least. A collective takes `load` of its time from compute where it runs beside it, and all of it where
compute waits; its time is at least its bytes at the best rate of the network, however they are
bucketed. A weight is gathered for each run of the graphs or stays, which takes memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.costs import CollectiveKind, CostTable, Network, collective_us
from torchloom.graph import PassContext, args_of, find, forward_nodes, is_view, nbytes, value_of
from torchloom.plan.frontier import MemorySource
from torchloom.shard import Layout, ParamSpec

_MOST_BYTES = 16 << 20
"""Of a bucket where transfers take the cores that compute: gloo needs 0.4 ms per MB up to 16 MB, 0.8 ms for 64 MB."""
_MOST_WRITTEN_BYTES = 64 << 20
"""Of sizes that settings give, there: many files name 5e8 elements, which is all of a small model at once."""


class TransferSizes(NamedTuple):
    """How much of a graph's transfers is in flight at a time; None is what the config says."""

    bucket_bytes: int | None = None
    """Gathers and reductions are merged up to this size."""
    prefetch_bytes: int | None = None
    """Weights gathered ahead of their use."""

    @property
    def is_lean(self) -> bool:
        """Whether memory is all that it can gain."""
        return self.bucket_bytes is not None


CONFIGURED = TransferSizes()


def sizes_to_try(
    traffic: Traffic, sizes: ConfiguredSizes, passes: Collection[str], *, is_bound: bool
) -> tuple[TransferSizes, ...]:
    """Return sizes to try beside the config's: more and less prefetching, and smaller buckets.

    Args:
        traffic: what the graph sends.
        sizes: what the config says.
        passes: names of the passes that run.
        is_bound: whether the config's prefetching is an upper bound.
    """
    gathered_bytes = sum(each.num_bytes for each in traffic.gathers.values())
    most_bytes = max(gathered_bytes, *traffic.reductions.values())
    if not most_bytes:
        return ()
    found: list[TransferSizes] = []
    ahead_bytes = min(sizes.prefetch_bytes, most_bytes)
    largest_bytes = max(sizes.gather_bytes, sizes.reduce_bytes)
    if gathered_bytes and "prefetch" in passes:
        found.append(TransferSizes(prefetch_bytes=ahead_bytes // AHEAD_FACTOR))
        if gathered_bytes > sizes.prefetch_bytes and not is_bound:
            found.append(TransferSizes(prefetch_bytes=AHEAD_FACTOR * sizes.prefetch_bytes))
    if "bucket" in passes:
        bucket_bytes = min(largest_bytes, most_bytes)
        found.append(TransferSizes(bucket_bytes // AHEAD_FACTOR, ahead_bytes // AHEAD_FACTOR))
        found.append(TransferSizes(0, 0))
    return tuple(found)


def default_sizes(layout: Layout, network: Network) -> dict[str, dict[str, object]]:
    """Return the options of `bucket` and `prefetch` that hold where settings give none.

    Args:
        layout: how the model is sharded.
        network: what carries the transfers.
    """
    gathered = layout.sharded
    gather_bytes = _bucket_bytes(gathered, layout.world_size, network)
    if not gather_bytes:
        return {}
    reduced = [spec for spec in gathered if spec.requires_grad]
    reduce_bytes = _bucket_bytes(reduced, layout.world_size, network)
    # Over gloo, 34 M parameters, batch 1, a second one cost 49 MB and gained less than 1 % of the step.
    num_in_flight, uses_ahead = (1, 0) if network.on_cores else (2, 1)
    return {
        "bucket": {"gather_bytes": gather_bytes, "reduce_bytes": reduce_bytes},
        "prefetch": {"max_bytes": num_in_flight * gather_bytes, "uses_ahead": uses_ahead},
    }


def sizes_within(
    options: Mapping[str, Mapping[str, object]], network: Network
) -> dict[str, dict[str, object]]:
    """Return options of passes that settings give, with sizes of transfers that a network can use.

    Args:
        options: by the name of the pass.
        network: what carries the transfers; where the computing cores do, sizes are at most 64 MiB.
    """
    return {
        name: {
            option: min(value, _MOST_WRITTEN_BYTES)
            if network.on_cores and name in ("bucket", "prefetch") and isinstance(value, int)
            else value
            for option, value in given.items()
        }
        for name, given in options.items()
    }


def _bucket_bytes(specs: Sequence[ParamSpec], world_size: int, network: Network) -> int:
    """Return the bytes of a layer, or of as many small ones as a link sends within the latency of a message."""
    layer_bytes = _layer_bytes(specs, world_size)
    if not layer_bytes:
        return 0
    latency_bytes = 1e-6 * network.alpha_us * network.bytes_per_s
    num_bytes = layer_bytes * max(1, int(latency_bytes // layer_bytes))
    return min(num_bytes, _MOST_BYTES) if network.on_cores else num_bytes


def _layer_bytes(specs: Sequence[ParamSpec], world_size: int) -> int:
    """Return the bytes of the largest layer, of the largest module where none repeats."""
    contents: defaultdict[str, list[object]] = defaultdict(list)
    for spec in specs:
        for item in _items(spec.name):
            contents[item].append((spec.name.removeprefix(item), spec.shape))
    alike = Counter((_parent(item), tuple(inside)) for item, inside in contents.items())
    layers = {i for i, inside in contents.items() if alike[_parent(i), tuple(inside)] > 1}
    sizes: Counter[str] = Counter()
    for spec in specs:
        home = next((item for item in _items(spec.name) if item in layers), _parent(spec.name))
        sizes[home] += world_size * spec.shard_numel * spec.compute_dtype.itemsize
    return max((sizes[layer] for layer in layers or sizes), default=0)


def _items(name: str) -> Iterator[str]:
    """Yield the numbered modules that a parameter is in, the outermost first."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            yield ".".join(parts[: place + 1])


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


AHEAD_FACTOR = 4
"""A plan tries buckets and prefetching divided by this factor, and prefetching multiplied by it."""
_SMALLEST = 1 << 12
"""Bytes: below this a message is all latency, and its rate no better than that of larger ones."""


class GatheredWeight(NamedTuple):
    """A weight that a graph gathers."""

    num_bytes: int
    """Of the whole weight."""
    num_runs: int
    """How often a run of forward and backward gathers it at least."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a joint graph sends, whatever is decided about it."""

    world_size: int = 1
    gathers: Mapping[str, GatheredWeight] = field(default_factory=dict)
    """By the names of parameters."""
    reductions: Mapping[CollectiveKind, int] = field(default_factory=dict)
    """Bytes by kind of collective."""
    in_flight_bytes: int = 0
    """What gathered weights may hold at a time where none stays: as much less may be needed at the
    peak where they do."""

    def bytes_of(self, name: str) -> int:
        """Return the bytes that a weight takes where it stays gathered; 0 where it is not gathered."""
        return self.gathers[name].num_bytes if name in self.gathers else 0

    def least_us(
        self, costs: CostTable, may_stay: Collection[str] = (), micro_steps: int = 1
    ) -> tuple[float, tuple[MemorySource, ...]]:
        """Return the least time when everything that may stay does, and what the others cost more.

        Args:
            costs: times of collectives.
            may_stay: parameters that may stay gathered from step to step.
            micro_steps: runs of the graphs per optimizer step: what stays is gathered once in it.
        """
        load = costs.network.load
        floor_us = load * sum(
            num_bytes * self._least_us_per_byte(kind, num_bytes, costs)
            for kind, num_bytes in self.reductions.items()
        )
        total = sum(each.num_bytes for each in self.gathers.values())
        us_per_byte = self._least_us_per_byte("all_gather", total, costs)
        sources = []
        for name, (num_bytes, num_runs) in self.gathers.items():
            sent_us = load * us_per_byte * num_bytes * num_runs
            kept_us = us_per_byte * num_bytes / micro_steps  # compute waits for these
            if name not in may_stay:
                floor_us += sent_us
                continue
            floor_us += min(kept_us, sent_us)
            if num_runs > 1:  # else it may live through forward and backward anyway
                sources.append(MemorySource(max(0.0, sent_us - kept_us) / num_bytes, num_bytes))
        return floor_us, tuple(sources)

    def _least_us_per_byte(self, kind: CollectiveKind, num_bytes: int, costs: CostTable) -> float:
        """Return the least time per byte of any bucket, in microseconds."""
        sizes = [num_bytes] if num_bytes else []
        size = _SMALLEST
        while size < num_bytes:
            sizes.append(size)
            size *= 2
        return min(
            (collective_us(kind, each, self.world_size, costs) / each for each in sizes),
            default=0.0,
        )


class ConfiguredSizes(NamedTuple):
    """Sizes of a graph's transfers, in bytes, where no plan decides them."""

    gather_bytes: int
    """Gathers are merged up to this size."""
    reduce_bytes: int
    """Reductions are merged up to this size."""
    prefetch_bytes: int
    """Weights gathered ahead of their use."""


def traffic_of(joint: fx.Graph, context: PassContext, sizes: ConfiguredSizes) -> Traffic:
    """Return the transfers of a joint graph that no plan changes.

    Args:
        joint: the graph.
        context: the ranks that share its weights.
        sizes: what may be in flight.
    """
    world_size, forward = context.world_size, set(forward_nodes(joint))
    gathers: dict[str, GatheredWeight] = {}
    if context.shared_weights is None:  # otherwise graphs read whole weights in shared memory
        for node in find(joint, ops.gather):
            shard, _shape, dtype, *_, name = args_of(node)
            num_bytes = value_of(shard).numel() * world_size * dtype.itemsize
            known = gathers.get(name, GatheredWeight(0, 2))
            num_runs = min(known.num_runs, _num_runs(node, forward))
            gathers[name] = GatheredWeight(known.num_bytes + num_bytes, num_runs)
    reductions: dict[CollectiveKind, int] = {
        "reduce_scatter": sum(nbytes(args_of(n)[0]) for n in find(joint, ops.reduce)),
        "all_reduce": sum(nbytes(args_of(n)[0]) for n in find(joint, ops.sync)),
    }
    # A bucket in use, those ahead of it, and one weight that is larger than a bucket.
    ahead_bytes = AHEAD_FACTOR * sizes.prefetch_bytes
    largest_bytes = max((each.num_bytes for each in gathers.values()), default=0)
    in_flight_bytes = sizes.gather_bytes + ahead_bytes + largest_bytes
    return Traffic(world_size, gathers, reductions, in_flight_bytes)


def _num_runs(gather: fx.Node, forward: Collection[fx.Node]) -> int:
    """Return how often a run gathers a weight: 2 if backward reads it too and may gather it again."""
    if gather.meta.get("recompute") is not CheckpointPolicy.MUST_RECOMPUTE:
        return 1
    chain = [gather]
    for node in chain:  # grows while it is walked
        if any(user not in forward and user.op == "call_function" for user in node.users):
            return 2
        chain += [user for user in node.users if is_view(user)]
    return 1
