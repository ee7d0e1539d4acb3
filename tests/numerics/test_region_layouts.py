"""Equal layers train to the same bits where gradients lie in memory otherwise than the layers' results."""

from __future__ import annotations

from typing import Any

import pytest

from numerics.test_regions import check_all, of
from support.turned_layers import Convolved, Recomputed, RowsFirst, Turned

KINDS = {
    "over length": [5],
    "summed": [4, 1],
    "summed last": [4, 1],
    "last row": [5],
    "joined": [5],
    "skips": [5],
    "rows first": [5],
    "in turn": [3, 2],
}
"""How many layers are calls of each body: layers whose gradients lie otherwise have their own."""
MODELS: dict[str, Any] = {
    "convolved, permuted": (of(Convolved, 3, 5, 6, 7, what="permuted"), [4]),
    "convolved, channels last": (of(Convolved, 3, 5, 6, 7, what="channels last"), [4]),
    "convolved, all permuted": (of(Convolved, 3, 5, 6, 7, what="all permuted"), [4, 4]),
    "convolved, summed": (of(Convolved, 3, 5, 6, 7, what="summed"), [3, 1]),
    **{name: (of(Turned, 3, 13, 24, what=name), calls) for name, calls in KINDS.items()},
    "recomputed, in turn": (of(Recomputed, 3, 13, 24, what="in turn"), [3, 2]),
    "recomputed, collected": (of(Recomputed, 3, 13, 24, what="collected"), [5, 4]),
    "transformer, rows first": (of(RowsFirst, 3, 13, 24), [4]),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_may_lie_in_any_order(name: str) -> None:
    check_all({name: MODELS[name]}, num_ranks=1)
