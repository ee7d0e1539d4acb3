"""Uses of `model.parameters()` outside their module, where this rank sees only its shard.

    loss = model(x) + 0.1 * sum(p.norm() for p in model.parameters())

A module hands out the whole weight, whose gradient is averaged over ranks. `model.parameters()` yields what this
rank keeps, so there

    a shard      is one part of a flat weight. What works on each element can be summed, and added to a loss; anything
                 else (a norm, a mean, a maximum) sees one part, and is refused
    a whole one  gets a gradient of this rank alone, which is averaged here as those of its other uses are

Both are found in the autograd graph of a loss, before backward; shards in a captured graph, before it is compiled.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchloom import ops
from torchloom._torch.autograd import RunBackward, replace_backward
from torchloom._torch.modes import is_traced
from torchloom._torch.untraced import leave_alone
from torchloom.errors import CompileError, ShardError
from torchloom.shard.layout import Layout, ParamSpec
from torchloom.shard.leaf_modules import let_go_of_weights
from torchloom.shard.parameter import is_shard
from torchloom.shard.roots import known_params, living_layouts

# fmt: off
_ELEMENTWISE = frozenset([
    "abs", "add", "alias", "cat", "clamp", "clampmax", "clampmin", "clone", "copy", "detach", "div", "double", "exp",
    "fill", "float", "lerp", "log", "log1p", "mul", "neg", "pow", "relu", "reshape", "rsub", "sigmoid", "sign", "softplus",
    "sqrt", "square", "sub", "tanh", "to", "tocopy", "truediv", "view",
    "getdataattr", "lowerversioncountby1", "set",  # reads and assignments of `.data`
])
"""Operators that do the same to each element, by `_base_of` their names."""
_LINEAR = frozenset([
    "add", "alias", "cat", "clone", "div", "double", "expand", "float", "mean", "mul", "neg", "radd", "reshape", "rmul", "rsub",
    "squeeze", "stack", "sub", "sum", "to", "tocopy", "truediv", "unsqueeze", "view",
])
"""Operators through which a sum over ranks may be taken before or after."""
# fmt: on
_FACTORS = frozenset(["mul", "rmul", "div", "truediv"])
_OWN = ("GeneratedBackwardFor_torchloom_", "CompiledFunctionBackward")
"""What hands out weights, and graphs that were looked at when they were captured."""
_LEAF = "torch::autograd::AccumulateGrad"


class _Partial(NamedTuple):
    """A value that depends on one rank's shard."""

    kind: Literal["elements", "sum"]
    param: str


class _Edge(NamedTuple):
    """A gradient that ranks have to average: of a whole parameter, or of the sum over a shard's elements."""

    node: Node
    index: int | None
    """Which of the function's results it is; None: it is what the function is given."""
    layout: Layout
    spec: ParamSpec


@functools.cache
def look_at_backward() -> None:
    """Let torch's `backward` and `grad` average and refuse what this module is about."""
    replace_backward(_looking)


def _looking(run_backward: RunBackward) -> RunBackward:
    def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        handles = [] if is_traced(outputs) else _averaged(outputs)
        try:
            return run_backward(outputs, *args, **kwargs)
        except BaseException as error:
            let_go_of_weights()
            if "does not currently support double backward" in str(error) and living_layouts():
                raise _double() from None
            raise
        finally:
            for each in handles:
                each.remove()

    leave_alone(run, "it communicates")
    return run


def _double() -> CompileError:
    return CompileError(
        "this backward pass differentiates the gradient of a compiled graph (create_graph=True, e.g. for forces or a "
        "gradient penalty), which torch's AOTAutograd cannot: leave that model uncompiled, or compile it with "
        'backend="eager"'
    )


def _averaged(outputs: Sequence[Any]) -> list[RemovableHandle]:
    """Average what a backward pass adds to whole parameters beside their modules.

    Args:
        outputs: where it begins, tensors or edges of the graph.

    Returns:
        Handles of the hooks that do it, for removal.

    Raises:
        ShardError: they depend on one rank's part of a sharded parameter.
    """
    if not any(layout.is_divided for layout in living_layouts()):
        return []
    roots = [each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs]
    results: dict[Node, list[_Edge]] = {}
    handles = []
    # All of them first: where one is refused, no hook stays behind.
    for edge in list(_local_gradients([each for each in roots if each is not None])):
        if edge.index is None:
            handles.append(edge.node.register_prehook(_averaging_given(edge)))
        else:
            results.setdefault(edge.node, []).append(edge)
    return handles + [node.register_hook(_averaging(edges)) for node, edges in results.items()]


def check_captured(gm: fx.GraphModule, world_size: int) -> None:
    """Refuse a captured graph that computes with one rank's part of a parameter.

    Args:
        gm: what Dynamo captured.
        world_size: ranks that share one copy of the weights.

    Raises:
        ShardError: it does.
    """
    if world_size == 1:
        return
    shards = {
        node: _Partial("elements", name)
        for node in gm.graph.find_nodes(op="placeholder")
        if (name := _shard_of(node)) is not None and any(map(_is_computed, node.users))
    }
    if shards:
        _check_part(gm, shards)


def _check_part(gm: fx.GraphModule, states: dict[fx.Node, _Partial]) -> _Partial | None:
    """Go through a graph, or a part of one; return what its results depend on.

    Args:
        gm: the graph.
        states: of its inputs; the other nodes are added.

    Raises:
        ShardError: it computes with one rank's part of a parameter.
    """
    for node in gm.graph.nodes:
        given = [states.get(each) for each in _nodes_of(node)]
        if node.op == "output":
            return next((each for each in given if each is not None), None)
        if not any(given) or node.target is ops.gather:
            continue
        modules = dict(gm.named_children())
        bodies = [modules.get(str(e.target)) for e in node.all_input_nodes if e.op == "get_attr"]
        parts = [each for each in bodies if isinstance(each, fx.GraphModule)]
        if parts:  # checkpointing and the like call parts of the graph, with their last arguments
            found = [_check_part(each, _inputs_of(each, node, states)) for each in parts]
            state = next((each for each in found if each is not None), None)
        elif node.target is operator.getitem:
            state = given[0]
        else:
            name = getattr(node.target, "__name__", str(node.target))
            base = _base_of(name)
            has_others = None in given or (
                base in ("div", "truediv") and node.args[0] not in states
            )
            state = _through(name, given, has_others=has_others, is_whole_sum=_sums_all(node))
        if state is not None:
            states[node] = state
    return None


def _inputs_of(
    part: fx.GraphModule, call: fx.Node, states: Mapping[fx.Node, _Partial]
) -> dict[fx.Node, _Partial]:
    """Return what the inputs of a part depend on, as a node calls it."""
    args = [each for each in _nodes_of(call) if each.op != "get_attr"]
    inputs = part.graph.find_nodes(op="placeholder")
    pairs = zip(reversed(inputs), reversed(args), strict=False)
    return {each: states[arg] for each, arg in pairs if arg in states}


def _nodes_of(call: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments of a call, in their order, each as often as it stands there."""
    found: list[fx.Node] = []
    fx.map_arg((call.args, call.kwargs), found.append)
    return found


def _is_computed(user: fx.Node) -> bool:
    return user.op in ("call_function", "call_method") and user.target is not ops.gather


def _shard_of(node: fx.Node) -> str | None:
    """Return what a placeholder is called, if a shard is given for it."""
    arg = node.meta.get("grapharg")
    example = getattr(arg, "example", None)
    return node.name if is_shard(example) and isinstance(example, nn.Parameter) else None


def _local_gradients(roots: Sequence[Node]) -> Iterator[_Edge]:
    """Go through an autograd graph; yield gradients that nobody averages.

    Raises:
        ShardError: a value depends on one rank's part of a sharded parameter.
    """
    states: dict[Node, _Partial | None] = {}
    shards: dict[str, tuple[Layout, ParamSpec]] = {}
    known = functools.cache(_params_of_divided_models)  # few passes come to ask
    for node in _from_the_leaves(roots):
        name = node.name()
        states[node] = None
        if name.startswith(_OWN):
            continue
        base = _base_of(name)
        given: list[_Partial | None] = []
        for index, (each, _) in enumerate(node.next_functions):
            if each is None:
                continue
            state = states.get(each)
            if each.name() == _LEAF and (found := known().get(id(each.variable))):  # type: ignore[attr-defined]
                layout, spec = found
                if spec.mode == "synced":
                    yield _Edge(node, index, layout, spec)
                elif spec.mode == "sharded" and layout.world_size > 1:
                    state = _Partial("elements", spec.name)
                    shards[spec.name] = found
            given.append(state)
        kinds = {each.kind for each in given if each is not None}
        if not kinds:
            continue
        has_others = None in given or (
            base == "div" and (node.next_functions[0][0] is None or given[0] is None)
        )
        if kinds == {"elements"}:
            has_others |= _has_factor(node)
        state = states[node] = _through(
            name, given, has_others=has_others, is_whole_sum=name == "SumBackward0"
        )
        if state.kind == "sum" and kinds == {"elements"}:
            yield _Edge(node, None, *shards[state.param])  # a factor may be of this rank's data


def _params_of_divided_models() -> dict[int, tuple[Layout, ParamSpec]]:
    """Return layout and facts of the parameters whose uses matter, by id."""
    return {id(param): (layout, s) for param, layout, s in known_params() if layout.is_divided}


def _has_factor(node: Node) -> bool:
    """Return whether one number that a tensor holds, such as of this rank's data, is a factor; literals are doubles."""
    inputs = [each for each, _ in node.next_functions]
    sides = zip(("_saved_self", "_saved_other"), inputs, strict=False)
    saved = [getattr(node, name, None) for name, each in sides if each is None]
    return any(
        isinstance(each, Tensor) and each.numel() == 1 and each.dtype.itemsize < 8 for each in saved
    )


def _from_the_leaves(roots: Sequence[Node]) -> Iterator[Node]:
    """Yield the functions of an autograd graph, each after those that it depends on; none for leaves."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            behind = (each for each, _ in node.next_functions if each is not None)
            stack.extend((each, False) for each in behind if each.name() != _LEAF)


def _through(
    name: str, given: Sequence[_Partial | None], *, has_others: bool, is_whole_sum: bool
) -> _Partial:
    """Return what an operator makes of values, some of which depend on one rank's shard.

    Args:
        name: of the operator.
        given: its inputs; None depends on no shard.
        has_others: whether it takes values, too, that may depend on this rank's data.
        is_whole_sum: whether it sums all elements.

    Raises:
        ShardError: the result, or a gradient, would differ from that of the whole weight.
    """
    partial = [each for each in given if each is not None]
    kinds = {each.kind for each in partial}
    first, base = partial[0], _base_of(name)
    if kinds == {"elements"} and not has_others:
        if base == "sum" and is_whole_sum:
            return first._replace(kind="sum")
        if base in _ELEMENTWISE:
            return first
    is_product = base in _FACTORS and (len(partial) > 1 or has_others)
    if kinds == {"sum"} and base in _LINEAR and not is_product:
        return first
    raise ShardError(
        f"{_without_backward(name)} is computed from the parameter {first.param!r} itself, of which this rank "
        "holds one part, so ranks would get different values and wrong gradients: read the weight from its module inside of forward, such as "
        "self.linear.weight, which is whole there, or use stage 1. Sums of what is done to each element, such as "
        "p.square().sum(), may be added to the loss"
    )


def shard_behind(tensor: Tensor) -> Tensor | None:
    """Return the shard of which a tensor was made element by element, with gradients; or None.

    Args:
        tensor: of any kind, such as `param.clone()`.
    """
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if node.name() == _LEAF and is_shard(node.variable):  # type: ignore[attr-defined]
            return node.variable  # type: ignore[attr-defined]
        if _base_of(node.name()) in _ELEMENTWISE:
            stack.extend(each for each, _ in node.next_functions)
    return None


def _sums_all(node: fx.Node) -> bool:
    options = {**node.kwargs, **dict(enumerate(node.args[1:]))}
    return all(isinstance(each, torch.dtype) for each in options.values() if each is not None)


@functools.cache
def _base_of(name: str) -> str:
    """Return the same for each spelling of an operator: `pow`, `__pow__`, `pow_`, `PowBackward1`."""
    return _without_backward(name).lower().replace("_", "")


def _without_backward(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


def _averaging(edges: list[_Edge]) -> Callable[..., Any]:
    """Return a hook that averages some of a function's results in backward."""

    def average(given: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        grads = list(given)
        for edge in edges:
            assert edge.index is not None
            grads[edge.index] = _mean(grads[edge.index], edge)
        return tuple(grads)

    return average


def _averaging_given(edge: _Edge) -> Callable[..., Any]:
    """Return a hook that averages what a function is given in backward, one number."""

    def average(given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(_mean(each, edge) for each in given)

    return average


def _mean(grad: Tensor | None, edge: _Edge) -> Tensor | None:
    if grad is None:
        return None
    spec, handle = edge.spec, edge.layout.handle
    return ops.sync(grad, grad.dtype, spec.wire_dtype, False, handle, spec.name)
