"""`torchloom calibrate`: measure a device, its links and the collectives between ranks."""

from __future__ import annotations

from torchloom.cli.calibrate.command import calibrate

__all__ = ["calibrate"]
