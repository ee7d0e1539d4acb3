"""The transfers of a joint graph: what it sends and reloads, and which sizes of them a plan may try."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom import ops
from torchloom.costs import CollectiveKind
from torchloom.graph import (
    GraphPass,
    PassContext,
    args_of,
    find,
    forward_nodes,
    is_view,
    nbytes,
    value_of,
)
from torchloom.passes import PASSES
from torchloom.plan import TransferSizes
from torchloom.plan.traffic import GatheredWeight, Traffic

_STEP = 4
"""A plan tries buckets and prefetching divided by this factor, and prefetching multiplied by it."""


class ConfiguredSizes(NamedTuple):
    """Sizes of a graph's transfers, in bytes, where no plan decides them."""

    gather_bytes: int
    """Gathers are merged up to this size."""
    reduce_bytes: int
    """Reductions are merged up to this size."""
    prefetch_bytes: int
    """Weights gathered ahead of their use."""


def option_of(passes: Mapping[str, GraphPass], name: str, option: str) -> Any:
    """Return the value of a pass's option; the default if the pass does not run.

    Args:
        passes: those that run, by name.
        name: of the pass.
        option: its keyword.
    """
    return passes.get(name, PASSES[name]).option(option)


def configured_sizes(passes: Mapping[str, GraphPass]) -> ConfiguredSizes:
    """Return the sizes that the options of the passes say."""
    return ConfiguredSizes(
        option_of(passes, "bucket", "gather_bytes"),
        option_of(passes, "bucket", "reduce_bytes"),
        option_of(passes, "prefetch", "max_bytes"),
    )


def traffic_of(joint: fx.GraphModule, context: PassContext, sizes: ConfiguredSizes) -> Traffic:
    """Return the transfers of a joint graph that no plan changes.

    Args:
        joint: the graph.
        context: the ranks that share its weights.
        sizes: what may be in flight.
    """
    world_size, forward = context.world_size, set(forward_nodes(joint.graph))
    gathers: dict[str, GatheredWeight] = {}
    if context.shared_weights is None:  # otherwise graphs read whole weights in shared memory
        for node in find(joint.graph, ops.gather):
            shard, _shape, dtype, *_, name = args_of(node)
            num_bytes = value_of(shard).numel() * world_size * dtype.itemsize
            known = gathers.get(name, GatheredWeight(0, 2))
            num_runs = min(known.num_runs, _num_runs(node, forward))
            gathers[name] = GatheredWeight(known.num_bytes + num_bytes, num_runs)
    reductions: dict[CollectiveKind, int] = {
        "reduce_scatter": sum(nbytes(args_of(n)[0]) for n in find(joint.graph, ops.reduce)),
        "all_reduce": sum(nbytes(args_of(n)[0]) for n in find(joint.graph, ops.sync)),
    }
    # A bucket in use, those ahead of it, and one weight that is larger than a bucket.
    ahead_bytes = _STEP * sizes.prefetch_bytes
    largest_bytes = max((each.num_bytes for each in gathers.values()), default=0)
    in_flight_bytes = sizes.gather_bytes + ahead_bytes + largest_bytes
    return Traffic(world_size, gathers, reductions, in_flight_bytes)


def transfers_to_try(
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
        found.append(TransferSizes(prefetch_bytes=ahead_bytes // _STEP))
        if gathered_bytes > sizes.prefetch_bytes and not is_bound:
            found.append(TransferSizes(prefetch_bytes=_STEP * sizes.prefetch_bytes))
    if "bucket" in passes:
        bucket_bytes = min(largest_bytes, most_bytes)
        found.append(TransferSizes(bucket_bytes // _STEP, ahead_bytes // _STEP))
        found.append(TransferSizes(0, 0))
    return tuple(found)


def reloaded_bytes(joint: fx.GraphModule) -> dict[str, int]:
    """Return the bytes of the shards that wait on the host, by the names of parameters."""
    return {name: nbytes(reload) for name, reload in _reloads(joint)}


def keep_shards(joint: fx.GraphModule, names: Collection[str]) -> None:
    """Remove the reloads of these parameters: their gathers read a shard that stays on the device."""
    # A shard that is gathered in two dtypes is reloaded once.
    for reload in dict.fromkeys(each for name, each in _reloads(joint) if name in names):
        reload.replace_all_uses_with(args_of(reload)[0])
        joint.graph.erase_node(reload)


def _reloads(joint: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """Yield what reloads shards from the host, with the names of their parameters."""
    for gather in find(joint.graph, ops.gather):
        shard = args_of(gather)[0]
        if shard.target is ops.reload:
            yield args_of(gather)[-1], shard


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
