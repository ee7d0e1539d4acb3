"""What to keep and what to compute again: the frontier between time and memory."""

from __future__ import annotations

from torchloom.plan.frontier.search import (
    Frontier,
    FrontierPoint,
    MemorySource,
    crossing,
    frontier,
    peaks_under,
)

__all__ = ["Frontier", "FrontierPoint", "MemorySource", "crossing", "frontier", "peaks_under"]
