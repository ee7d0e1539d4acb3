"""Peak memory of captured graphs, to the byte."""

from __future__ import annotations

from torchloom.memory.alive import Contents, alive_at_peak, module_of
from torchloom.memory.measure import Measured, measure_peak
from torchloom.memory.micro_step import MicroStep, micro_step
from torchloom.memory.optimizer import optimizer_peak
from torchloom.memory.program import Program, program_of
from torchloom.memory.replay import Interface, interface_of, replay_peak
from torchloom.memory.storages import distinct_bytes, storages_of
from torchloom.memory.transit import Transit
from torchloom.memory.workspace import WorkspaceTable

__all__ = [
    "Contents",
    "Interface",
    "Measured",
    "MicroStep",
    "Program",
    "Transit",
    "WorkspaceTable",
    "alive_at_peak",
    "distinct_bytes",
    "interface_of",
    "measure_peak",
    "micro_step",
    "module_of",
    "optimizer_peak",
    "program_of",
    "replay_peak",
    "storages_of",
]
