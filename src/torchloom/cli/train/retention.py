"""Old checkpoints of a run go when newer ones are complete."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from torchloom.log import get_logger

_LOGGER = get_logger(__name__)

_TAG = re.compile(r"global_step\d+")
_COMPLETE = "engine.json"
"""The file that a checkpoint is not complete without."""


def drop_older(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints; never the newest, nothing else.

    A checkpoint is renamed to `<tag>.partial` first, so that one whose deletion is broken off is
    not taken for a whole one. A disk that refuses is told and does not end the run.

    Args:
        folder: of the run's checkpoints; tags of other names are the user's own.
        keep: how many stay, 1 at least.
    """
    complete = [
        path
        for path in folder.iterdir()
        if _TAG.fullmatch(path.name) and (path / _COMPLETE).is_file()
    ]
    # By time, not by step: a run that went back to an earlier checkpoint has later ones of old.
    complete.sort(key=lambda path: (path / _COMPLETE).stat().st_mtime_ns)
    latest = folder / "latest"
    named = latest.read_text().strip() if latest.is_file() else None
    for path in complete[: -max(1, keep)]:
        if path.name == named:
            continue
        going = path.with_name(f"{path.name}.partial")
        try:
            path.rename(going)
            shutil.rmtree(going)
        except OSError as error:
            _LOGGER.warning("the old checkpoint %s could not be deleted: %s", path, error)
