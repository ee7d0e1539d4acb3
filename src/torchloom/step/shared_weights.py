"""Put the sharded weights of a model into memory that the ranks of one host share.

The parameter stays the same object with the same values; its data move into a part of that memory which
no other rank writes. Eager code and state dicts, which need whole weights, gather them as before.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from torchloom.graph import GraphPass, SharedWeights
from torchloom.log import get_logger
from torchloom.runtime import Communicator, WeightStore, make_store
from torchloom.runtime.transports import shm
from torchloom.shard import layout_of, owners_of

logger = get_logger(__name__)


@dataclass(frozen=True)
class Shared:
    """Weights in shared memory, and what passes may know of them."""

    store: WeightStore
    facts: SharedWeights
    copy_bytes: int
    """Size of the copies of this rank's shards in the compute dtype, in bytes; 0 without copies."""


def share_weights(
    model: nn.Module, comm: Communicator, passes: tuple[GraphPass, ...]
) -> Shared | None:
    """Move a model's shards into shared memory if its passes read them there.

    All ranks must call. Keep the result for as long as compiled code runs.

    Args:
        model: a sharded model.
        comm: its communicator.
        passes: the passes that run over its graphs.

    Returns:
        None if weights are gathered by copying; rank 0 logs why the ranks cannot share memory.
    """
    layout = layout_of(model)
    wants = any(each.name == "symmetric_gathers" for each in passes)
    if not wants or not comm.shares_memory or not layout.sharded:
        return None
    specs = layout.sharded
    try:
        store = make_store(
            comm, [spec.shard_numel for spec in specs], [spec.compute_dtype for spec in specs]
        )
    except shm.UnavailableError as error:
        if layout.rank == 0:
            logger.warning(
                "compile.symmetric_memory: %s; weights are gathered by copying through shared memory",
                error,
            )
        return None
    params, copy_bytes = owners_of(model), 0
    for spec, region in zip(specs, store.regions, strict=True):
        if spec.compute_dtype == spec.dtype:
            _move(params[spec.name], region.own)
        else:
            copy_bytes += region.own.nbytes
    facts = SharedWeights(
        name=store.name,
        handle=comm.handle,
        params=tuple((spec.name, spec.compute_dtype) for spec in specs),
    )
    return Shared(store, facts, copy_bytes)


def _move(param: nn.Parameter, place: Tensor) -> None:
    place.copy_(param.data)
    param.data = place
