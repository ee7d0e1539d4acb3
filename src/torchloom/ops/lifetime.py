"""An operator that ends the life of tensors.

free_(xs)   the memory of xs is given back now; nobody may read them again
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchloom.ops.library import define


def _fake_free(xs: Sequence[Tensor]) -> None:
    return None


free_ = define("free_(Tensor(a!)[] xs) -> ()", _fake_free)
"""Give the memory of tensors back, although somebody else may still name them."""
