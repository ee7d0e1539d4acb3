"""One compiled training step: described by one value, built whole by one function.

    description      what is sharded, which passes with which options from which step on, which compiler, which
                     budget, what may wait on the host, what is pinned: `describe_step`
    build            from a description and a model to a `CompiledStep`: `build_step`
    standing         device memory outside the graphs: parameters, gradients, optimizer states
    planner          makes the planner of a step; measures operators and decides whether to plan again
    compiled         the running step: follows its schedule, plans again, keeps the first plan's code until all
                     ranks have compiled the second plan

`loop.compile.compile_step` calls both, for `engine.compile()` and `torchloom.compile(model, ...)`.
"""

from __future__ import annotations

from torchloom.step.build import build_step
from torchloom.step.compiled import CompiledStep
from torchloom.step.description import CompileCall, StepDescription, describe_step
from torchloom.step.interfaces import Driver, HostMemory

__all__ = [
    "CompileCall",
    "CompiledStep",
    "Driver",
    "HostMemory",
    "StepDescription",
    "build_step",
    "describe_step",
]
