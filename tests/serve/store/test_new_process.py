"""Programs that a new process loads: facts do not depend on what this process did or where objects lie."""

from __future__ import annotations

from serve.processes import run

PROGRAMS = """
import sys
import torch
from torch import nn
from torchloom.serve import Contract, Dim, build, load

class Cache:
    def put(self, x):
        return x + 1

class Mapped(nn.Module):
    def forward(self, x):
        return torch.vmap(lambda row: torch.softmax(row, -1) + row)(x)

class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = "a"
    def forward(self, x):
        if self.kind not in ("a", "b"):
            raise ValueError(f"known are {set((self.kind, 'b', 'c'))}")
        return x * 2

folder, asked = sys.argv[1:]
contract = Contract({"x": (Dim("batch", 1, 4), 4)})

def ask(kind):
    model, x = kind().eval(), torch.ones(2, 4)
    with torch.no_grad():
        if asked == "build":
            program = build(model, contract, store=folder, backend="eager")
        else:
            program = load(folder, model)
        assert torch.equal(program(x), model(x)), kind
        print(kind.__name__, program.origin)

ask(Mapped)
ask(Telling)

class Paged(Cache):
    @torch.compiler.disable  # imports Dynamo
    def put(self, x):
        return x + 2

class Disabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = Cache()
    def forward(self, x):
        return x if isinstance(self.cache, Paged) else self.cache.put(x)

ask(Disabled)
"""


def test_a_new_process_loads_what_was_stored(tmp_path):
    run(PROGRAMS, tmp_path / "store", "build", cwd=tmp_path)
    done = run(PROGRAMS, tmp_path / "store", "load", cwd=tmp_path)
    assert done.stdout.split() == ["Mapped", "loaded", "Telling", "loaded", "Disabled", "loaded"]
