"""FX vocabulary: pass contract, questions about nodes, edits, printing.

Passes import these helpers, so a pass holds only its decisions.
"""

from __future__ import annotations

from torchloom.graph.activations import (
    GraphSplit,
    draws,
    droppable,
    forward_nodes,
    inner_owners,
    live_bytes,
    movable,
    outputs_of,
    split_between,
    split_of,
)
from torchloom.graph.alias import (
    argument,
    is_view,
    is_view_op,
    owners,
    readers,
    source_of,
    storage_of,
    viewed,
)
from torchloom.graph.casts import LowerReaders, lower_readers, read_lower
from torchloom.graph.contract import (
    Choices,
    GraphPass,
    PassContext,
    SharedWeights,
    options_of,
)
from torchloom.graph.edit import (
    KnownValues,
    call,
    front_as,
    move_after,
    move_before,
    record_values,
    replace,
    tag,
)
from torchloom.graph.nodes import (
    args_of,
    find,
    first_call,
    is_fetched,
    is_on_host,
    mark_fetched,
    mark_host,
    nbytes,
    positions,
    tensors_in,
    value_of,
)
from torchloom.graph.text import digest_of, graph_digest, graph_text, op_counts
from torchloom.graph.writes import is_in_place_name, is_only_read, overloads_of, written

__all__ = [
    "Choices",
    "GraphPass",
    "GraphSplit",
    "KnownValues",
    "LowerReaders",
    "PassContext",
    "SharedWeights",
    "args_of",
    "argument",
    "call",
    "digest_of",
    "draws",
    "droppable",
    "find",
    "first_call",
    "forward_nodes",
    "front_as",
    "graph_digest",
    "graph_text",
    "inner_owners",
    "is_fetched",
    "is_in_place_name",
    "is_on_host",
    "is_only_read",
    "is_view",
    "is_view_op",
    "live_bytes",
    "lower_readers",
    "mark_fetched",
    "mark_host",
    "movable",
    "move_after",
    "move_before",
    "nbytes",
    "op_counts",
    "options_of",
    "outputs_of",
    "overloads_of",
    "owners",
    "positions",
    "read_lower",
    "readers",
    "record_values",
    "replace",
    "source_of",
    "split_between",
    "split_of",
    "storage_of",
    "tag",
    "tensors_in",
    "value_of",
    "viewed",
    "written",
]
