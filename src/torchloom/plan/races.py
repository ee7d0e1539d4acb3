"""The former name of `torchloom.races`."""

from __future__ import annotations

import warnings

from torchloom.races import *  # noqa: F403

warnings.warn(
    "torchloom.plan.races is torchloom.races now: import it from there",
    DeprecationWarning,
    stacklevel=2,
)
