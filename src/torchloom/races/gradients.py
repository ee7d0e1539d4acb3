"""Whether a rewritten graph still reduces each gradient once and returns the result.

A gradient that is dropped, replaced or reduced twice is no race: the graph runs, and trains to other weights. So one
walk follows each gradient from the memory that was reduced before the rewrite to what the graph returns. It does not
look into arithmetic: what reads a gradient carries it on, unless it is known to take no values from it (`zeros_like`,
`fill_`, a product with 0).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import fx

from torchloom import ops
from torchloom._torch.operators import OpOverload
from torchloom.graph import args_of, argument, nbytes, written
from torchloom.races.check import Start, Use
from torchloom.races.graphs import GraphSchedule, held_by, picks_of

Path: TypeAlias = tuple[str, ...]
"""The memory of a gradient, then the parameters as whose gradient it was reduced."""
_Paths: TypeAlias = frozenset[Path]
_NONE: _Paths = frozenset()


@dataclass(frozen=True, slots=True)
class Reductions:
    """Which gradients a graph reduces and returns."""

    reduced: Counter[Path]
    returned: tuple[frozenset[Path], ...]
    """Reduced gradients in each result of the graph."""
    by: Mapping[str, str]
    """The node that reduces the gradient of each parameter last."""


@dataclass(frozen=True, slots=True)
class Unreduced:
    """A gradient that a rewritten graph does not reduce once and return."""

    gradient: str
    """Its memory before it is reduced."""
    param: str
    at: str
    """The node that reduces it, or else returns."""
    is_reduced: bool
    """Whether only its way to the result of the graph is lost."""


def reductions_of(schedule: GraphSchedule, before: Reductions | None = None) -> Reductions:
    """Follow the gradients of a graph.

    Args:
        schedule: of a joint or lowered graph.
        before: those of the graph before it was rewritten; None: what a reduction reads is a gradient.
    """
    walk = _GradientWalk(schedule, before)
    for name, event in zip(schedule.issued_by, schedule.events, strict=True):
        if isinstance(event, Use | Start):
            walk.step(name, event)
    results = args_of(schedule.graph.output_node())[0]
    results = results if isinstance(results, (list, tuple)) else [results]
    returned = tuple(
        frozenset(path for path in walk.held((each,)) if len(path) > 1)
        if isinstance(each, fx.Node)
        else _NONE
        for each in results
    )
    return Reductions(walk.reduced, returned, walk.by)


def find_unreduced(before: Reductions, after: Reductions) -> Unreduced | None:
    """Return the first gradient that was reduced and returned before a rewrite, and is not so, once, after it."""
    wrong = [path for path in before.reduced if path not in after.reduced]
    wrong += [path for path, times in after.reduced.items() if times > before.reduced[path]]
    for gradient, param, *_ in wrong:
        return Unreduced(gradient, param, after.by.get(param, "output"), is_reduced=False)
    for was, now in zip(before.returned, after.returned, strict=False):
        for gradient, param, *_ in sorted(was - now):
            return Unreduced(gradient, param, "output", is_reduced=True)
    return None


@dataclass
class _GradientWalk:
    """What is known after a prefix of the events."""

    schedule: GraphSchedule
    before: Reductions | None
    reduced: Counter[Path] = field(default_factory=Counter)
    by: dict[str, str] = field(default_factory=dict)
    holds: dict[str, _Paths] = field(default_factory=dict)
    """Gradients that each memory carries."""

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.schedule.graph.nodes}
        if self.before is None:
            grads = [grad for node in self.nodes.values() for grad, *_ in _reduced_by(node)]
            self.gradients = held_by(grads, self.schedule.memories)
        else:
            self.gradients = frozenset(path[0] for path in self.before.reduced)
        self.holds |= {m: frozenset({(m,)}) for m in self.gradients & self.schedule.given}
        present = {*self.schedule.memories.values()}
        self.erased = {
            path for path in (self.before.reduced if self.before else ()) if path[0] not in present
        }

    def held(self, nodes: tuple[fx.Node, ...]) -> _Paths:
        memories = held_by(nodes, self.schedule.memories)
        return _NONE.union(*(self.holds.get(memory, _NONE) for memory in memories))

    def step(self, name: str, event: Use | Start) -> None:
        paths = _NONE.union(*(self.holds[each] for each in event.reads if each in self.holds))
        reductions = list(_reduced_by(self.nodes[name]))
        for grad, param, result in reductions:
            sent = frozenset(
                (*path, param) for path in self.held((grad,)) | self._replaced(grad, param)
            )
            self.reduced.update(sorted(sent))
            self.by[param] = name
            if result is not None:
                self.holds[self.schedule.memories[result]] = sent
        if reductions:
            return
        if paths:
            paths = self._carried_on(self.nodes[name], paths)
        for memory in event.writes:
            if memory in self.gradients and memory not in self.holds:
                self.holds[memory] = frozenset({(memory,)})
            elif paths or memory in self.holds:
                self.holds[memory] = paths

    def _carried_on(self, node: fx.Node, paths: _Paths) -> _Paths:
        memories = self.schedule.memories
        is_part = any(nbytes(to) < nbytes(self.nodes[memories[to]]) for to in written(node))
        if _ignores_values(node) and not is_part:
            return _NONE
        is_copy = node.target is torch.ops.aten.copy_.default and not is_part
        return self.held((args_of(node)[1],)) if is_copy else paths

    def _replaced(self, grad: fx.Node, param: str) -> _Paths:
        """Return gradients of a parameter whose nodes a pass has erased, if what is reduced now is no constant."""
        erased = frozenset(path[:1] for path in self.erased if param in path[1:])
        return erased if erased and _depends_on_inputs(grad) else _NONE


def _reduced_by(node: fx.Node) -> Iterator[tuple[fx.Node, str, fx.Node | None]]:
    """Yield each gradient that a node reduces, its parameter, and the node of the result."""
    if node.target in (ops.reduce, ops.sync):
        yield argument(node, 0, "grad"), argument(node, 5, "param"), node
    elif node.target in (ops.reduce_start, ops.sync_start):
        results = {args_of(pick)[1]: pick for pick in picks_of(node)}
        grads, params = argument(node, 0, "grads"), argument(node, 1, "params")
        for index, (grad, param) in enumerate(zip(grads, params, strict=True)):
            yield grad, param, results.get(index)


def _ignores_values(node: fx.Node) -> bool:
    """Say whether a call takes no values from its tensors."""
    target = node.target
    is_operator = isinstance(target, OpOverload)
    name = target._schema.name if is_operator else getattr(target, "__name__", str(target))
    name = name.rpartition("::")[2].rstrip("_")
    is_zeroed = name == "mul" and any(
        not isinstance(arg, fx.Node) and arg == 0 for arg in node.args
    )
    return is_zeroed or name in ("zero", "fill") or name.endswith("_like") or name[:4] == "new_"


def _depends_on_inputs(node: fx.Node) -> bool:
    pending = [node]
    for each in pending:  # grows while it is walked
        if each.op == "placeholder":
            return True
        inputs = [] if _ignores_values(each) else each.all_input_nodes
        pending += [other for other in inputs if other not in pending]
    return False
