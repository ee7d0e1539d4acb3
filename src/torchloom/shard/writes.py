"""Writes of a forward pass into gathered weights, which would be lost: found, and refused.

A gathered weight is a copy for one use, as is one that is cast, or whose gradient is averaged in backward. Three ways lead to a write into it, and each is looked at where it
can be seen:

    weight.clamp_(),           eager: the copy's version counter, when the forward pass ends
    F.embedding(..., max_norm) compiled: the captured graph and the counters of its fake tensors, before
                               it is compiled
    weight.data.clamp_(),      they leave no trace in a counter, so the code of `forward` is read when the
    weight.data = ...          model is sharded
"""

from __future__ import annotations

import dis
from collections.abc import Collection
from typing import Any

from torch import Tensor, fx, nn

from torchloom import ops
from torchloom._torch import modes
from torchloom.errors import ShardError
from torchloom.graph import args_of, find, is_in_place_name, written
from torchloom.shard.layout import Layout


def lost(names: Collection[str]) -> ShardError:
    """Return the error for writes into these parameters."""
    first = min(names)
    more = f" (and into {len(names) - 1} more)" if len(names) > 1 else ""
    return ShardError(
        f"forward writes into the weight {first!r}{more}, which is sharded, cast or averaged in backward: what "
        "it sees is a copy for one use, so the write would be lost. Compute the weight as a value "
        "(torch.renorm(self.weight, ...) passed to the operator), write it after the step inside "
        "torchloom.shard.gathered(..., modifier_rank=0), or use ZeRO stage 0 or 1 in fp32 and without "
        "engine.compile()"
    )


class Writes:
    """Version counters of the weights that were gathered in the running eager forward passes."""

    def __init__(self) -> None:
        self._depth = 0
        self._seen: list[tuple[str, int, Tensor]] = []

    @property
    def is_open(self) -> bool:
        """Whether an eager forward pass of a sharded model runs."""
        return self._depth > 0

    def open(self) -> int:
        """Enter a forward pass; returns what to hand to `close`."""
        self._depth += 1
        return len(self._seen)

    def note(self, weight: Tensor, param: str) -> Tensor:
        """Remember a weight by its counter, without its memory; return the weight."""
        if self._depth and not weight.is_inference():  # those count no writes
            counter = weight
            if modes.transform_level() is None:  # torch.func lets nobody assign `.data`
                counter = weight.detach()  # shares the counter
                counter.data = weight.new_empty(0)  # and lets go of the memory
            self._seen.append((param, weight._version, counter))
        return weight

    def close(self, start: int) -> None:
        """Leave a forward pass.

        Raises:
            ShardError: a weight was written in it.
        """
        self._depth -= 1
        seen, self._seen[start:] = self._seen[start:], []
        if written := {param for param, version, counter in seen if counter._version != version}:
            raise lost(written)


WRITES = Writes()
"""Of this process; empty outside of eager forward passes of sharded models."""


def check_graph(gm: fx.GraphModule) -> None:
    """Refuse a captured graph that writes into a weight that is a copy.

    Raises:
        ShardError: it does.
    """
    parts = [each for each in gm.modules() if isinstance(each, fx.GraphModule)]
    copies = [
        (node, args_of(node)[-1])
        for part in parts
        for op in (ops.gather, ops.replicate, ops.cast)
        for node in find(part.graph, op)
    ]
    # Operators write in more ways than their names and schemas tell; fakes count writes as tensors do.
    params = {param for node, param in copies if modes.num_writes(_fake(node))}
    weights = {modes.storage_id(_fake(node)): param for node, param in copies}
    weights.pop(None, None)
    if weights:
        params |= {
            weights[storage]
            for part in parts
            for node in part.graph.nodes
            for target in written(node)
            if (storage := modes.storage_id(_fake(target))) in weights
        }
    if params:
        raise lost(params)


def _fake(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def check_code(model: nn.Module, layout: Layout) -> None:
    """Refuse a model whose `forward` assigns the `.data` of a parameter of which it sees a copy, or writes in it.

    Args:
        model: whose code is read.
        layout: of its parameters.

    Raises:
        ShardError: it does.
    """
    modules = dict(model.named_modules())
    copied = {
        (owner.module, owner.attr): spec.name
        for spec in layout
        if spec.mode != "whole" or spec.compute_dtype != spec.dtype
        for owner in spec.owners
    }
    by_module: dict[str, set[str]] = {}
    for path, attr in copied:
        by_module.setdefault(path, set()).add(attr)
    written = {
        copied[path, attr]
        for path, attrs in by_module.items()
        for attr in _written_through_data(type(modules[path]), attrs)
    }
    if written:
        raise lost(written)


def _written_through_data(kind: type[nn.Module], attrs: Collection[str]) -> list[str]:
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    if code is None:
        return []
    found: list[str] = []
    steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    for one, two, three in zip(steps, steps[1:], [*steps[2:], None], strict=False):
        if not one.opname.startswith("LOAD_ATTR") or one.argval not in attrs:
            continue
        assigns = two.opname == "STORE_ATTR" and two.argval == "data"
        reads = two.opname.startswith("LOAD_ATTR") and two.argval == "data"
        method = str(three.argval) if three is not None and reads else ""
        if assigns or is_in_place_name(method):
            found.append(one.argval)
    return found
