"""Edit a graph, and update the values recorded on its nodes.

A planner lowers many copies of a graph, and most of each copy is as it was in the one before. What a
call returns is then known already (`KnownValues`): copies share the values that are recorded at their nodes, so the
inputs are the very same objects. Running an operator on fake tensors takes about a millisecond.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom.graph.nodes import tensors_in, value_of
from torchloom.graph.writes import written


def call(graph: fx.Graph, target: Any, args: Sequence[Any], name: str | None = None) -> fx.Node:
    """Insert a call at the graph's insertion point and record the value that it would have.

    Args:
        graph: the graph, with its insertion point set (`with graph.inserting_before(node)`).
        target: an operator or function.
        args: its positional arguments; nodes may be nested in lists.
        name: a readable name for the node; made unique.
    """
    node = graph.create_node("call_function", target, tuple(args), {}, name=name)
    values: Any = fx.node.map_arg(node.args, value_of)
    if target is operator.getitem:
        whole, index = values
        node.meta["val"] = whole[index]
    else:
        node.meta["val"] = value_of_call(target, values, lambda: _run_fake(target, values))
    return node


_FAKES: dict[Any, Callable[..., Any]] = {}


def know_fake(op: Any, fake: Callable[..., Any]) -> None:
    """Let `call` ask a function for the values of an operator; torch's dispatcher takes several times as long.

    Args:
        op: the operator.
        fake: computes its outputs under a fake mode, as new tensors.
    """
    _FAKES[op] = fake


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let the users of `old` read `new`, and erase `old`."""
    old.replace_all_uses_with(new, propagate_meta=False)
    if value_of(new) is None:
        new.meta["val"] = value_of(old)
    old.graph.erase_node(old)


def tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    """Tell the partitioner whether backward is given a value or computes it again.

    Args:
        node: of a joint graph.
        policy: MUST_SAVE or MUST_RECOMPUTE.
    """
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = 0


def front_as(
    graph: fx.Graph, flat: fx.Node, shape: Sequence[int | fx.Node], name: str | None = None
) -> fx.Node:
    """Return the front of a padded weight in one dimension, without a copy, in a shape whose sizes may be nodes.

    Args:
        graph: of `flat`, with its insertion point set.
        flat: the padded weight.
        shape: of the weight.
        name: for the node, made unique.
    """
    numel: int | fx.Node = math.prod(size for size in shape if isinstance(size, int))
    for size in shape:
        if isinstance(size, fx.Node):
            numel = call(graph, operator.mul, (size, numel))
    if not isinstance(numel, int) or value_of(flat).numel() != numel:
        flat = call(graph, torch.ops.aten.slice.Tensor, (flat, 0, 0, numel))
    return call(graph, torch.ops.aten.view.default, (flat, list(shape)), name)


def move_before(nodes: Sequence[fx.Node], anchor: fx.Node) -> None:
    """Move nodes, in their order, to just before `anchor`."""
    for node in nodes:
        anchor.prepend(node)


def move_after(nodes: Sequence[fx.Node], anchor: fx.Node) -> None:
    """Move nodes, in their order, to just after `anchor`, which is not one of them."""
    for node in nodes:
        if anchor.next is not node:
            anchor.append(node)
        anchor = node


def record_values(graph: fx.Graph) -> None:
    """Record the values of calls that a foreign pass inserted without one, or with another node's.

    The value of another node says that both hold the same memory, which only what the call returns can tell.
    """
    seen: set[int] = set()
    for node in graph.nodes:
        value = value_of(node)
        is_lent = isinstance(value, torch.Tensor) and id(value) in seen and not written(node)
        if node.op == "call_function" and ("val" not in node.meta or is_lent):
            args = fx.node.map_arg(node.args, value_of)
            kwargs = fx.node.map_arg(node.kwargs, value_of)
            node.meta["val"] = _run_fake(node.target, args, kwargs)
        seen.add(id(value_of(node)))


def _run_fake(target: Any, args: Any, kwargs: Any = None) -> Any:
    kwargs = dict(kwargs or {})
    tensors = tensors_in([args, *kwargs.values()])
    mode = next((each.fake_mode for each in tensors if hasattr(each, "fake_mode")), None)
    if mode is None:
        # Tests trace with real tensors; operators without a body cannot run on them.
        with torch.device("meta"):
            kwargs = {name: fx.node.map_aggregate(v, _to_meta) for name, v in kwargs.items()}
            return target(*fx.node.map_aggregate(args, _to_meta), **kwargs)
    with mode:
        return _FAKES.get(target, target)(*args, **kwargs)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


class KnownValues:
    """What calls returned in earlier trials, by operator and arguments.

    Example:
        >>> known = KnownValues()
        >>> with known.trial():
        ...     first = value_of_call(len, ["a"], object), value_of_call(len, ["a"], object)
        >>> with known.trial():
        ...     again = value_of_call(len, ["a"], object), value_of_call(len, ["a"], object)
        >>> first == again, first[0] is first[1]
        (True, False)
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, list[Any]] = {}
        self._inputs: list[Any] = []
        self._uses: Counter[Hashable] = Counter()

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Look up values of calls, each once: two equal calls of one trial give two tensors."""
        self._uses.clear()
        token = _KNOWN.set(self)
        try:
            yield
        finally:
            _KNOWN.reset(token)

    def get(self, target: Any, args: Any, run: Callable[[], Any]) -> Any:
        """Return what `target` gives for `args`, which `run` finds out the first time.

        Args:
            target: the operator or function called.
            args: its arguments.
            run: computes the value, the first time.
        """
        try:
            key = (target, _key(args))
            turn = self._uses[key]
        except TypeError:  # a symbolic number has no hash
            return run()
        self._uses[key] += 1
        values = self._found.setdefault(key, [])
        if not values:
            self._inputs.append(args)  # objects that are known by identity must live on
        if turn == len(values):
            values.append(run())
        return values[turn]


_KNOWN: contextvars.ContextVar[KnownValues | None] = contextvars.ContextVar("known", default=None)


def value_of_call(target: Any, args: Any, run: Callable[[], Any]) -> Any:
    """Return what a call gives: looked up in a trial, else by `run`.

    Args:
        target: the operator or function called.
        args: its arguments.
        run: computes the value, where none is known.
    """
    known = _KNOWN.get()
    return run() if known is None else known.get(target, args, run)


def _key(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    return (type(value), value)  # 1, 1.0 and True are equal
