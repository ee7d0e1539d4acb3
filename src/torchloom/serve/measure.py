"""How much memory a program holds at its largest call."""

from __future__ import annotations

import torch

from torchloom.memory.measure import measure_peak
from torchloom.serve.program import Program
from torchloom.serve.target import as_promised


def peak_of(program: Program) -> int:
    """Run a program once at its largest sizes; return the most bytes that the call held.

    What was there before does not count: parameters, buffers, arguments.
    """
    sizes = {name: dim.max for name, dim in program.contract.dims.items()}
    args = program.contract.example(sizes)
    devices = program.target.device_types(program.contract)
    with as_promised(program.contract):
        if "cuda" not in devices:
            return measure_peak(lambda: program(**args)).peak_bytes
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        program(**args)
        return torch.cuda.max_memory_allocated() - before
