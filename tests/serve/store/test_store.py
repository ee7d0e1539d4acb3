"""Programs from a store: warm without a compiler, and refused, with a reason, when they do not fit."""

from __future__ import annotations

import importlib
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from serve.models import BATCH, Plain, Stack, made, rows
from serve.processes import command, environment, run
from support.ranks import run_ranks
from torchloom.errors import ArtifactError
from torchloom.records import load_record
from torchloom.serve import Contract, Store, build, counter, load, tensor

IDS = Contract({"ids": tensor(BATCH, 5, dtype=torch.int64, below=31)})


WARM = """
    import sys, torch
    from serve.models import Stack, made
    from torchloom.serve import counter, load
    from torch._dynamo.utils import counters
    model = made(Stack, 2)
    program = load(sys.argv[1] if len(sys.argv) > 1 else "store", model)
    with torch.no_grad():
        torch.save(program(torch.load("ids.pt")), "found.pt")
    assert counter.num_traces == counter.num_pieces == 0, counter
    assert not counters["stats"], counters["stats"]
    print("warm")
"""


@pytest.fixture(scope="module")
def cold(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """Return a folder that holds a built program's store and the ids to call it with, and its result."""
    folder = tmp_path_factory.mktemp("cold")
    program = build(made(Stack, 2), IDS, store=folder / "store")
    ids = torch.randint(0, 31, (9, 5))
    torch.save(ids, folder / "ids.pt")
    with torch.no_grad():
        return folder, program(ids)


def test_a_new_process_traces_nothing_and_builds_nothing_and_returns_the_same_bits(cold, tmp_path):
    """Also from a store that was moved, for another home."""
    built, wanted = cold
    folder = tmp_path / "moved"
    shutil.copytree(built / "store", folder / "store")
    shutil.copy(built / "ids.pt", folder / "ids.pt")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho called >> {tmp_path}/calls\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    cache = str(tmp_path / "empty")
    home = str(tmp_path)
    done = run(WARM, cwd=folder, HOME=home, CXX=str(compiler), TORCHINDUCTOR_CACHE_DIR=cache)
    assert done.stdout.strip() == "warm"
    assert torch.equal(torch.load(folder / "found.pt"), wanted)
    assert not (tmp_path / "calls").exists()
    assert not list((tmp_path / "empty").rglob("*.so"))


def test_new_weights_are_a_hit(cold):
    folder, _ = cold
    model = made(Stack, 2)
    with torch.no_grad():
        model.head.weight.add_(1.0)
        program = load(folder / "store", model)
        ids = torch.randint(0, 31, (4, 5))
        torch.testing.assert_close(program(ids), model(ids))


def test_a_changed_constant_is_a_miss_and_set_back_a_hit(tmp_path):
    build(made(Plain), rows(), backend="eager", store=tmp_path)
    changed = made(Plain, eps=1e-6)
    with pytest.raises(ArtifactError, match=r"norm\.eps was 1e-05, is 1e-06"):
        load(tmp_path, changed)
    with counter.expect(num_compiles=1, num_saves=1):
        build(changed, rows(), backend="eager", store=tmp_path)
    for eps in (1e-5, 1e-6):
        load(tmp_path, made(Plain, eps=eps))


def test_another_structure_names_the_tensors(tmp_path):
    build(made(Plain), rows(), backend="eager", store=tmp_path)
    other = made(Plain)
    other.inner = torch.nn.Linear(16, 16, bias=False)
    with pytest.raises(ArtifactError, match=r"tensor inner\.bias: nothing here"):
        load(tmp_path, other)


SOURCE = """
import torch
from torch import nn
from helper import helped

class Edited(nn.Module):
    def forward(self, x):
        y = torch.relu(x)
        return helped(x) + y
"""
HELPER = """
def helped(x):
    return x * 2

def other(x):
    return x * 3
"""


def asked_for(rank: int, folder: Path, check: str) -> str:
    """Ask the store for a model of a file, in a process that has not imported the file before."""
    sys.dont_write_bytecode = True  # edits of one second leave equal times and sizes
    sys.path.insert(0, str(folder))
    model = importlib.import_module("edited").Edited().eval()
    if not (folder / "store").exists():
        build(model, rows(), backend="eager", store=folder / "store")
    try:
        program = load(folder / "store", model, check=check)
    except ArtifactError as error:
        return str(error)
    with torch.no_grad():
        return f"hit {program(torch.ones(2, 16))[0, 0].item()}"


def test_an_edited_file_is_a_miss_unless_the_trace_is_compared(tmp_path):
    def asked(check: str = "fingerprint") -> str:
        return run_ranks(1, asked_for, tmp_path, check)[0]

    (tmp_path / "edited.py").write_text(SOURCE)
    (tmp_path / "helper.py").write_text(HELPER)
    assert asked() == "hit 3.0"
    (tmp_path / "helper.py").write_text("# a comment\n" + HELPER.replace("x * 3", "x * 4"))
    assert "helper.py was edited" in asked()
    assert asked("trace") == "hit 3.0"
    (tmp_path / "helper.py").write_text(HELPER.replace("x * 2", "x * 5"))
    assert "helper.py was edited" in asked()
    assert "graph of edited.Edited" in asked("trace")


def test_keys_that_are_added_to_a_dict_of_ones_own_module_are_a_miss(tmp_path, monkeypatch):
    """Registries of installed packages grow with each model; what a user's module holds is compared whole."""
    (tmp_path / "known_kinds.py").write_text(
        "KINDS = {}\ndef f(x):\n    return x * len(KINDS or [1])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("known_kinds")
    build(module.f, rows(), backend="eager", store=tmp_path / "store")
    assert load(tmp_path / "store", module.f, rows()).origin == "loaded"
    module.KINDS.update(a=1, b=2)
    with pytest.raises(ArtifactError, match="KINDS"):
        load(tmp_path / "store", module.f, rows())


def test_a_file_that_is_edited_after_its_import_is_not_stored(tmp_path, monkeypatch):
    file = tmp_path / "late_edit.py"
    file.write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    helped = importlib.import_module("late_edit").helped
    file.write_text(HELPER.replace("x * 2", "x * 7"))
    program = build(helped, rows(), backend="eager", store=tmp_path / "store")
    assert "late_edit.py, which was edited" in program.variants[0].why_not_stored


@pytest.mark.parametrize(
    ("factor", "value", "text"),
    [
        ("torch", "1.0", r"torch: '2\.[0-9.]+.*' here, '1\.0' there"),
        ("vector instructions", "sve", r"vector instructions: '.*' here, 'sve' there"),
    ],
)
def test_another_torch_or_processor_is_refused(tmp_path, factor, value, text):
    build(made(Plain), rows(), backend="eager", store=tmp_path)
    store = Store(tmp_path)
    ((name, entry),) = store.unverified()[0].items()
    entry["factors"]["machine"][factor] = value
    store.sign(name, entry)
    with pytest.raises(ArtifactError, match=text):
        load(tmp_path, made(Plain))


RACE = """
    import torch
    from serve.models import Plain, made, rows
    from torchloom.serve import build, counter
    program = build(made(Plain), rows(), backend="eager", store="store")
    with torch.no_grad():
        program(torch.ones(3, 16))
    print(counter.num_compiles, counter.num_loads)
"""


def test_processes_that_start_together_build_once_even_if_one_is_killed(tmp_path):
    num_others = 3

    def start() -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command(RACE), env=environment(), cwd=tmp_path, text=True, **pipes)

    first = start()
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("store/locks/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    others = [start() for _ in range(num_others)]
    results = [each.communicate(timeout=300) for each in others]
    assert all(each.returncode == 0 for each in others), results
    assert sorted(out.strip() for out, _ in results) == ["0 1"] * (num_others - 1) + ["1 0"]
    assert load(tmp_path / "store", made(Plain)).origin == "loaded"


def test_a_build_leaves_its_record_and_a_load_leaves_it_alone(tmp_path):
    program = build(made(Plain), rows(), backend="eager", store=tmp_path)
    (path,) = (tmp_path / "records").glob("*.json")
    assert path.stem == program.key
    record = load_record(path)
    (ready,) = [row.data for row in record.events if row.kind == "ProgramReady"]
    assert ready["origin"] == "built"
    assert ready["model"].endswith("Plain")
    assert [function.name for function in record.functions] == ["captured graph"]
    before = path.stat().st_mtime_ns
    build(made(Plain), rows(), backend="eager", store=tmp_path)
    assert path.stat().st_mtime_ns == before


SHARED_LAYER = torch.nn.Linear(16, 16).eval()


def through_a_global(x):
    return torch.relu(SHARED_LAYER(x))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_module_that_is_a_global_is_never_stored_with_its_weights(backend, tmp_path):
    build(through_a_global, rows(), backend=backend, store=tmp_path)
    x = torch.randn(3, 16)
    with torch.no_grad():
        SHARED_LAYER.weight.add_(1.0)
        program = load(tmp_path, through_a_global, rows())
        torch.testing.assert_close(program(x), through_a_global(x))
