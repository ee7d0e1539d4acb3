"""What a check of the config found, in the log."""

from __future__ import annotations

import logging

from torchloom.config import Config
from torchloom.log import get_logger

logger = get_logger(__name__)


def log_notes(config: Config) -> None:
    """Log what was translated, assumed or ignored."""
    for note in config.notes:
        level = logging.WARNING if note.level == "warning" else logging.INFO
        logger.log(level, "%s: %s", note.path, note.message)
