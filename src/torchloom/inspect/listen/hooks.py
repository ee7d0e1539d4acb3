"""What hooks inside the watched program have in common: they raise nothing, and know their own frames."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchloom.log import get_logger

logger = get_logger(__name__)

_HERE = ("torchloom/inspect/", "torchloom/_torch/")


def quietly(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that logs its errors and raises none."""

    def guarded(*args: Any) -> None:
        try:
            hook(*args)
        except Exception as error:  # noqa: BLE001  any bug of ours: the program that is watched goes on
            logger.debug("a hook of a watch failed: %s", type(error).__name__)

    return guarded


def caller_of_lookup() -> FrameType | None:
    """Return the frame that calls the function whose entries Dynamo has just searched."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _HERE):
        frame = frame.f_back
    return frame
