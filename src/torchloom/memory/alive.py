"""What is alive when a step's memory is highest, by kind and layer.

The peak is that of `micro_step`, and the groups add up to it to the byte: they are the same storages,
each told by who made it.

    gathered weights   results of gathers, and what is computed of weights alone (casts, transposes)
    activations        what forward computes, also where backward computes it again
    gradients          what backward computes from the gradient of the loss, reduced or not
    communication      what the transport holds between start and wait
    workspace          what the operator at the peak allocates for itself
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from torchloom import ops
from torchloom.graph import args_of
from torchloom.memory.graph_memory import GraphMemory, Lifetime
from torchloom.memory.micro_step import MicroStep
from torchloom.memory.storages import Storage, storages_of

WEIGHTS, ACTIVATIONS, GRADIENTS = "gathered weights", "activations", "gradients"
COMMUNICATION, WORKSPACE = "communication", "workspace"
_ROOT = re.compile(r"^L\['\w+'\](\.__self__)?\.?")
"""How Dynamo names the module that it captured: `L['self'].blocks.0` is `blocks.0`."""


class PeakGroup(NamedTuple):
    """Bytes of one kind in one layer."""

    kind: str
    layer: str
    """The module, "" where none is known."""
    num_bytes: int
    num_values: int


@dataclass(frozen=True, slots=True)
class PeakContents:
    """A peak and what is alive at it."""

    peak_bytes: int
    phase: str
    """forward or backward."""
    node: str
    """What runs at the peak."""
    layer: str
    groups: tuple[PeakGroup, ...]
    """The largest first; their bytes add up to the peak."""


def module_of(node: fx.Node) -> str:
    """Return the path of the module that a node was traced in, "" where it is not known."""
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return module_path(paths[-1]) if paths else ""


def module_path(name: str) -> str:
    """Return the path of a module that Dynamo names.

    Example:
        >>> module_path("L['self'].blocks.0")
        'blocks.0'
    """
    return _ROOT.sub("", name)


def alive_at_peak(
    forward: fx.Graph, backward: fx.Graph, step: MicroStep, params: Mapping[str, str]
) -> PeakContents:
    """Return what is alive at the peak of two split graphs.

    Args:
        forward: of which `step` was made.
        backward: likewise.
        step: made with `keeps_lives`.
        params: names of parameters by the graph input that holds them.
    """
    made = _Makers(params)
    made.read(forward, is_backward=False)
    made.read(backward, is_backward=True)
    behind_bytes = step.after_forward_bytes + step.seed_bytes + step.backward.peak_bytes
    if step.forward.peak_bytes >= behind_bytes:
        place = _place_of_peak(step.forward)
        lives = (each for each in step.forward.lives if each.spans(place))
        return made.contents("forward", place, lives, step.forward)
    place = _place_of_peak(step.backward)
    return made.contents("backward", place, _in_backward(step, backward, place), step.backward)


def _place_of_peak(program: GraphMemory) -> int:
    curve = program.curve()
    return max(range(len(curve)), key=lambda index: curve[index][1], default=-1)


def _in_backward(step: MicroStep, backward: fx.Graph, place: int) -> Iterator[Lifetime]:
    """Yield what is alive at backward's peak, also what forward left and the caller holds."""
    start = step.kept | step.seeds
    # Saved states of generators come under another name and fake storage: in order, by their size.
    twins: defaultdict[int, list[Lifetime]] = defaultdict(list)
    for each in step.backward.lives:
        if each.begin < 0 and each.storage not in start:
            twins[each.num_bytes].append(each)
    alive = (each for each in step.backward.lives if each.spans(place))
    yield from (each for each in alive if each.begin >= 0 or each.storage in start)
    owned = {each.storage for each in step.backward.lives}
    for each in step.forward.lives:
        if each.storage in step.kept and each.storage not in owned:
            same = twins.get(each.num_bytes)
            if not same or same.pop(0).spans(place):
                yield each
    for node in backward.find_nodes(op="placeholder"):
        for storage, num_bytes in storages_of(node).items():
            if storage in step.seeds and storage not in owned:
                yield Lifetime(storage, num_bytes, node, -1, None)


class _Maker(NamedTuple):
    kind: str
    layer: str


class _Makers:
    """Which kind of value each node makes, and in which layer."""

    def __init__(self, params: Mapping[str, str]) -> None:
        self._params = params
        self._by_name: dict[str, _Maker] = {}
        self._by_storage: dict[Storage, _Maker] = {}

    def read(self, graph: fx.Graph, *, is_backward: bool) -> None:
        """Go through a graph in order: what a value is follows from what it is made of."""
        for node in graph.nodes:
            if node.op == "output":
                continue
            maker = self._placeholder(node) if node.op == "placeholder" else self._made(node)
            if node.op != "placeholder" or not is_backward or node.name not in self._by_name:
                self._by_name[node.name] = maker
            for storage in storages_of(node):
                self._by_storage.setdefault(storage, maker)

    def contents(
        self, phase: str, place: int, lives: Iterable[Lifetime], program: GraphMemory
    ) -> PeakContents:
        """Sum up what is alive while one node runs.

        Args:
            phase: forward or backward.
            place: of the node among those of its graph.
            lives: what is alive there.
            program: the graph.
        """
        sums: defaultdict[_Maker, list[int]] = defaultdict(list)
        for each in lives:
            sums[self._of(each)].append(each.num_bytes)
        node, name, layer = program.steps[place].node if program.steps else None, "", ""
        if node is not None:
            name, layer = node.name, module_of(node) or self._by_name[node.name].layer
            workspace = program.steps[place].workspace_bytes
            if workspace:
                sums[_Maker(WORKSPACE, layer)].append(workspace)
        groups = [PeakGroup(*maker, sum(sizes), len(sizes)) for maker, sizes in sums.items()]
        groups = [each for each in groups if each.num_bytes]
        groups.sort(key=lambda each: (-each.num_bytes, each.kind, each.layer))
        return PeakContents(
            sum(each.num_bytes for each in groups), phase, name, layer, tuple(groups)
        )

    def _of(self, life: Lifetime) -> _Maker:
        if life.storage is None:
            return _Maker(COMMUNICATION, self._by_name[life.maker.name].layer)
        known = self._by_storage.get(life.storage)
        return known or self._by_name.get(life.maker.name, _Maker(ACTIVATIONS, ""))

    def _placeholder(self, node: fx.Node) -> _Maker:
        known = self._by_name.get(node.name)
        if known is not None:  # what forward saved
            return known
        if node.name.startswith("tangents"):
            return _Maker(GRADIENTS, "")
        param = self._params.get(node.name)
        return _Maker(ACTIVATIONS, "") if param is None else _Maker(WEIGHTS, _layer_of(param))

    def _made(self, node: fx.Node) -> _Maker:
        named = _named(node)
        if named is not None:
            return named
        made_of = [self._by_name[each.name] for each in node.all_input_nodes]
        layer = module_of(node) or next((each.layer for each in made_of if each.layer), "")
        kinds = {each.kind for each in made_of}
        if GRADIENTS in kinds:
            return _Maker(GRADIENTS, layer)
        if kinds == {WEIGHTS}:  # a cast or a view of weights alone
            return _Maker(WEIGHTS, made_of[0].layer)
        return _Maker(ACTIVATIONS, layer)


_WEIGHTS_OF = (ops.gather, ops.replicate, ops.resident, ops.gather_start)
_GRADIENTS_OF = (ops.reduce, ops.sync, ops.reduce_start, ops.sync_start)
_NAMED_SECOND = (ops.gather_start, ops.reduce_start, ops.sync_start)


def _named(node: fx.Node) -> _Maker | None:
    """Return what a transfer, or what picks one of its results, says of itself."""
    start, place = node, None
    if node.target is operator.getitem and node.all_input_nodes:
        start, place = node.all_input_nodes[0], node.args[1]
    kind = WEIGHTS if start.target in _WEIGHTS_OF else GRADIENTS
    if start.target not in (*_WEIGHTS_OF, *_GRADIENTS_OF):
        return None
    if start.target not in _NAMED_SECOND:
        return _Maker(kind, _layer_of(str(args_of(start)[-1])))
    names: Any = args_of(start)[1]
    if isinstance(place, int):
        return _Maker(kind, _layer_of(str(names[place])))
    return _Maker(kind, _common(names))


def _layer_of(param: str) -> str:
    return param.rpartition(".")[0]


def _common(params: Iterable[str]) -> str:
    """Return the layer of a bucket: the one of all its parameters, else ""."""
    layers = {_layer_of(str(each)) for each in params}
    return layers.pop() if len(layers) == 1 else ""
