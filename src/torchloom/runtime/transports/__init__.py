"""What carries collectives: one class for each transport."""

from __future__ import annotations
