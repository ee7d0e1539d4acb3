"""Operators that place communication in the forward and backward graphs.

    gather_start(shards)  -> flat full weights, not yet arrived
    reduce_start(grads)   -> flat shards of mean gradients, not yet arrived
    sync_start(grads)     -> whole mean gradients, not yet arrived
    wait_(results, inputs)   the results have arrived
    resident(shard)       -> the flat full weight that stays gathered between micro-steps
    symmetric_start(shards)  -> flat whole weights in memory that the ranks of one host share
    free_(xs)                the memory of xs is given back now
    offload_start(xs)        -> copies in host memory, not yet arrived
    reload_start(hosts)      -> copies on the device, not yet arrived

`wait_` is declared to write `results`: a compiler that respects mutation can then neither read a
result too early nor drop the wait. It takes the `inputs` of the start as well, so that their
memory stays untouched while it is on the wire. `params` are the names of the parameters: what ranks do
together is compared by them.

`offload` and `reload` are the traced forms of the last two. `wait_` with the handle `HOST` ends these: it takes what is
being copied as its inputs. A host copy has the shape, strides and dtype of its tensor, and the tensor comes back with them.
On a CPU the device is the CPU as well: both sides are then pools that are counted apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchloom.ops.library import define

gather_start = define(
    "gather_start(Tensor[] shards, str[] params, ScalarType dtype, int world_size, str handle) "
    "-> Tensor[]",
    lambda shards, params, dtype, world_size, handle: [
        s.new_empty((s.numel() * world_size,), dtype=dtype) for s in shards
    ],
)
"""Begin to all-gather flat shards; each result is flat with `world_size` times as many elements."""

reduce_start = define(
    "reduce_start(Tensor[] grads, str[] params, int[] shard_numels, ScalarType dtype, "
    "ScalarType wire_dtype, str handle) -> Tensor[]",
    lambda grads, params, shard_numels, dtype, wire_dtype, handle: [
        g.new_empty((n,), dtype=dtype) for g, n in zip(grads, shard_numels, strict=True)
    ],
)
"""Begin to average full gradients, keeping this rank's flat shard of each."""

sync_start = define(
    "sync_start(Tensor[] grads, str[] params, ScalarType dtype, ScalarType wire_dtype, "
    "bool own_slice, str handle) -> Tensor[]",
    lambda grads, params, dtype, wire_dtype, own_slice, handle: [
        torch.empty_like(g, dtype=dtype, memory_format=torch.contiguous_format) for g in grads
    ],
)
"""Begin to average whole gradients over the ranks."""

wait_ = define("wait_(Tensor(a!)[] results, Tensor[] inputs, str handle) -> ()")
"""Block until the results of a start have arrived; `inputs` may be freed afterwards."""

broadcast_ = define("broadcast_(Tensor(a!) whole, int source, str handle, str param) -> ()")
"""Replace a whole weight by that of one rank, on all ranks."""

resident = define(
    "resident(Tensor(a) shard, ScalarType dtype, int world_size, str handle, str param) "
    "-> Tensor(a)",
    lambda shard, dtype, world_size, handle, param: shard.new_empty(
        (shard.numel() * world_size,), dtype=dtype
    ),
)
"""Return a full flat weight that outlives the graph; it is gathered when the shard has changed.

Declared as a view of `shard`: the memory belongs to neither graph nor compiler, which must not use
it again for another value, and may not write to it."""

free_ = define("free_(Tensor(a!)[] xs) -> ()")
"""Give the memory of tensors back, although somebody else may still name them; nobody may read them again."""

symmetric_start = define(
    "symmetric_start(Tensor(a)[] shards, int[] params, ScalarType dtype, int world_size, "
    "str weights) -> Tensor(a)[]",
    lambda shards, params, dtype, world_size, weights: [
        s.new_empty((s.numel() * world_size,), dtype=dtype) for s in shards
    ],
)
"""Make this rank's shards ready for the others, and return flat views of the whole weights: nothing is copied.

`params` are the parameters' places in the shared weights called `weights`. The schema says that the results alias
the shards, so that no compiler takes their memory for another value."""

symmetric_done_ = define("symmetric_done_(Tensor(a!)[] wholes, str weights) -> ()")
"""Block until all ranks have read the weights that one `symmetric_start` returned.

Between `wait_` and this no rank writes; outside of the two anyone may."""


HOST = "host"
"""The handle under which `wait_` finds a copy; no communicator has this name."""


_CPU = torch.device("cpu")


def _on(x: Tensor, device: torch.device) -> Tensor:
    """Return what a copy of `x` on `device` looks like: dense strides stay, others are packed."""
    return torch.empty_like(x, device=device, memory_format=torch.preserve_format)


offload = define("offload(Tensor x, bool pin=True) -> Tensor", lambda x, pin=True: _on(x, _CPU))
"""Copy a tensor into host memory; `pin` asks for page-locked memory where a device needs it."""

reload = define("reload(Tensor host, Device device) -> Tensor", _on)
"""Copy a tensor of host memory to the device."""

offload_start = define(
    "offload_start(Tensor[] xs, bool pin=True) -> Tensor[]",
    lambda xs, pin=True: [_on(x, _CPU) for x in xs],
)
"""Begin to copy tensors into host memory."""

reload_start = define(
    "reload_start(Tensor[] hosts, Device device) -> Tensor[]",
    lambda hosts, device: [_on(host, device) for host in hosts],
)
"""Begin to copy tensors of host memory to the device."""
