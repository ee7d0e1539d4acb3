"""Equal layers train to the same bits where gradients lie in memory otherwise than the layers' results."""

from __future__ import annotations

from typing import Any

import pytest

from numerics.test_regions import check_all, of
from support.turned_layers import Convolved, Recomputed, Turned

MODELS: dict[str, Any] = {
    "convolved, permuted": (of(Convolved, 3, 5, 6, 7), []),
    "over length": (of(Turned, 3, 13, 24, what="over length"), []),
    "last row": (of(Turned, 3, 13, 24, what="last row"), [5]),
    "recomputed, in turn": (of(Recomputed, 3, 13, 24, what="in turn"), []),
}
"""How many layers are calls of one body: where gradients of the layers' results lie otherwise, parts stay."""


@pytest.mark.parametrize("name", MODELS)
def test_gradients_may_lie_in_any_order(name: str) -> None:
    check_all({name: MODELS[name]}, num_ranks=1)
