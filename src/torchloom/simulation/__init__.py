"""Training steps of N ranks, planned on one machine without them.

world    a simulated rank 0: its groups, its transport, and what the other ranks say
models   models by name, by a Hugging Face folder or by a function in a file
run      the session's own path over tensors without data
lower    Inductor's code for the device, without one: kernels compiled, order read, memory replayed
result   peak memory, seconds and plan, in words and as plain data
"""

from __future__ import annotations

from torchloom.simulation.result import Simulation
from torchloom.simulation.run import simulate

__all__ = ["Simulation", "simulate"]
