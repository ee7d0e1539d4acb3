"""Running passes over captured graphs: presets, the pass manager, compile sessions."""

from __future__ import annotations

from torchloom.pipeline.presets import PRESETS, resolve_passes
from torchloom.pipeline.report import CompileReport, GraphReport
from torchloom.pipeline.session import CompileSession

__all__ = ["PRESETS", "CompileReport", "CompileSession", "GraphReport", "resolve_passes"]
