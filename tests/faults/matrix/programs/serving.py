"""Stores of served programs that others can write to (`torchloom.serve`)."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from faults.matrix.programs.rank import Rank
from torchloom.serve import Contract, Dim, Store, build, load


def loads_a_store_of_others(rank: Rank) -> None:
    root = Path("store")
    contract = Contract({"input": (Dim("batch", 1, 8), 16)})
    model = nn.Linear(16, 16).eval()
    build(model, contract, backend="eager", store=root)
    for path in (root, root / "entries"):
        path.chmod(0o777)
    rank.mark()
    load(Store(root), model, contract)
    print("loaded", flush=True)
