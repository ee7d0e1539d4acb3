"""Hooks that run inside of the program that is watched: nothing that they do may reach it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchloom.log import get_logger

logger = get_logger(__name__)

_HERE = ("torchloom/inspect/", "torchloom/_torch/")


def quietly(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose errors are logged and go no further."""

    def guarded(*args: Any) -> None:
        try:
            hook(*args)
        except Exception as error:  # noqa: BLE001  any bug of ours: the program that is watched goes on
            logger.debug("a hook of a watch failed: %s", type(error).__name__)

    return guarded


def caller_of_lookup() -> FrameType | None:
    """Return the frame from which the function is called whose entries Dynamo has looked through."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _HERE):
        frame = frame.f_back
    return frame
