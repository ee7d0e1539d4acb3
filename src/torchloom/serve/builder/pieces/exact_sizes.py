"""A graph in pieces at exact sizes: the same pieces, to be compiled for numbers in place of symbols.

A trace stands for each size for which everything holds that it assumed. What compilers would assume of symbols does not
count, as they are given numbers. So sizes that are cut off a range cost no trace of their own, and there may be many.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from torchloom.backends.graphs import copy_graph_module
from torchloom.pieces.fullgraph import FullGraph
from torchloom.pieces.symbols import with_numbers
from torchloom.regions.labels import value_text
from torchloom.serve.builder.pieces.piece import Divided, Piece


def at_sizes(divided: Divided, graph: FullGraph, sizes: Mapping[int, int]) -> Divided | None:
    """Return a divided graph whose pieces take numbers; nothing is executed.

    Args:
        divided: with symbols; it is left as it is.
        graph: the trace that it was made of.
        sizes: what sizes are, by what they were during the trace.

    Returns:
        None if pieces that are equal as long as sizes are symbols would take different inputs.
    """
    placeholders = graph.graph_module.graph.find_nodes(op="placeholder")
    symbolic = [node.meta["example_value"] for node in placeholders]
    mode, inputs = with_numbers(symbolic, graph.env, sizes)
    values: dict[int, Any] = dict(enumerate(inputs))
    done: dict[int, tuple[Piece, tuple[Any, ...]]] = {}
    for step in divided.stitching.steps:
        args = [ref.constant if ref.slot is None else values[ref.slot] for ref in step.args]
        if step.piece not in done:
            done[step.piece] = _at(divided.pieces[step.piece], args, mode)
        piece, outputs = done[step.piece]
        if list(map(value_text, args)) != list(map(value_text, piece.inputs)):
            return None
        values.update(zip(step.results, outputs, strict=True))
    pieces = tuple(done[number][0] for number in range(len(divided.pieces)))
    return dataclasses.replace(divided, pieces=pieces)


def _at(piece: Piece, args: list[Any], mode: Any) -> tuple[Piece, tuple[Any, ...]]:
    """Return a piece for given inputs, and what it returns."""
    module = copy_graph_module(piece.graph_module)
    graph = module.graph
    results: Any = graph.output_node().args[0]
    with mode, torch.no_grad():
        outputs = tuple(module(*args))
    for node, value in zip(results, outputs, strict=True):
        if isinstance(node, fx.Node):  # by these, compilers find the mode
            node.meta["example_value"] = value
    for node, value in zip(graph.find_nodes(op="placeholder"), args, strict=True):
        node.meta["example_value"] = value
    text = "\n".join([piece.digest, *map(value_text, args)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return dataclasses.replace(
        piece, graph_module=module, inputs=tuple(args), digest=digest
    ), outputs
