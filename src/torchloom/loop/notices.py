"""What a check of the config found, in the log."""

from __future__ import annotations

import logging

from torchloom.config import Config
from torchloom.log import get_logger

logger = get_logger(__name__)


def warn_of_monitors(config: Config, caller: str) -> None:
    """Warn of sections that only an engine follows; one rank calls."""
    if config.monitors.sections:
        logger.warning(
            "%s does not write what %s of the config ask for: pass log_to= to torchloom.compile, or use the "
            "trackers of your framework",
            caller,
            ", ".join(config.monitors.sections),
        )


def log_notes(config: Config) -> None:
    """Log what was translated, assumed or ignored."""
    for note in config.notes:
        level = logging.WARNING if note.level == "warning" else logging.INFO
        logger.log(level, "%s: %s", note.path, note.message)
