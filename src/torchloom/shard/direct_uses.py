"""Uses of `model.parameters()` outside their module, where this rank sees only its shard.

    loss = model(x) + 0.1 * sum(p.norm() for p in model.parameters())

A module hands out the whole weight, whose gradient is averaged over ranks. `model.parameters()` yields what this
rank keeps, so there

    a shard      is one part of a flat weight. What works on each element can be summed, and added to a loss; anything
                 else (a norm, a mean, a maximum) sees one part, and is refused
    a whole one  gets a gradient of this rank alone, which is averaged here as those of its other uses are

Both are found in the autograd graph of a loss, before backward. In a captured graph, before it is compiled, shards are
found that something else is done to than the same to each element.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, fx, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchloom import ops
from torchloom._torch.autograd import RunBackward, replace_backward
from torchloom._torch.modes import is_traced
from torchloom._torch.untraced import leave_alone
from torchloom.errors import CompileError, ShardError
from torchloom.shard.layout import Layout, ParamSpec
from torchloom.shard.parameter import is_shard
from torchloom.shard.roots import divided_models, living_layouts

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
    """Patch torch's `backward` and `grad` to average or refuse such gradients."""
    replace_backward(_averaging_backward)


def _averaging_backward(run_backward: RunBackward) -> RunBackward:
    def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        handles = [] if is_traced(outputs) else _averaged(outputs)
        try:
            return run_backward(outputs, *args, **kwargs)
        except RuntimeError as error:
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
    known = _Known()
    if not known.is_any:
        return []
    roots = [each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs]
    results: dict[Node, list[_Edge]] = {}
    handles = []
    # All of them first: where one is refused, no hook stays behind.
    for edge in list(_local_gradients([each for each in roots if each is not None], known)):
        if edge.index is None:
            handles.append(
                edge.node.register_prehook(
                    lambda given, edge=edge: tuple(_mean(each, edge) for each in given)
                )
            )
        else:
            results.setdefault(edge.node, []).append(edge)
    return handles + [node.register_hook(_averaging(edges)) for node, edges in results.items()]


class _Known:
    """Parameters of the sharded models of this process whose uses matter."""

    def __init__(self) -> None:
        self._models = divided_models()
        self.is_any = bool(self._models)
        self._by_id: dict[int, tuple[Layout, ParamSpec]] | None = None

    def of(self, leaf: Node) -> tuple[Layout, ParamSpec] | None:
        """Return layout and facts of the parameter that gets a gradient."""
        if self._by_id is None:  # few passes come here
            self._by_id = {}
            for model, layout in self._models:
                params = dict(model.named_parameters())
                self._by_id |= {id(params[s.name]): (layout, s) for s in layout if s.name in params}
        return self._by_id.get(id(leaf.variable))  # type: ignore[attr-defined]


def check_captured(gm: fx.GraphModule, world_size: int) -> None:
    """Refuse a captured graph that computes with one rank's part of a parameter, other than element by element.

    Args:
        gm: what Dynamo captured.
        world_size: ranks that share one copy of the weights.

    Raises:
        ShardError: it does.
    """
    if world_size > 1:
        inputs = gm.graph.find_nodes(op="placeholder")
        _check_part(gm, {node: node.name for node in inputs if _takes_shard(node)})


def _takes_shard(node: fx.Node) -> bool:
    example = getattr(node.meta.get("grapharg"), "example", None)
    return is_shard(example) and isinstance(example, nn.Parameter)


def _check_part(gm: fx.GraphModule, shards: dict[fx.Node, str]) -> None:
    """Go through a graph, or a part of one, whose inputs hold shards of the parameters named."""
    parts = {k: each for k, each in gm.named_children() if isinstance(each, fx.GraphModule)}
    for node in gm.graph.nodes:
        args: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), args.append)
        names = [shards[each] for each in args if each in shards]
        if not names or node.op == "output" or node.target is ops.gather:
            continue
        bodies = [parts[e.target] for e in args if e.op == "get_attr" and e.target in parts]
        for body in bodies:  # checkpointing and the like call them with their last arguments
            inputs = zip(
                reversed(body.graph.find_nodes(op="placeholder")), reversed(args), strict=False
            )
            _check_part(body, {each: shards[arg] for each, arg in inputs if arg in shards})
        name = getattr(node.target, "__name__", str(node.target))
        if not bodies:
            if _base_of(name) not in _ELEMENTWISE or len(names) < len(args):
                raise _sees_a_part(name, names[0])
            shards[node] = names[0]


def _local_gradients(roots: Sequence[Node], known: _Known) -> Iterator[_Edge]:
    """Go through an autograd graph; yield gradients that nobody averages.

    Raises:
        ShardError: a value depends on one rank's part of a sharded parameter.
    """
    states: dict[Node, _Partial | None] = {}
    shards: dict[str, tuple[Layout, ParamSpec]] = {}
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
            if each.name() == _LEAF and (found := known.of(each)) is not None:
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
    raise _sees_a_part(name, first.param)


def _sees_a_part(operator: str, param: str) -> ShardError:
    return ShardError(
        f"{_without_backward(operator)} is computed from the parameter {param!r} itself, of which this rank "
        "holds one part, so ranks would get different values and wrong gradients: read the weight from its module inside of forward, such as "
        "self.linear.weight, which is whole there, or use stage 1. Sums of what is done to each element, such as "
        "p.square().sum(), may be added to the loss outside of compiled code"
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


def _mean(grad: Tensor | None, edge: _Edge) -> Tensor | None:
    if grad is None:
        return None
    spec, handle = edge.spec, edge.layout.handle
    return ops.sync(grad, grad.dtype, spec.wire_dtype, False, handle, spec.name)
