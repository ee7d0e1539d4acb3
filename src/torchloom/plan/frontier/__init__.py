"""What to keep and what to compute again: the frontier between time and memory."""

from __future__ import annotations

from torchloom.plan.frontier.search import Frontier, Point, crossing, frontier

__all__ = ["Frontier", "Point", "crossing", "frontier"]
