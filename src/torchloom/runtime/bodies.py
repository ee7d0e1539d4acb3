"""Binds the operators of `torchloom.ops` to communicators and movers.

Traced operators run when a graph is not woven: eager code, graph breaks, a backend without passes.
They communicate at once, one parameter at a time: correct, slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchloom._torch.autograd import keeps_graph
from torchloom.ops.copies import HOST
from torchloom.ops.library import LIBRARY
from torchloom.runtime.communicators import lookup
from torchloom.runtime.host import Mover, is_on_host, mover_of
from torchloom.runtime.weights import find_store
from torchloom.shard.regather import LIVE, GatherCall


def bind() -> None:
    """Register the bodies with the dispatcher; autograd sits above them."""
    between_ranks = (_gather, _reduce, _replicate, _sync, _gather_start, _reduce_start, _sync_start)
    for body in (*between_ranks, _offload, _reload, _offload_start, _reload_start):
        LIBRARY.impl(body.__name__[1:], body, "CompositeExplicitAutograd")
    LIBRARY.impl("free_", _free, "CompositeExplicitAutograd")
    LIBRARY.impl("broadcast_", _broadcast, "CompositeExplicitAutograd")
    LIBRARY.impl("wait_", _wait, "CompositeExplicitAutograd")
    LIBRARY.impl("resident", _resident, "CompositeExplicitAutograd")
    LIBRARY.impl("symmetric_start", _symmetric_start, "CompositeExplicitAutograd")
    LIBRARY.impl("symmetric_done_", _symmetric_done, "CompositeExplicitAutograd")


def _gather(
    shard: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    handle: str,
    param: str,
) -> Tensor:
    comm = lookup(handle)
    # Outside of woven graphs nobody has reloaded a shard that waits on the host.
    loaded = _reload(shard, shard.device) if is_on_host(shard) else shard
    fulls = comm.begin_gather([loaded], dtype, (param,))
    comm.wait(fulls)
    flat = fulls[0]
    # No view: of one that an operator with a derivative returns, autograd forbids writes in words of its own.
    weight = flat.new_empty(0)
    weight.set_(flat.untyped_storage(), int(flat.storage_offset()), tuple(shape))  # type: ignore[call-overload]
    LIVE.note(weight, GatherCall(shard, tuple(shape), dtype, wire_dtype, handle, param))
    return weight


def _reduce(
    grad: Tensor,
    shard_numel: int,
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    handle: str,
    param: str,
) -> Tensor:
    comm = lookup(handle)
    shards = comm.begin_reduce([grad], [shard_numel], dtype, wire_dtype, (param,))
    comm.wait(shards)
    return shards[0]


def _replicate(
    whole: Tensor, dtype: torch.dtype, wire_dtype: torch.dtype, handle: str, param: str
) -> Tensor:
    return whole.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _sync(
    grad: Tensor,
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    own_slice: bool,
    handle: str,
    param: str,
) -> Tensor:
    comm = lookup(handle)
    means = comm.begin_sync([grad], dtype, wire_dtype, (param,), own_slice=own_slice)
    comm.wait(means)
    return means[0]


def _gather_start(
    shards: Sequence[Tensor],
    params: Sequence[str],
    dtype: torch.dtype,
    world_size: int,
    handle: str,
) -> list[Tensor]:
    return lookup(handle).begin_gather(shards, dtype, params)


def _reduce_start(
    grads: Sequence[Tensor],
    params: Sequence[str],
    shard_numels: Sequence[int],
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    handle: str,
) -> list[Tensor]:
    return lookup(handle).begin_reduce(grads, shard_numels, dtype, wire_dtype, params)


def _sync_start(
    grads: Sequence[Tensor],
    params: Sequence[str],
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    own_slice: bool,
    handle: str,
) -> list[Tensor]:
    return lookup(handle).begin_sync(grads, dtype, wire_dtype, params, own_slice=own_slice)


def _wait(results: Sequence[Tensor], inputs: Sequence[Tensor], handle: str) -> None:
    if handle == HOST:
        _mover([*results, *inputs]).wait(results)
    else:
        lookup(handle).wait(results)


def _broadcast(whole: Tensor, source: int, handle: str, param: str) -> None:
    lookup(handle).broadcast_from(whole, source, param)


def _offload(x: Tensor, pin: bool = True) -> Tensor:
    mover = mover_of(x.device)
    hosts = mover.begin_offload([x], pin=pin)
    mover.wait(hosts)
    return hosts[0]


def _reload(host: Tensor, device: torch.device) -> Tensor:
    mover = mover_of(device)
    results = mover.begin_reload([host])
    mover.wait(results)
    return results[0]


def _offload_start(xs: Sequence[Tensor], pin: bool = True) -> list[Tensor]:
    return mover_of(xs[0].device).begin_offload(xs, pin=pin)


def _reload_start(hosts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return mover_of(device).begin_reload(hosts)


def _free(xs: Sequence[Tensor]) -> None:
    if keeps_graph():
        return  # somebody will run this backward pass again
    for x in xs:
        storage = x.untyped_storage()
        if storage.resizable():
            storage.resize_(0)


def _mover(tensors: Sequence[Tensor]) -> Mover:
    """Return the mover of the one device among both sides of a copy."""
    cpu = torch.device("cpu")
    return mover_of(next((t.device for t in tensors if t.device != cpu), cpu))


def _resident(
    shard: Tensor, dtype: torch.dtype, world_size: int, handle: str, param: str
) -> Tensor:
    return lookup(handle).residents.get(shard, dtype, param)


def _symmetric_start(
    shards: Sequence[Tensor],
    params: Sequence[int],
    dtype: torch.dtype,
    world_size: int,
    weights: str,
) -> list[Tensor]:
    return find_store(weights).begin(shards, params)


def _symmetric_done(wholes: Sequence[Tensor], weights: str) -> None:
    find_store(weights).done()
