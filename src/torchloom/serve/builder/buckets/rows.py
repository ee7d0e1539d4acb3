"""Does each operator of a graph keep rows apart, so that padding cannot reach real rows?

Padding is safe for a model if it is safe for each of its operators. Operators that take rows and return none are
refused by their sizes (`row_reductions`); those that keep rows are tried alone (`row_trials`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchloom.serve.builder.buckets.row_graph import MixedError, Views
from torchloom.serve.builder.buckets.row_reductions import refuse_reductions
from torchloom.serve.builder.buckets.row_trials import RowTrial
from torchloom.serve.builder.trace import Traced


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
    views = Views(traced, hint)
    try:
        refuse_reductions(traced.graph.graph_module, views, (sizes[0], size))
        recorder = RowTrial(traced.graph.graph_module, views, sizes)
        with torch.no_grad():
            run(recorder.run)
    except MixedError as error:
        return error.node, str(error)
    return None
