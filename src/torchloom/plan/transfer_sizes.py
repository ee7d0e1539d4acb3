"""How large a transfer is: default sizes of buckets and of prefetching, and the sizes that a plan may try instead.

The defaults are those of FSDP2, a layer in use and one on its way. A layer is what its name counts and what repeats:
`layers.3` of `layers.3.mlp.up.weight`, where another item of `layers` has the same weights. Compute of a layer cannot
begin before its weights have arrived, so smaller buckets hide no more of a transfer, and larger ones hold memory for
weights that are not used yet. When a bucket was 16 MiB, small models held many layers at once (12 layers of width 256,
2 ranks: a peak of 200 MiB, now 186), and large ones sent every weight by itself and hid nothing (8 B on 64 simulated
H100: 2.45 s a step, now 1.29).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torchloom.costs import Network
from torchloom.plan.traffic import AHEAD_FACTOR, ConfiguredSizes, Traffic
from torchloom.shard import Layout, ParamSpec

_MOST_BYTES = 16 << 20
"""Of a bucket where transfers take the cores that compute: gloo needs 0.4 ms per MB up to 16 MB, 0.8 ms for 64 MB."""


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
    num_in_flight = 1 if network.on_cores else 2
    return {
        "bucket": {"gather_bytes": gather_bytes, "reduce_bytes": reduce_bytes},
        "prefetch": {"max_bytes": num_in_flight * gather_bytes},
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
