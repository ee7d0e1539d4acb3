"""FX vocabulary: pass contract, questions about nodes, edits, printing.

With matching and surgery in one place, a pass is a screen of decisions.
"""

from __future__ import annotations

from torchloom.graph.contract import (
    Choices,
    GraphPass,
    PassContext,
    PassFn,
    SharedWeights,
    Stage,
)
from torchloom.graph.edit import call, move_before, replace
from torchloom.graph.liveness import live_bytes
from torchloom.graph.nodes import args_of, find, nbytes, positions, value_of
from torchloom.graph.text import graph_text, op_counts

__all__ = [
    "Choices",
    "GraphPass",
    "PassContext",
    "PassFn",
    "SharedWeights",
    "Stage",
    "args_of",
    "call",
    "find",
    "graph_text",
    "live_bytes",
    "move_before",
    "nbytes",
    "op_counts",
    "positions",
    "replace",
    "value_of",
]
