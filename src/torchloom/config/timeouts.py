"""Make one `TimeoutsConfig` from the keys of `timeouts`."""

from __future__ import annotations

from torchloom.config.fields import record_of
from torchloom.config.model import TimeoutsConfig
from torchloom.config.schema import TimeoutsSection

_MARGIN_S = 60.0
"""The process group times out later than torchloom's own limits, because torchloom's errors say more."""


def resolve_timeouts(section: TimeoutsSection) -> TimeoutsConfig:
    """Return how long a rank waits for others."""
    longest = max(section.step_s, section.compile_s, section.agree_s)
    return record_of(
        TimeoutsConfig, section, process_group_s=section.process_group_s or longest + _MARGIN_S
    )
