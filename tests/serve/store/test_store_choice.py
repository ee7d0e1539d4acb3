"""Which store is used: by the code, by the environment, under a name, and by users who cannot write to it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from serve.models import BATCH, Plain, made, rows
from serve.processes import run
from torchloom.errors import ArtifactError, ServeError
from torchloom.serve import Contract, Store, build, counter, load, served, support_torch_compile

X = torch.ones(3, 16)


def test_names_tell_programs_of_one_model_apart(tmp_path):
    with torch.no_grad():
        build(made(Plain), rows(), backend="eager", store=tmp_path, name="draft")
        with counter.expect(num_traces=2):  # of the range, and of the one size
            build(made(Plain), rows(), backend="eager", store=tmp_path, name="whole", sizes=[8])
        for name, num in (("draft", 1), ("whole", 2)):
            program = load(tmp_path, made(Plain), name=name)
            assert len(program.variants) == num
            options = {"backend": "eager", "name": name, "sizes": [8][: num - 1]}
            again = build(made(Plain), rows(), store=tmp_path, **options)
            assert again.origin == "loaded"
        assert len(load(tmp_path, made(Plain)).variants) == 2  # any: the newest
        with pytest.raises(ArtifactError, match="name"):
            load(tmp_path, made(Plain), name="other")
        with pytest.raises(ArtifactError, match="name"):
            load(tmp_path, made(Plain), name="")


def test_a_store_that_the_environment_names_is_used_where_the_code_names_none(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHLOOM_STORE", str(tmp_path / "theirs"))
    with torch.no_grad():
        assert build(made(Plain), rows(), backend="eager").origin == "built"
        assert build(made(Plain), rows(), backend="eager").origin == "loaded"
        assert build(made(Plain), rows(), backend="eager", store=tmp_path / "own").origin == "built"
        decorated = support_torch_compile(contract=rows(), backend="eager", shapes="prove")
        kind = decorated(type("Decorated", (Plain,), {}))
        kind().eval()(X)
        model = kind().eval()
        model(X)
        assert served(model).program.origin == "loaded"


def test_stores_can_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHLOOM_DISABLE_STORE", "1")
    monkeypatch.setenv("TORCHLOOM_STORE", str(tmp_path / "theirs"))
    with torch.no_grad(), counter.expect(num_saves=0, num_loads=0):
        for store in (None, tmp_path / "own", Store(tmp_path / "own")):
            assert build(made(Plain), rows(), backend="eager", store=store).origin == "built"
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("TORCHLOOM_FORCE_LOAD", "1")
    with pytest.raises(ServeError, match="TORCHLOOM_DISABLE_STORE=1"):
        build(made(Plain), rows(), backend="eager", store=tmp_path / "own")


def test_programs_can_be_loaded_alone(tmp_path, monkeypatch):
    with torch.no_grad():
        build(made(Plain), rows(), backend="eager", store=tmp_path)
        monkeypatch.setenv("TORCHLOOM_FORCE_LOAD", "1")
        with counter.expect(num_traces=0, num_loads=1):
            assert build(made(Plain), rows(), backend="eager", store=tmp_path).origin == "loaded"
        for model, options, text in (
            (made(Plain, eps=1e-3), {}, "eps was 1e-05, is 0.001"),
            (made(Plain), {"sizes": [3]}, "built with other options"),
            (made(Plain), {"store": tmp_path / "empty"}, "holds no program"),
        ):
            with counter.expect(num_traces=0), pytest.raises(ArtifactError, match=text) as error:
                build(model, rows(), **{"backend": "eager", "store": tmp_path, **options})
            assert "TORCHLOOM_FORCE_LOAD=1" in str(error.value)
        with pytest.raises(ServeError, match="neither `store` nor TORCHLOOM_STORE"):
            build(made(Plain), rows(), backend="eager")


AS_NOBODY = """
    import os, sys, torch
    from serve.models import Plain, made, rows
    from torchloom.serve import build, counter, load
    torch.manual_seed(0)
    model = made(Plain)
    with torch.no_grad():
        # All modules are imported while they can be read: the interpreter may lie in root's home.
        build(made(Plain, eps=1e-2), rows(), backend="eager")
        num_traces = counter.num_traces
        os.setgid(65534), os.setuid(65534)
        assert not os.access(sys.argv[1], os.W_OK)
        for program in (load(sys.argv[1], model), build(model, rows(), backend="eager", store=sys.argv[1])):
            assert program.origin == "loaded" and counter.num_traces == num_traces
            torch.testing.assert_close(program(torch.ones(3, 16)), model(torch.ones(3, 16)))
        other = build(made(Plain, eps=1e-3), rows(), backend="eager", store=sys.argv[1])
        print(other.origin, other(torch.ones(3, 16)).shape)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who cannot write")
def test_a_store_serves_users_who_cannot_write_to_it(tmp_path_factory, monkeypatch):
    """What is found is served; what is not is built and kept in memory, with a warning."""
    folder = Path("/var/tmp") / f"torchloom-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        key = folder / "key"
        monkeypatch.setenv("TORCHLOOM_KEY_FILE", str(key))
        torch.manual_seed(0)
        with torch.no_grad():
            build(made(Plain), rows(), backend="eager", store=folder / "store")
        os.chown(key, 0, 65534)
        key.chmod(0o640)  # as a mounted secret
        for path in (folder / "store").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
        variables = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"}
        found = run(AS_NOBODY, folder / "store", cwd=folder, **variables)
        assert found.stdout.split()[0] == "built"
        assert "not" in found.stderr and "stored" in found.stderr, found.stderr
        assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
    finally:
        shutil.rmtree(folder)


def test_contracts_in_stores_keep_the_order_of_names(tmp_path):
    class Sums(torch.nn.Module):
        def forward(self, z, a):
            return sum(part * (place + 1) for place, part in enumerate(a.values())) + z

    contract = Contract({"z": (BATCH, 4), "a": {"y": (BATCH, 4), "b": (BATCH, 4)}})
    model = Sums().eval()
    with torch.no_grad():
        build(model, contract, backend="eager", store=tmp_path)
        program = load(tmp_path, model)
        parts = {"y": torch.ones(3, 4), "b": 2 * torch.ones(3, 4)}
        torch.testing.assert_close(program(torch.zeros(3, 4), parts), 5 * torch.ones(3, 4))
    assert stat.S_IMODE((tmp_path / "entries").stat().st_mode) & 0o022 == 0
