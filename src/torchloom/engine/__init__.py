"""DeepSpeed's calls: `initialize`, and the engine that it returns."""

from __future__ import annotations

from torchloom.engine.api import initialize
from torchloom.engine.engine import Engine

__all__ = ["Engine", "initialize"]
