"""Logging: one logger per module, rank 0 speaks for the run.

`get_logger(__name__)` returns an ordinary `logging.Logger` under the root `torchloom`. Nothing is
configured at import: an application that has set up logging keeps its handlers. `setup()` is for
the command line alone.
"""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a torchloom module."""
    return logging.getLogger(name)


def setup(rank: int, level: int = logging.INFO) -> None:
    """Send torchloom's log to stderr: everything from rank 0, warnings and worse from the others.

    Args:
        rank: this process's rank; it is put in front of each line of ranks above 0.
        level: the least level shown on rank 0.
    """
    root = logging.getLogger("torchloom")
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{prefix}%(levelname)s %(name)s: %(message)s"))
    root.handlers[:] = [handler]
    root.setLevel(level if rank == 0 else max(level, logging.WARNING))
    root.propagate = False
