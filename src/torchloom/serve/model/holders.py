"""The name under which `call.read_values` takes what stands for a missing value."""

from __future__ import annotations

from torchloom.serve.model.snapshot import ABSENT as ABSENT
