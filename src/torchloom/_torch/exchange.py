"""Texts of all ranks through a key-value store, and who did not come.

Nothing is exchanged by a collective, which would hang in just the case that callers ask about: a
rank that failed, or took another branch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def texts_of(
    store: Any, ranks: Iterable[int], timeout_s: float
) -> tuple[dict[int, str], list[int]]:
    """Return the text that each rank has set under its number, and the ranks without one.

    Args:
        store: a store of the process group that no other exchange uses: prefix it.
        ranks: whom to wait for.
        timeout_s: seconds for all of them together.
    """
    deadline = time.monotonic() + timeout_s
    texts: dict[int, str] = {}
    missing: list[int] = []
    for rank in ranks:
        left = max(0.05, deadline - time.monotonic())  # who came in time is heard in any case
        try:
            store.wait([str(rank)], timedelta(seconds=left))
            texts[rank] = store.get(str(rank)).decode()
        except dist.DistStoreError:
            missing.append(rank)
    return texts, missing
