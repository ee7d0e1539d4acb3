"""Operators that call a body that stands for several equal parts of a graph.

    region           operands -> results of the body, and what its backward needs of its values
    region_backward  what was kept, gradients of results -> gradients of operands

A graph that Dynamo captured calls `region` once for each of the equal parts. AOTAutograd sees an operator
with a derivative, so tracing a call costs the same whatever the body holds. `torchloom.regions` finds the
parts and traces each body once; `torchloom.capture.calls` puts compiled code in the place of calls.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from torchloom._torch.autograd import below_autograd
from torchloom._torch.tensors import layout_hint, size_hint
from torchloom.errors import RegionError
from torchloom.graph.nodes import args_of
from torchloom.ops.library import LIBRARY, define

BodyHalf = Literal["forward", "backward", "inference"]
"""What a call runs of a body."""


Body = Any
"""A `torchloom.regions.body.RegionBody`, whose room lies above this one: bodies are made of graphs that have operators."""


def body_of(name: str) -> Body:
    """Return the body that calls name; behind its name they may carry a hash of its graphs."""
    return _BODIES[name.partition("-")[0]]


_BODIES: ChainMap[str, Body] = ChainMap()
"""Bodies that calls of the graph that is being compiled name."""


@contextmanager
def known_bodies(bodies: dict[str, Body]) -> Iterator[None]:
    """Let calls name these bodies in the block: while their graph is traced, or a half of it compiled.

    Torch compiles under a lock. Two engines may have bodies of one name, with other options of the compiler.

    Args:
        bodies: by name; what is added to them in the block is known as well.
    """
    _BODIES.maps.insert(0, bodies)
    try:
        yield
    finally:
        _BODIES.maps.pop(0)


def _like(value: Tensor) -> Tensor:
    """Return a fake tensor that holds as much memory as a result of a body, which may show a part of a larger value."""
    options: Any = {"dtype": value.dtype, "device": value.device}
    held_bytes = value.untyped_storage().nbytes()
    if size_hint(held_bytes) > layout_hint(value)[2] * value.itemsize:
        whole = torch.empty(held_bytes // value.itemsize, **options)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())
    return torch.empty_strided(value.shape, value.stride(), **options)


def _fake_region(
    body: str, call: int, operands: Sequence[Tensor], sizes: Sequence[int], trains: bool
) -> list[Tensor]:
    return [_like(value) for value in body_of(body).forward_values(trains=trains)]


def _fake_region_backward(
    body: str, call: int, kept: Sequence[Tensor], sizes: Sequence[int]
) -> list[Tensor]:
    return [_like(value) for value in body_of(body).backward_values()]


region = define(
    "region(str body, int call, Tensor[] operands, SymInt[] sizes, bool trains) -> Tensor[]",
    _fake_region,
)
"""Call a body by name; `call` numbers the calls of a graph, as equal ones may draw other random numbers.

With `trains` the results are followed by the values that `region_backward` reads."""

region_backward = define(
    "region_backward(str body, int call, Tensor[] kept, SymInt[] sizes) -> Tensor[]",
    _fake_region_backward,
)
"""Return the gradients of a call: `kept` holds operands and values that forward kept, then the gradients of results."""


class _Region(torch.autograd.Function):
    """One call and its derivative."""

    @staticmethod
    def forward(ctx: Any, name: str, call: int, sizes: Sequence[int], *operands: Tensor) -> Any:
        body = body_of(name)
        with below_autograd():
            given = _cast(operands, body.lower_operands(trains=True))
            values = region(name, call, given, list(sizes), True)
        results = values[: body.num_results]
        ctx.save_for_backward(
            *(given[i] for i in body.kept_operands),
            *(results[i] for i in body.kept_results),
            *values[len(results) :],
        )
        ctx.name, ctx.call, ctx.sizes, ctx.num_operands = name, call, sizes, len(operands)
        ctx.set_materialize_grads(False)
        without = [r for r, t in zip(results, body.tangents, strict=True) if t is None]
        ctx.mark_non_differentiable(*without)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        body = body_of(ctx.name)
        tangents = [
            _laid_out(grad, like, copies=body.copies_gradients)
            for grad, like in zip(grads, body.tangents, strict=True)
            if like is not None
        ]
        found = region_backward(ctx.name, ctx.call, [*ctx.saved_tensors, *tangents], ctx.sizes)
        by_operand: list[Tensor | None] = [None] * ctx.num_operands
        for index, grad in zip(body.differentiated, found, strict=True):
            by_operand[index] = grad
        return None, None, None, *by_operand


def _laid_out(grad: Tensor | None, like: Tensor, *, copies: bool) -> Tensor:
    """Return a gradient as backward takes it."""
    if grad is None:
        # Zeros would be other gradients: those that are None stay None, and 0 / 0 is no number.
        raise RegionError("a result of it has no gradient in one of its calls")
    pairs = zip(grad.shape, grad.stride(), like.stride(), strict=True)
    if all(given == own or (isinstance(size, int) and size == 1) for size, given, own in pairs):
        return grad
    if not copies:  # operators would add numbers up in another order
        raise RegionError("the gradient of a result lies in memory otherwise than the result")
    return grad.new_empty_strided(like.shape, like.stride()).copy_(grad)


def _cast(operands: Sequence[Tensor], dtypes: Mapping[int, torch.dtype]) -> list[Tensor]:
    return [
        each.to(dtypes[index]) if index in dtypes else each for index, each in enumerate(operands)
    ]


def _region(
    body: str, call: int, operands: Sequence[Tensor], sizes: Sequence[int], trains: bool
) -> list[Tensor]:
    records = torch.is_grad_enabled() and any(each.requires_grad for each in operands)
    # A body is traced when this is asked first, which has to be in front of autograd.
    body_of(body).forward_values(trains=records or trains)
    if records:
        return list(_Region.apply(body, call, sizes, *operands))
    with below_autograd():
        if not trains:
            operands = _cast(operands, body_of(body).lower_operands(trains=False))
        return region(body, call, operands, sizes, trains)


LIBRARY.impl("region", _region, "Autograd")


class CalledHalf(NamedTuple):
    """What a call runs."""

    name: str
    """Of the code: that of the body, hashes of what was made of it, and which half it is."""
    kind: BodyHalf
    graph_module: fx.GraphModule


def half_of_call(op: Any, name: str, trains: bool = False) -> CalledHalf:
    """Return what a call runs.

    Args:
        op: `region` or `region_backward`.
        name: the first argument of the call.
        trains: its last argument, where it is a call of `region`.
    """
    kind: BodyHalf = "backward" if op is region_backward else "forward" if trains else "inference"
    body = body_of(name)
    found = body.variants.get(f"{name} {kind}") or body.half(kind)
    return CalledHalf(f"body_{name.replace('-', '_')}_{kind}", kind, found)


def half_of_node(call: fx.Node) -> CalledHalf:
    """Return what a node that calls a body runs."""
    name, _, _, _, *trains = args_of(call)
    return half_of_call(call.target, name, *trains)


def halves_called(graphs: Iterable[fx.Graph]) -> list[fx.Graph]:
    """Return what calls in graphs run, each half once."""
    calls = (node for graph in graphs for node in graph.nodes if is_call_of_body(node))
    halves = {half.name: half.graph_module.graph for half in map(half_of_node, calls)}
    return list(halves.values())


def inputs_of(call: fx.Node) -> tuple[fx.Node, ...]:
    """Return what a call's half takes: tensors, then sizes."""
    return (*args_of(call)[2], *args_of(call)[3])


def is_call_of_body(node: fx.Node) -> bool:
    """Say whether a node calls a body."""
    return node.op == "call_function" and node.target in (region, region_backward)
