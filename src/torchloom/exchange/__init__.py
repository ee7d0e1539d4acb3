"""What ranks tell each other outside of collectives."""

from __future__ import annotations
