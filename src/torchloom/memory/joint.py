"""The peak of a joint graph under a choice of dropped values, without splitting it.

Does on indices what the split does on graphs: forward runs the forward half in order; backward runs
the rest in order and brings in, before each node, what of the forward half it needs and does not
get from forward. So thousands of choices can be tried on one captured graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchloom.graph import forward_nodes, value_of
from torchloom.memory.graph_memory import Probe
from torchloom.memory.micro_step import MUTATIONS, is_kept
from torchloom.memory.storages import Storage, outputs_of, storages_of

_DROPPED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class Peaks(NamedTuple):
    """Peaks of a joint graph under one choice of dropped values, above what was live before."""

    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    """Allocated by forward and live when backward begins; results and the seed included."""
    recomputed: tuple[int, ...]
    """Nodes of the forward half that backward runs again, by index."""

    @property
    def peak_bytes(self) -> int:
        """The higher of the two."""
        return max(self.forward_bytes, self.backward_bytes)


@dataclass(slots=True)
class JointModel:
    """A joint graph as arrays over the indices of nodes and the numbers of storages."""

    nodes: list[fx.Node]
    inputs: list[tuple[int, ...]]
    touched: list[tuple[int, ...]]
    """Storages of which each node's value is a part."""
    reaches: list[tuple[int, ...]]
    """Storages of each node's value and of all that it reads."""
    fresh: list[tuple[int, ...]]
    """Storages that a node allocates."""
    sizes: list[int]
    """Bytes by storage."""
    workspace: list[int]
    in_forward: list[bool]
    is_input: list[bool]
    results: list[int]
    gradients: list[int]
    held: set[int]
    """Storages that live before and after: parameters, the batch, constants."""
    returned: set[int]
    """Storages of forward's results, which the caller holds through backward."""
    seeds: set[int]
    """Storages of the gradients of results."""
    roots: set[int]
    """Those of scalar results: who calls backward() holds them."""
    first_of_backward: int
    maker: list[int]
    """Of what picks one of several results: the node that made them; of others the node itself."""
    fixed: frozenset[int]
    """Nodes that tags drop already: gathered weights, the user's checkpoints."""

    def simulate(self, dropped: Callable[[int], bool]) -> Peaks:
        """Return the peaks when forward hands over no value for which `dropped` says so.

        Args:
            dropped: by the index of a node of the forward half.
        """
        saved = self.saved(dropped)
        forward = self._forward_order(saved)
        backward = self._backward_order(saved)
        crossing = {s for i in saved for s in self.touched[i]}
        kept = (crossing | self.returned) - self.held
        ends = kept | {s for i in self.results for s in self.touched[i]}
        up = self._walk(forward, set(self.held), self.held | ends, 0)
        start = kept | self.seeds
        live = sum(self.sizes[s] for s in start)
        forever = self.held | self.returned | self.roots
        grads = {s for i in self.gradients for s in self.touched[i]}
        down = self._walk(backward, start | self.held, forever | grads, live)
        again = tuple(i for i in backward if self.in_forward[i])
        return Peaks(up, down, live, again)

    def saved(self, dropped: Callable[[int], bool]) -> list[int]:
        """Return the values of the forward half that backward reads and does not compute, the last one first."""
        needed, found = self._marked(self.gradients), []
        # Nodes stand behind what they read: one sweep from the end sees every reader first.
        for index in reversed(range(len(needed))):
            if not needed[index]:
                continue
            if self.in_forward[index] and (self.is_input[index] or not dropped(index)):
                found.append(index)
            else:
                for used in self.inputs[index]:
                    needed[used] = 1
        return found

    def _marked(self, indices: Iterable[int]) -> bytearray:
        marks = bytearray(len(self.nodes))
        for index in indices:
            marks[index] = 1
        return marks

    def _needed(self, wanted: Iterable[int], given: Iterable[int]) -> bytearray:
        """Return a mark for each node that the wanted ones need, down to the given ones."""
        needed, stops = self._marked(wanted), self._marked(given)
        for index in reversed(range(len(needed))):
            if stops[index]:
                needed[index] = 0
            elif needed[index]:
                for used in self.inputs[index]:
                    needed[used] = 1
        return needed

    def _forward_order(self, saved: Iterable[int]) -> list[int]:
        needed = self._needed([*self.results, *saved], ())
        return [i for i, mark in enumerate(needed) if mark and not self.is_input[i]]

    def _backward_order(self, saved: Iterable[int]) -> list[int]:
        """Return backward's nodes in order.

        As torch's `reordering_to_mimic_autograd_engine`: from the first node that reads a gradient
        on, each node in order, preceded by what it needs.
        """
        needed = self._needed(self.gradients, saved)
        placed = self._marked(saved)
        for index, is_input in enumerate(self.is_input):
            placed[index] |= is_input
        order: list[int] = []
        for index in range(self.first_of_backward, len(self.nodes)):
            if not needed[index] or placed[index]:
                continue
            missing = [index]
            placed[index] = 1
            for each in missing:  # grows while it is walked
                for used in self.inputs[each]:
                    if not placed[used]:
                        placed[used] = 1
                        missing.append(used)
            order += sorted(missing)
        return order

    def _walk(self, order: Sequence[int], alive: set[int], stay: set[int], live: int) -> int:
        """Return the highest sum of live bytes, of which `live` are there at the start."""
        last: dict[int, int] = {}
        for place, index in enumerate(order):
            for storage in self.reaches[index]:
                last[storage] = place
        dying: list[list[int]] = [[] for _ in order]
        for storage, place in last.items():
            if storage not in stay:
                dying[place].append(storage)
        peak = live
        for place, index in enumerate(order):
            for storage in self.fresh[index]:
                if storage not in alive:
                    alive.add(storage)
                    live += self.sizes[storage]
            peak = max(peak, live + self.workspace[index])
            for storage in dying[place]:
                if storage in alive:
                    alive.discard(storage)
                    live -= self.sizes[storage]
        return peak


def joint_model(joint: fx.Graph, num_results: int, probe: Probe | None = None) -> JointModel:
    """Read a joint graph.

    Args:
        joint: from AOTAutograd, without dead and repeated nodes.
        num_results: how many of its outputs are forward's; the others are gradients.
        probe: what operators allocate besides what the graph shows.
    """
    nodes = [node for node in joint.nodes if node.op != "output"]
    index_of = {node: index for index, node in enumerate(nodes)}
    half = set(forward_nodes(joint))
    numbers: dict[Storage, int] = {}
    sizes: list[int] = []
    touched, fresh, workspace = [], [], []
    for node in nodes:
        found = None if probe is None else probe(node)
        storages = storages_of(node, () if found is None else found.result_bytes)
        new = [key for key in storages if key not in numbers]
        for key in new:
            numbers[key] = len(sizes)
            sizes.append(storages[key])
        touched.append(tuple(numbers[key] for key in storages))
        fresh.append(tuple(numbers[key] for key in new))
        workspace.append(0 if found is None else found.workspace_bytes)
    outputs = outputs_of(joint)
    results = [(v, role) for v, role in outputs[:num_results] if isinstance(v, fx.Node)]
    gradients = [v for v, _ in outputs[num_results:] if isinstance(v, fx.Node)]
    tangents = [n for n in nodes if n.op == "placeholder" and n.name.startswith("tangents")]
    readers = [index_of[user] for node in tangents for user in node.users if user in index_of]

    def parts(found: Iterable[fx.Node]) -> set[int]:
        return {s for node in found for s in touched[index_of[node]]}

    given = [n for n in nodes if n.op in ("placeholder", "get_attr") and n not in tangents]
    written = parts(v for v, role in results if role in MUTATIONS)
    inputs = [tuple(index_of[used] for used in node.all_input_nodes) for node in nodes]
    return JointModel(
        nodes=nodes,
        inputs=inputs,
        touched=touched,
        reaches=[
            tuple({*touched[i], *(s for used in read for s in touched[used])})
            for i, read in enumerate(inputs)
        ],
        fresh=fresh,
        sizes=sizes,
        workspace=workspace,
        in_forward=[node in half or node in given for node in nodes],
        is_input=[node.op in ("placeholder", "get_attr") for node in nodes],
        results=[index_of[v] for v, _ in results],
        gradients=[index_of[v] for v in gradients],
        held=parts(given),
        returned=parts(v for v, role in results if role not in MUTATIONS) - written,
        seeds=parts(tangents),
        roots=parts(n for n in tangents if is_kept(value_of(n))),
        first_of_backward=min(readers, default=len(nodes)),
        maker=[
            index_of[n.all_input_nodes[0]] if n.target is operator.getitem else i
            for i, n in enumerate(nodes)
        ],
        fixed=frozenset(i for i, n in enumerate(nodes) if n.meta.get("recompute") in _DROPPED),
    )
