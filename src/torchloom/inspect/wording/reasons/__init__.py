"""The sentences in which torch says why a guard failed: some name the check, others what was found.

Each module holds sentences of one topic as patterns, and what each means for the user. `reason_of` reads one.
"""

from __future__ import annotations

from torchloom.inspect.wording.reasons.base import Reason
from torchloom.inspect.wording.reasons.read import reason_of

__all__ = ["Reason", "reason_of"]
