"""Running passes over captured graphs: presets, schedules, the pass manager, compile sessions."""

from __future__ import annotations

from torchloom.deepcompile.profile import ProfilingResult
from torchloom.pipeline.registry import (
    PRESETS,
    REGISTRY,
    PassContract,
    PassRegistry,
    register_compile_pass,
)
from torchloom.pipeline.report import CompileReport, GraphReport
from torchloom.pipeline.schedule import (
    PassItem,
    Resolver,
    Schedule,
    resolve_passes,
    validate_schedule,
)
from torchloom.pipeline.session import CompileSession

__all__ = [
    "PRESETS",
    "REGISTRY",
    "CompileReport",
    "CompileSession",
    "GraphReport",
    "PassContract",
    "PassItem",
    "PassRegistry",
    "ProfilingResult",
    "Resolver",
    "Schedule",
    "register_compile_pass",
    "resolve_passes",
    "validate_schedule",
]
