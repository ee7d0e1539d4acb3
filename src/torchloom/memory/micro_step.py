"""The memory of one forward and backward: from the split graphs to one curve.

    base      parameters, gradients, optimizer states, the batch: live before and after
    forward   saved values and the caller's results stay
    seed      the gradient of the loss, as many bytes as the loss
    backward  frees saved values as it goes, leaves gradients

Roles of inputs and outputs are read from AOTAutograd's descriptors (torch 2.11-2.13).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchloom._torch.dynamo import keeps_tangents
from torchloom.graph import value_of
from torchloom.memory.graph_memory import GraphMemory, Probe, graph_memory_of
from torchloom.memory.storages import (
    Storage,
    Transit,
    outputs_of,
    regathered_at,
    storages_of,
)


@dataclass(slots=True)
class MicroStep:
    """Predicted bytes of one forward and backward, relative to what was live before."""

    forward: GraphMemory
    backward: GraphMemory
    after_forward_bytes: int
    """Saved values and results, between the two."""
    seed_bytes: int
    copied_bytes: int = 0
    """Copies of gradients and results that come into a recording or go out of it."""
    kept: frozenset[Storage] = field(repr=False, default=frozenset())
    """What forward leaves: saved values and results."""
    seeds: frozenset[Storage] = field(repr=False, default=frozenset())
    """Gradients of results that backward begins with."""

    @property
    def peak_bytes(self) -> int:
        """Highest sum of bytes above what was live before the step."""
        start = self.after_forward_bytes + self.seed_bytes
        peak_bytes = max(self.forward.peak_bytes, start + self.backward.peak_bytes)
        return peak_bytes + self.copied_bytes


def micro_step(
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    probe: Probe | None = None,
    transit: Transit | None = None,
    keeps_lives: bool = False,
    is_recorded: bool = False,
) -> MicroStep:
    """Predict the memory of a forward and a backward graph that run boxed, one after the other.

    Args:
        forward: the graph whose outputs are mutated inputs, results and saved values.
        backward: the graph whose inputs are saved values and gradients of results.
        probe: what operators allocate besides what the graphs show; see `WorkspaceTable`.
        transit: what the transport holds besides results.
        keeps_lives: whether the programs say what is alive when.
        is_recorded: whether the graphs run as CUDA graphs: saved values keep their memory, callers get copies.
    """
    inputs = _storages(forward.find_nodes(op="placeholder"))
    nodes = itertools.chain(forward.nodes, backward.nodes)
    scratch = {} if transit is None else regathered_at(nodes, transit)
    simulate = functools.partial(
        graph_memory_of, probe=probe, transit=transit, scratch=scratch, keeps_lives=keeps_lives
    )
    program = simulate(forward.nodes, forward.output_node().all_input_nodes, held=inputs)
    placeholders = list(backward.find_nodes(op="placeholder"))
    tangents = [node for node in placeholders if node.name.startswith("tangents")]
    saved = _storages(node for node in placeholders if node not in tangents)
    # What only mutates an input is copied there and dropped before the caller goes on; a result
    # that does so as well is returned as that input.
    written = _storages(_with_role(forward, MUTATIONS))
    results = _storages(_results(forward, saved)) - written
    kept = {s: n for s, n in program.results.items() if s in saved or s not in written}
    seeds = {s: n for s, n in _sized(tangents).items() if s not in results}
    roots = _storages(node for node in tangents if is_kept(value_of(node)))
    held = inputs | results | roots | (kept.keys() if is_recorded else set())
    gradients = backward.output_node().all_input_nodes
    behind = simulate(backward.nodes, gradients, held=held, sizes=kept)
    copied = {**_sized(tangents), **_sized(gradients)}
    copied.update({storage: size for storage, size in kept.items() if storage in results})
    return MicroStep(
        forward=program,
        backward=behind,
        after_forward_bytes=sum(kept.values()),
        seed_bytes=sum(seeds.values()),
        copied_bytes=sum(copied.values()) if is_recorded else 0,
        kept=frozenset(kept),
        seeds=frozenset(seeds),
    )


def is_kept(tangent: Any) -> bool:
    """Say whether a gradient of a result, a tensor or a fake one, lives until the end of backward.

    Who calls `backward()` holds the gradient of the loss. Those of other results end when they have been read,
    but for torch 2.11 and 2.12, where autograd's frame holds them.
    """
    return keeps_tangents() or getattr(tangent, "ndim", None) == 0


RESULTS = ("PlainAOTOutput", "IntermediateBaseAOTOutput", "MetadataMutationAOTOutput")
MUTATIONS = ("InputMutationAOTOutput",)


def _results(forward: fx.Graph, saved: set[Storage]) -> list[fx.Node]:
    """Return what the caller gets. Where descriptors were lost: all in front of the saved values."""
    if forward.output_node().meta.get("desc"):
        return _with_role(forward, RESULTS)
    values = _with_role(forward, (type(None).__name__,))
    return list(itertools.takewhile(lambda node: not saved & set(storages_of(node)), values))


def _with_role(graph: fx.Graph, roles: Collection[str]) -> list[fx.Node]:
    found = outputs_of(graph)
    return [value for value, role in found if isinstance(value, fx.Node) and role in roles]


def _storages(nodes: Iterable[fx.Node]) -> set[Storage]:
    return set(_sized(nodes))


def _sized(nodes: Iterable[fx.Node]) -> dict[Storage, int]:
    found: dict[Storage, int] = {}
    for node in nodes:
        found.update(storages_of(node))
    return found
