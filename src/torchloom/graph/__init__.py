"""FX vocabulary: pass contract, questions about nodes, edits, printing.

With matching and surgery in one place, a pass is a screen of decisions.
"""

from __future__ import annotations

from torchloom.graph.activations import (
    draws,
    droppable,
    forward_nodes,
    is_view,
    may_recompute,
    mutated_inputs,
    source_of,
)
from torchloom.graph.alias import is_alias, owners, readers, storage_of
from torchloom.graph.contract import (
    Choices,
    GraphPass,
    PassContext,
    PassFn,
    SharedWeights,
    Stage,
)
from torchloom.graph.edit import call, move_after, move_before, record_values, replace
from torchloom.graph.liveness import live_bytes, viewed
from torchloom.graph.movable import movable
from torchloom.graph.nodes import (
    args_of,
    find,
    is_on_host,
    mark_host,
    nbytes,
    positions,
    value_of,
)
from torchloom.graph.split import Split, outputs_of, split_of
from torchloom.graph.text import graph_text, op_counts

__all__ = [
    "Choices",
    "GraphPass",
    "PassContext",
    "PassFn",
    "SharedWeights",
    "Split",
    "Stage",
    "args_of",
    "call",
    "draws",
    "droppable",
    "find",
    "forward_nodes",
    "graph_text",
    "is_alias",
    "is_on_host",
    "is_view",
    "live_bytes",
    "mark_host",
    "may_recompute",
    "movable",
    "move_after",
    "move_before",
    "mutated_inputs",
    "nbytes",
    "op_counts",
    "outputs_of",
    "owners",
    "positions",
    "readers",
    "record_values",
    "replace",
    "source_of",
    "split_of",
    "storage_of",
    "value_of",
    "viewed",
]
