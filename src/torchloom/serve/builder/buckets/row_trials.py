"""Try each operator of a graph alone: its result on S rows, cut to n rows, has to be its result on n rows.

Each is tried for several n, with the values of a run and with random ones: all rows of a run may look the same behind
`x > 5`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from torchloom.errors import ServeError
from torchloom.serve.builder.buckets.row_graph import (
    DEEPER,
    MIXES,
    VMAP,
    MixedError,
    Views,
    flat,
    is_opaque,
    live_in,
    name_of,
)
from torchloom.serve.builder.compare.differences import first_difference

_EMPTY = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})
"""Operators whose results hold whatever is in memory."""
_MOST_SIZES = 256
"""Numbers of rows at which operators are tried that nobody can look into."""
_MOST_CLASSES = 8


class RowTrial(fx.Interpreter):
    """Runs a graph for the greatest number of rows, and each operator alone for fewer.

    Args:
        module: the graph.
        views: what its tensors look like for a number of rows.
        sizes: numbers of rows; the last one is that of the run.
    """

    def __init__(self, module: fx.GraphModule, views: Views, sizes: Sequence[int]) -> None:
        super().__init__(module)
        self._graph_module, self._views, self._sizes = module, views, sizes
        self._live = live_in(module.graph)
        self._draw = torch.Generator().manual_seed(0)
        self._depth = 0

    def run_node(self, n: fx.Node) -> Any:
        """Try one operator, and run it."""
        name = name_of(n)
        self._depth += DEEPER.get(name, 0)
        is_inside = self._depth > 0 or name in VMAP
        if n.op.startswith("call") and n in self._live and not is_inside and name not in _EMPTY:
            self._try(n)
        return super().run_node(n)

    def _try(self, node: fx.Node) -> None:
        size = self._sizes[-1]
        whole = self._views.at(self._graph_module, size)
        inputs = node.all_input_nodes
        if not any(flat(self.env[each]) or _is_size(each) for each in inputs):
            return
        if node in whole and not flat(whole[node]):
            return  # a number: what takes it is tried
        values = {each: self.env[each] for each in inputs}
        for change in (None, self._other):
            given = values if change is None else {n: _mapped(v, change) for n, v in values.items()}
            try:
                wanted = self._result(node, given)
            except Exception:  # noqa: BLE001 - an operator may raise anything for values that it does not take
                continue
            for rows in self._rows(node):
                self._compare(node, given, wanted, rows)

    def _rows(self, node: fx.Node) -> list[int]:
        """Return the numbers of rows at which an operator is tried."""
        fewer = list(self._sizes[:-1])
        chosen = {*fewer[:2], fewer[len(fewer) // 2], *fewer[-2:]}
        if is_opaque(node):
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
            except Exception as error:  # an operator may raise anything
                text = f"does not run on {rows} rows alone ({type(error).__name__})"
                raise MixedError(node, text) from error
            for one, other in zip(flat(wanted), flat(found), strict=False):
                short = _narrowed(one, other.shape)
                if short is None or first_difference(other, short, ""):
                    draws = first_difference(wanted, self._result(node, given, seed=1), "")
                    what = "draws other random numbers for other numbers of rows"
                    raise MixedError(node, what if draws else MIXES)

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
