"""States of the random number generators of one rank: torch's, CUDA's, Python's, NumPy's.

The file holds tensors, numbers and lists alone, and is read as such.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchloom.checkpoints.manifest import reading


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rng_rank{rank}.pt"


def capture() -> bytes:
    """Return the states of this process's generators, as the content of a file."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  the one that programs share
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read(path: Path) -> Callable[[], None]:
    """Read a file of states; return what sets this process's generators to them.

    The states are tried on generators of their own first, so that setting them cannot fail.

    Raises:
        CheckpointError: it is missing or holds something else.
    """
    with reading(path):
        with path.open("rb") as file:
            state = torch.load(
                io.BytesIO(file.read()), map_location="cpu", weights_only=True, mmap=False
            )
        torch.Generator().set_state(state["torch"])
        version, internal, gauss = state["python"]
        python = (version, tuple(internal), gauss)
        random.Random().setstate(python)
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy = (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached)
        np.random.RandomState().set_state(numpy)
        cuda = state.get("cuda") if torch.cuda.is_available() else None
        if cuda is not None:
            torch.Generator("cuda").set_state(cuda)

    def restore() -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return restore
