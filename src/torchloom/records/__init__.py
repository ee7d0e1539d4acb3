"""Records of what torch.compile did: plain data in versioned JSON, which opens without torch.

Session -> Function (resume functions as children) -> Entry -> guards, graphs, kernels, ...
"""

from __future__ import annotations

from torchloom.records.entry import (
    Artifact,
    Break,
    CacheUse,
    Continuation,
    Entry,
    Guard,
    Kernel,
    PassRun,
    Recompile,
    Span,
)
from torchloom.records.io import SCHEMA_VERSION, from_json, load_record, save_record, to_json
from torchloom.records.model import (
    Alive,
    Decision,
    EventRow,
    Function,
    GraphPlan,
    Peak,
    Session,
    Standing,
)

__all__ = [
    "SCHEMA_VERSION",
    "Alive",
    "Artifact",
    "Break",
    "CacheUse",
    "Continuation",
    "Decision",
    "Entry",
    "EventRow",
    "Function",
    "GraphPlan",
    "Guard",
    "Kernel",
    "PassRun",
    "Peak",
    "Recompile",
    "Session",
    "Span",
    "Standing",
    "from_json",
    "load_record",
    "save_record",
    "to_json",
]
