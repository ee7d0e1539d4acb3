"""Does each operator of a graph keep rows apart, so that padding cannot reach what is cut out?

A model is padded right if each of its operators is: if an operator on S rows, cut to n, is the operator on n rows.
That is tried for each operator alone, for several n, with the values of a run and with values that show more: behind
`x > 5`, all of a model's own rows may look the same. No values show what a reduction over rows does with a
threshold, so what takes rows and returns none is refused unless it reads real rows alone (`x[0]`) or no values at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from torchloom._torch.symbols import with_numbers
from torchloom.errors import ServeError
from torchloom.serve.compare import first_difference
from torchloom.serve.trace import Traced

_NO_VALUES = frozenset(
    f"{start}{name}"
    for name in ("zeros", "ones", "full", "empty", "tensor", "empty_strided", "rand", "randn")
    for start in ("new_", "")
) | frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        *("type_as", "view_as", "expand_as", "reshape_as", "to", "resize_as"),
        *("size", "dim", "numel", "stride", "is_contiguous", "storage_offset", "_assert_async"),
    }
)
"""Operators that read sizes, types and devices of a tensor, and of its values those of the first alone."""
_EMPTY = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})
"""Operators whose results hold whatever is in memory."""
_DEEPER = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
_VMAP = frozenset({"_remove_batch_dim", *_DEEPER})
"""Operators around a function that vmap calls: in it, sizes that it goes over are not there."""
_MOST_SIZES = 256
"""Numbers of rows at which operators are tried that nobody can look into."""
_MOST_CLASSES = 8
_MIXES = "lets rows see one another, and so padding"

At = Mapping[fx.Node, Any]
"""What the tensors and sizes of a graph look like for one number of rows, by node."""


class _MixedError(Exception):
    """An operator lets rows see one another."""

    def __init__(self, node: fx.Node, text: str) -> None:
        super().__init__(text)
        self.node = node


def mixing_node(
    traced: Traced, sizes: Sequence[int], run: Callable[[Callable[..., Any]], Any]
) -> tuple[fx.Node, str] | None:
    """Return the first operator that lets rows see one another, and how; None if none does.

    Args:
        traced: a trace in which the number of rows is a symbol.
        sizes: numbers of rows that a padded program serves; the last is its own.
        run: runs the model's code around a graph, on arguments of the last size, with what is given in the place of
            the graph.
    """
    (dim,) = traced.box.varying
    hint, size = traced.hints[dim.name], sizes[-1]
    views = _Views(traced, hint)
    try:
        _look(traced.graph.graph_module, views, (sizes[0], size))
        recorder = _Trial(traced.graph.graph_module, views, sizes)
        with torch.no_grad():
            run(recorder.run)
    except _MixedError as error:
        return error.node, str(error)
    return None


@dataclass
class _Views:
    """What a graph looks like for numbers of rows."""

    traced: Traced
    hint: int
    _known: dict[int, dict[int, At]] = field(default_factory=dict)

    def at(self, module: fx.GraphModule, rows: int) -> At:
        """Return tensors without values, and numbers, for nodes that have any of these."""
        known = self._known.setdefault(id(module), {})
        if rows not in known:
            known[rows] = self._at(module, rows)
        return known[rows]

    def _at(self, module: fx.GraphModule, rows: int) -> At:
        examples = {
            node: node.meta["example_value"]
            for node in module.graph.nodes
            if "example_value" in node.meta
        }
        leaves: list[Any] = []
        for value in examples.values():
            map_aggregate(value, lambda leaf: leaves.append(leaf) if _is_leaf(leaf) else None)
        found = dict(zip(map(id, leaves), self._numbers(leaves, rows), strict=True))
        return {
            node: map_aggregate(value, lambda leaf: found.get(id(leaf), leaf))
            for node, value in examples.items()
        }

    def _numbers(self, leaves: list[Any], rows: int) -> list[Any]:
        env = self.traced.graph.env
        try:
            return with_numbers(leaves, env, {self.hint: rows})[1]
        except Exception:  # noqa: BLE001 - one of them has a size that follows from values
            return [self._number(leaf, rows) for leaf in leaves]

    def _number(self, leaf: Any, rows: int) -> Any:
        try:
            return with_numbers([leaf], self.traced.graph.env, {self.hint: rows})[1][0]
        except Exception:  # noqa: BLE001
            return _UNKNOWN


_UNKNOWN: Any = object()
"""A tensor whose size follows from values."""


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, torch.SymInt))


def _flat(value: Any) -> list[Any]:
    """Return tensors, and what stands for unknown ones, in order."""
    found: list[Any] = []

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) or leaf is _UNKNOWN:
            found.append(leaf)
        return leaf

    map_aggregate(value, add)
    return found


# What takes rows, and returns none.


def _look(module: fx.GraphModule, views: _Views, ends: tuple[int, int]) -> None:
    """Raise for an operator that takes rows, and returns fewer sizes that grow with them."""
    low, high = (views.at(module, rows) for rows in ends)
    live, depth = _live(module.graph), 0
    for node in module.graph.nodes:
        depth += _DEEPER.get(_name_of(node), 0)
        if depth and _name_of(node) not in _VMAP and _num_varying(low.get(node), high.get(node)):
            raise _MixedError(node, "sees all rows inside of vmap, where it cannot be tried")
        if node not in live or not node.op.startswith("call"):
            continue
        for inner in _subgraphs(node, module):
            _look(inner, views, ends)
        if node not in high:
            known = node.target is operator.setitem
            pairs = [(low.get(node.args[0]), high.get(node.args[0]))] if known else []
        else:
            pairs = [(low[node], high[node])]
        before = max(
            (_num_varying(low.get(each), high.get(each)) for each in node.all_input_nodes),
            default=0,
        )
        if not before:
            continue
        for one, other in pairs:
            if any(each is _UNKNOWN for each in _flat(other)):
                raise _MixedError(node, "returns a size that follows from values")
            after = [_num_varying(*each) for each in zip(_flat(one), _flat(other), strict=True)]
            if min(after, default=before) < before and not _reads_real_rows(node, low, high):
                raise _MixedError(node, _MIXES)


def _num_varying(one: Any, other: Any) -> int:
    """Return how many sizes of a tensor differ between two numbers of rows; the most of several tensors."""
    pairs = zip(_flat(one), _flat(other), strict=True)
    return max(
        (
            sum(a != b for a, b in zip(low.shape, high.shape, strict=True))
            if isinstance(low, Tensor)
            else 1
            for low, high in pairs
        ),
        default=0,
    )


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose results reach the output, or that write to a tensor."""
    found: set[fx.Node] = set()
    waiting = [node for node in graph.nodes if node.op == "output" or _writes(node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _writes(node: fx.Node) -> bool:
    if not node.op.startswith("call"):
        return False
    name = _name_of(node)
    is_in_place = name.endswith("_") and not name.endswith("__")
    return (
        is_in_place or node.target is operator.setitem or "out" in node.kwargs or _is_opaque(node)
    )


def _name_of(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def _is_opaque(node: fx.Node) -> bool:
    """Say whether an operator is none of torch's own."""
    target: Any = node.target
    if node.op != "call_function":
        return False
    space = getattr(target, "namespace", None)
    if space is None and hasattr(target, "_qualified_op_name"):
        space = target._qualified_op_name.partition("::")[0]
    if space is not None:
        return space not in ("aten", "prims", "higher_order")
    module = getattr(target, "__module__", None) or ""
    return module.partition(".")[0] not in (
        "",
        "torch",
        "_operator",
        "operator",
        "math",
        "builtins",
    )


def _subgraphs(node: fx.Node, module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    for each in node.all_input_nodes:
        if each.op == "get_attr":
            inner = getattr(module, str(each.target), None)
            if isinstance(inner, fx.GraphModule):
                yield inner


def _reads_real_rows(node: fx.Node, low: At, high: At) -> bool:
    """Say whether an operator reads rows that are there for each number of them, or no values."""
    name = _name_of(node)
    if name == "_add_batch_dim":
        return True  # nothing inside of it sees another row
    first = node.args[0] if node.args else None
    one, other = (at.get(first) if isinstance(first, fx.Node) else None for at in (low, high))
    if name in _NO_VALUES:
        # `x.to(other)`: what is kept is the first.
        is_made = name.endswith("_like") or name.startswith("new_")
        return is_made or not _num_varying(one, other)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    index = _index_of(node, name, one.dim()) if len(set(node.all_input_nodes)) == 1 else None
    return index is not None and _is_within(index, one.shape, other.shape)


def _index_of(node: fx.Node, name: str, num_dims: int) -> tuple[Any, ...] | None:
    """Return what an operator takes of a tensor, as an index; None if it is no such operator."""
    match name, node.args:
        case "getitem", (_, tuple(index)):
            return index
        case "getitem", (_, index):
            return (index,)
        case "select", (_, int(at), int(start)):
            item: Any = start
        case "narrow", (_, int(at), int(start), int(length)) if start >= 0:
            item = slice(start, start + length)
        case _:
            return None
    items: list[Any] = [slice(None)] * num_dims
    items[at] = item
    return tuple(items)


def _is_within(index: tuple[Any, ...], low: Sequence[int], high: Sequence[int]) -> bool:
    """Say whether an index reads the same rows of both shapes."""
    items = list(index)
    used = sum(each is not None and each is not Ellipsis for each in items)
    if Ellipsis in [each for each in items if not isinstance(each, fx.Node)]:
        place = items.index(Ellipsis)
        items[place : place + 1] = [slice(None)] * (len(low) - used)
    dim = 0
    for each in items:
        if each is None:
            continue
        if low[dim] != high[dim] and not _is_low(each, low[dim]):
            return False
        dim += 1
    return True


def _is_low(item: Any, least: int) -> bool:
    if item == slice(None):
        return True
    if isinstance(item, slice):
        numbers = (item.start or 0, item.stop)
        is_forward = item.step is None or (isinstance(item.step, int) and item.step > 0)
        return is_forward and all(type(n) is int and 0 <= n <= least for n in numbers)
    return type(item) is int and 0 <= item < least


# What keeps rows: tried.


class _Trial(fx.Interpreter):
    """Runs a graph for the greatest number of rows, and each operator alone for fewer."""

    def __init__(self, module: fx.GraphModule, views: _Views, sizes: Sequence[int]) -> None:
        super().__init__(module)
        self._graph_module, self._views, self._sizes = module, views, sizes
        self._live = _live(module.graph)
        self._draw = torch.Generator().manual_seed(0)
        self._depth = 0

    def run_node(self, n: fx.Node) -> Any:
        """Try one operator, and run it."""
        name = _name_of(n)
        self._depth += _DEEPER.get(name, 0)
        is_inside = self._depth > 0 or name in _VMAP
        if n.op.startswith("call") and n in self._live and not is_inside and name not in _EMPTY:
            self._try(n)
        return super().run_node(n)

    def _try(self, node: fx.Node) -> None:
        size = self._sizes[-1]
        whole = self._views.at(self._graph_module, size)
        inputs = node.all_input_nodes
        if not any(_flat(self.env[each]) or _is_size(each) for each in inputs):
            return
        if node in whole and not _flat(whole[node]):
            return  # a number: what takes it is tried
        values = {each: self.env[each] for each in inputs}
        for change in (None, self._other):
            given = values if change is None else {n: _mapped(v, change) for n, v in values.items()}
            try:
                wanted = self._result(node, given)
            except Exception:  # noqa: BLE001 - it does not take such values
                continue
            for rows in self._rows(node):
                self._compare(node, given, wanted, rows)

    def _rows(self, node: fx.Node) -> list[int]:
        """Return the numbers of rows at which an operator is tried."""
        fewer = list(self._sizes[:-1])
        chosen = {*fewer[:2], fewer[len(fewer) // 2], *fewer[-2:]}
        if _is_opaque(node):
            chosen |= {*fewer[:: max(1, len(fewer) // _MOST_SIZES)]}
        for each in node.all_input_nodes:
            if _is_size(each):
                chosen |= self._one_for_each_value(each, fewer)
        return sorted(chosen)

    def _one_for_each_value(self, node: fx.Node, rows: list[int]) -> set[int]:
        """Return a number of rows for each value of a size, if these are few: `rows % 12 // 11` is 0 or 1."""
        found: dict[Any, int] = {}
        for each in rows[:: max(1, len(rows) // _MOST_SIZES)]:
            found.setdefault(self._views.at(self._graph_module, each).get(node), each)
        return set(found.values()) if len(found) <= _MOST_CLASSES else set()

    def _compare(self, node: fx.Node, given: Mapping[fx.Node, Any], wanted: Any, rows: int) -> None:
        at = self._views.at(self._graph_module, rows)
        fewer = {each: _cut(value, at.get(each)) for each, value in given.items()}
        with suppress(ServeError):  # of kinds that hold no rows
            try:
                found = self._result(node, fewer)
            except Exception as error:
                text = f"does not run on {rows} rows alone ({type(error).__name__})"
                raise _MixedError(node, text) from error
            for one, other in zip(_flat(wanted), _flat(found), strict=False):
                short = _narrowed(one, other.shape)
                if short is None or first_difference(other, short, ""):
                    draws = first_difference(wanted, self._result(node, given, seed=1), "")
                    what = "draws other random numbers for other numbers of rows"
                    raise _MixedError(node, what if draws else _MIXES)

    def _result(self, node: fx.Node, given: Mapping[fx.Node, Any], seed: int = 0) -> Any:
        """Return what an operator returns for other inputs, and what is in its inputs afterwards."""
        own = {
            each: value
            if each.op == "get_attr" and not isinstance(value, Tensor)
            else _mapped(value, _copy)
            for each, value in given.items()
        }
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: own[each])
        torch.manual_seed(seed)
        found = getattr(self, node.op)(node.target, args, kwargs)
        return [found, list(own.values())]

    def _other(self, value: Tensor) -> Tensor:
        """Return other values of a tensor's kind, that are unlike one another."""
        if value.dtype is torch.bool:
            made = torch.rand(value.shape, generator=self._draw) < 0.5
        elif value.is_floating_point():
            made = torch.randn(value.shape, generator=self._draw)
        elif value.dtype.is_complex or not value.numel() or value.min() < 0 or value.max() > 1:
            return value
        else:
            made = torch.randint(0, 2, value.shape, generator=self._draw)
        return made.to(value.device, value.dtype)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt)


def _mapped(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    return map_aggregate(value, lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf)


def _copy(value: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if 0 in value.stride():
        made = torch.empty_like(value, memory_format=torch.contiguous_format)
    return made.copy_(value.detach())


def _cut(value: Any, like: Any) -> Any:
    """Return the first rows of a value, as many as another has; the strides are those of the other."""
    if isinstance(value, Tensor):
        if not isinstance(like, Tensor) or like.dim() != value.dim():
            return value
        short = _narrowed(value, like.shape)
        if short is None:
            return value
        if 0 in like.stride():
            return short.contiguous()
        made = torch.empty_strided(
            tuple(like.shape), tuple(like.stride()), dtype=value.dtype, device=value.device
        )
        return made.copy_(short)
    if isinstance(value, (list, tuple)) and isinstance(like, (list, tuple)):
        return tuple(_cut(each, other) for each, other in zip(value, like, strict=True))
    return like if type(value) is int and type(like) is int else value


def _narrowed(value: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return the beginning of a tensor along each size; None if it is no larger one."""
    if value.dim() != len(shape) or any(a < b for a, b in zip(value.shape, shape, strict=True)):
        return None
    for dim, length in enumerate(shape):
        value = value.narrow(dim, 0, length)
    return value
