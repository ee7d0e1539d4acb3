"""A part of a graph with its inputs and digest, and a graph cut into such parts."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchloom._torch.shapes import range_text
from torchloom.graph import written
from torchloom.regions.labels import graph_form, value_text
from torchloom.serve.call.stitching import Stitching


@dataclass(frozen=True)
class Piece:
    """A part of a graph."""

    graph_module: fx.GraphModule
    """Returns a tuple."""
    inputs: tuple[Any, ...]
    """Fake tensors and sizes."""
    is_kept: bool
    """Whether it is one of the operators that stay as they are."""
    digest: str
    """A hash of what it computes, whatever its nodes are called."""
    fixed: frozenset[int] = frozenset()
    """Places of inputs that are the model's own tensors, whose memory stays where it is."""

    @property
    def writes(self) -> bool:
        """Whether it may write to tensors."""
        return any(map(written, self.graph_module.graph.nodes))

    @property
    def written(self) -> frozenset[int]:
        """Places of inputs that it may write to, by itself or through views."""
        storages = [
            value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
            for value in self.inputs
        ]
        tensors = {place for place, storage in enumerate(storages) if storage is not None}
        found: set[int] = set()
        for node in filter(written, self.graph_module.graph.nodes):
            values = [each.meta.get("example_value") for each in written(node)]
            if any(value is None for value in values):
                return frozenset(tensors)
            known = {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}
            found |= {place for place in tensors if storages[place] in known}
        return frozenset(found)


@dataclass(frozen=True)
class Divided:
    """A graph in pieces."""

    pieces: tuple[Piece, ...]
    """In order of first use, equal ones once."""
    stitching: Stitching

    @property
    def writes(self) -> bool:
        """Whether it may write to tensors that it is given."""
        return any(piece.writes for piece in self.pieces)

    @property
    def num_calls(self) -> int:
        """Return how many pieces run in a call."""
        return len(self.stitching.steps)


def piece_of(module: fx.GraphModule, *, is_kept: bool) -> Piece:
    """Return a graph as a piece."""
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = tuple(node.meta["example_value"] for node in placeholders)
    fixed = {place for place, node in enumerate(placeholders) if node.name.startswith("l_self_")}
    return Piece(module, inputs, is_kept, graph_digest(module), frozenset(fixed))


def graph_digest(module: fx.GraphModule) -> str:
    """Return a hash of a graph and its sizes that the names of its nodes, symbols and modules do not enter."""
    symbols: dict[str, str] = {}

    def show(value: Any) -> str:
        return _SYMBOL.sub(
            lambda found: symbols.setdefault(found[0], f"n{len(symbols)}"), value_text(value)
        )

    inputs = module.graph.find_nodes(op="placeholder")
    hints = " ".join(_hints(node.meta.get("example_value")) for node in inputs)
    return f"{graph_form(module.graph, show)}-{hashlib.sha256(hints.encode()).hexdigest()[:16]}"


_SYMBOL = re.compile(r"\b[su]\d+\b")


def _hints(value: Any) -> str:
    """Return what sizes were during the trace, for which compilers tune, and their ranges."""
    if isinstance(value, torch.Tensor):
        return " ".join(map(_hints, value.shape))
    if isinstance(value, torch.SymInt):
        return f"{value.node.hint} of {range_text(value)}"
    return str(value)
