"""What was woven, kept beside the compiler's caches.

On a cache hit no pass runs, so nothing could say which collectives the graphs hold. The counts are
written where the compiled graphs are, under the same key, and read back on a warm start.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from torchloom import _torch
from torchloom.log import get_logger

logger = get_logger(__name__)


def save(key: str, collectives: dict[str, int]) -> None:
    """Remember the collectives of a woven graph; a full disk costs a warning, not the run."""
    path = _path(key)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(collectives, sort_keys=True))
        partial.replace(path)
    except OSError as error:
        logger.warning("the record of a woven graph cannot be written to %s: %s", path, error)


def load(key: str) -> dict[str, int]:
    """Return the collectives of a graph that came from the caches; empty when unknown."""
    try:
        found = json.loads(_path(key).read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): int(count) for name, count in found.items()}


def _path(key: str) -> Path:
    return Path(_torch.inductor_cache_dir()) / "torchloom" / f"{key}.json"
