"""Planning a step before it runs: what each part of it costs, on which device."""

from __future__ import annotations
