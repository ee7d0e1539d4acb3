"""Texts of all ranks through a key-value store, and who did not come.

Nothing is exchanged by a collective, which would hang in just the case that callers ask about: a
rank that failed, or took another branch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torchloom._torch.hush import hushed_store


@hushed_store()
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
        # By turns, not in a wait of the store's: that would let no signal through until it ends.
        pause_s = 0.001
        while not (has_come := store.check([str(rank)])) and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(0.05, 1.5 * pause_s)
        if has_come:
            texts[rank] = store.get(str(rank)).decode()
        else:
            missing.append(rank)
    return texts, missing
