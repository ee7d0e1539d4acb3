"""Peak memory of captured graphs, to the byte."""

from __future__ import annotations

from torchloom.memory.alive import PeakContents, alive_at_peak, module_of, module_path
from torchloom.memory.expand import CalledPart, ExpandedJoint, expanded, expanded_joint
from torchloom.memory.graph_memory import GraphMemory, graph_memory_of
from torchloom.memory.ledger import optimizer_peak
from torchloom.memory.measure import Measured, measure_peak
from torchloom.memory.micro_step import MicroStep, micro_step
from torchloom.memory.replay import Interface, interface_of, replay_peak
from torchloom.memory.storages import Transit, distinct_bytes, storages_of
from torchloom.memory.workspace import WorkspaceTable, real_like

__all__ = [
    "CalledPart",
    "ExpandedJoint",
    "GraphMemory",
    "Interface",
    "Measured",
    "MicroStep",
    "PeakContents",
    "Transit",
    "WorkspaceTable",
    "alive_at_peak",
    "distinct_bytes",
    "expanded",
    "expanded_joint",
    "graph_memory_of",
    "interface_of",
    "measure_peak",
    "micro_step",
    "module_of",
    "module_path",
    "optimizer_peak",
    "real_like",
    "replay_peak",
    "storages_of",
]
