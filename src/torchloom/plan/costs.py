"""The former name of `torchloom.costs`."""

from __future__ import annotations

import warnings

from torchloom.costs import *  # noqa: F403

warnings.warn(
    "torchloom.plan.costs is torchloom.costs now: import it from there",
    DeprecationWarning,
    stacklevel=2,
)
