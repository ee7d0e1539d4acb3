"""Binds the operators of `torchloom.ops` to communicators and movers.

Traced operators run when a graph is not woven: eager code, graph breaks, a backend without passes.
They communicate at once, one parameter at a time: correct, slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.autograd import keeps_graph
from torchloom._torch.untraced import never_compile
from torchloom.ops.library import LIBRARY
from torchloom.ops.replays import never
from torchloom.runtime.base import wait_for_results
from torchloom.runtime.communicator import Communicator
from torchloom.runtime.communicators import lookup
from torchloom.runtime.host import loaded, mover_of
from torchloom.runtime.weights import find_store
from torchloom.shard.regather import LIVE, GatherCall


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
    flat = _waited(comm, comm.begin_gather([loaded(shard)], dtype, (param,)))
    # No view: of one that an operator with a derivative returns, autograd forbids writes in words of its own.
    weight = flat.new_empty(0)
    weight.set_(flat.untyped_storage(), int(flat.storage_offset()), tuple(shape))  # type: ignore[call-overload]
    LIVE.note(weight, GatherCall(shard, tuple(shape), dtype, wire_dtype, handle, param))
    return weight


def _waited(comm: Communicator, results: list[Tensor]) -> Tensor:
    comm.wait(results)
    return results[0]


def _offload(x: Tensor, pin: bool = True) -> Tensor:
    mover = mover_of(x.device)
    hosts = mover.begin_offload([x], pin=pin)
    mover.wait(hosts)
    return hosts[0]


def _free(xs: Sequence[Tensor]) -> None:
    never("it frees saved values itself (compile.free_activation)")
    if keeps_graph():
        return  # somebody will run this backward pass again
    for x in xs:
        storage = x.untyped_storage()
        if storage.resizable():
            storage.resize_(0)


def _reduce(
    grad: Tensor,
    shard_numel: int,
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    handle: str,
    param: str,
) -> Tensor:
    comm = lookup(handle)
    return _waited(comm, comm.begin_reduce([grad], [shard_numel], dtype, wire_dtype, (param,)))


def _sync(
    grad: Tensor,
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    own_slice: bool,
    handle: str,
    param: str,
) -> Tensor:
    comm = lookup(handle)
    return _waited(comm, comm.begin_sync([grad], dtype, wire_dtype, (param,), own_slice=own_slice))


BODIES: dict[str, Callable[..., Any]] = {
    "gather": _gather,
    "reduce": _reduce,
    "replicate": lambda whole, dtype, wire_dtype, handle, param: whole.to(
        dtype, copy=True, memory_format=torch.contiguous_format
    ),
    "sync": _sync,
    "gather_start": lambda shards, params, dtype, world_size, handle: lookup(handle).begin_gather(
        shards, dtype, params
    ),
    "reduce_start": lambda grads, params, numels, dtype, wire_dtype, handle: lookup(
        handle
    ).begin_reduce(grads, numels, dtype, wire_dtype, params),
    "sync_start": lambda grads, params, dtype, wire_dtype, own_slice, handle: lookup(
        handle
    ).begin_sync(grads, dtype, wire_dtype, params, own_slice=own_slice),
    "wait_": lambda results, inputs, handle: wait_for_results(results),
    "broadcast_": lambda whole, source, handle, param: lookup(handle).broadcast_from(
        whole, source, param
    ),
    "resident": lambda shard, dtype, world_size, handle, param: lookup(handle).residents.get(
        shard, dtype, param
    ),
    "symmetric_start": lambda shards, params, dtype, world_size, weights: find_store(weights).begin(
        shards, params
    ),
    "symmetric_done_": lambda wholes, weights: find_store(weights).done(),
    "offload": _offload,
    "reload": lambda host, device: mover_of(device).fetch(host),
    "offload_start": lambda xs, pin=True: mover_of(xs[0].device).begin_offload(xs, pin=pin),
    "reload_start": lambda hosts, device: mover_of(device).begin_reload(hosts),
    "free_": _free,
}
"""What each operator does when it runs, by its name."""


def bind() -> None:
    """Register the bodies with the dispatcher; autograd sits above them."""
    for name, body in BODIES.items():
        never_compile(body.__code__, with_called=True)
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
