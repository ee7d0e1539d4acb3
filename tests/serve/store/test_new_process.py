"""Programs that a new process loads: facts do not depend on what this process did or where objects lie."""

from __future__ import annotations

import subprocess
import sys
import textwrap

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


def run(file, folder, asked):
    done = subprocess.run(
        [sys.executable, str(file), str(folder), asked], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")[:-1]


def test_a_new_process_loads_what_was_stored(tmp_path):
    file = tmp_path / "programs.py"
    file.write_text(textwrap.dedent(PROGRAMS))
    run(file, tmp_path / "store", "build")
    found = run(file, tmp_path / "store", "load")
    assert found == ["Mapped loaded", "Telling loaded", "Disabled loaded"]
