"""FX vocabulary: pass contract, questions about nodes, edits, printing.

With matching and surgery in one place, a pass is a screen of decisions.
"""

from __future__ import annotations

from torchloom.graph.alias import is_alias, owners, readers, storage_of, viewed
from torchloom.graph.contract import Choices, GraphPass, PassContext, PassFn, Stage
from torchloom.graph.edit import call, move_after, move_before, replace
from torchloom.graph.liveness import live_bytes
from torchloom.graph.movable import movable
from torchloom.graph.nodes import args_of, find, nbytes, positions, value_of
from torchloom.graph.split import Split, outputs_of, split_of
from torchloom.graph.text import graph_text, op_counts

__all__ = [
    "Choices",
    "GraphPass",
    "PassContext",
    "PassFn",
    "Split",
    "Stage",
    "args_of",
    "call",
    "find",
    "graph_text",
    "is_alias",
    "live_bytes",
    "movable",
    "move_after",
    "move_before",
    "nbytes",
    "op_counts",
    "outputs_of",
    "owners",
    "positions",
    "readers",
    "replace",
    "split_of",
    "storage_of",
    "value_of",
    "viewed",
]
