"""Peak memory of captured graphs, to the byte."""

from __future__ import annotations

from torchloom.plan.memory.alive import Contents, alive_at_peak, module_of
from torchloom.plan.memory.measure import Measured, measure_peak
from torchloom.plan.memory.micro_step import MicroStep, micro_step
from torchloom.plan.memory.optimizer import optimizer_peak
from torchloom.plan.memory.program import Program, program_of
from torchloom.plan.memory.replay import Interface, interface_of, replay_peak
from torchloom.plan.memory.storages import distinct_bytes, storages_of
from torchloom.plan.memory.transit import Transit
from torchloom.plan.memory.workspace import WorkspaceTable

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
