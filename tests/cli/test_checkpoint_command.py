"""`torchloom checkpoint`: on good and damaged folders, without a process group."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from typer.testing import CliRunner

from support.checkpoints import copied, flip_bit, names_in, save_steps
from support.ranks import run_ranks
from support.runs import make_engine, train, weights
from torchloom.cli import make_app
from torchloom.errors import CheckpointError, ConfigError, RecordError


def run(*args):
    result = CliRunner().invoke(make_app("checkpoint"), ["checkpoint", *map(str, args)])
    assert not dist.is_initialized()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    save_steps(root / "runs", 1, 3)

    def fn(rank):
        engine, model = make_engine(3)
        train(engine, rank, 3)
        return weights(model)

    return root, run_ranks(2, fn)[0]


def test_verify(saved, tmp_path) -> None:
    code, text = run("verify", saved[0] / "runs")
    assert code == 0
    assert text.count("ok, 7 files") == 2
    assert "GB/s" in text
    root = copied(saved[0] / "runs", tmp_path / "a")
    flip_bit(root / "global_step3" / "__1_0.distcp", 0.7)
    code, text = run("verify", root)
    assert code == 1
    assert "global_step3: DAMAGED" in text
    assert "__1_0.distcp is damaged" in text
    assert "global_step1: ok" in text
    assert run("verify", root, "--tag", "global_step1")[0] == 0
    assert run("verify", root / "global_step1")[0] == 0
    assert run("verify", root / "global_step3")[0] == 1


@pytest.mark.parametrize("name", ["manifest.json", "engine.json"])
def test_verify_without_a_file(name, saved, tmp_path) -> None:
    root = copied(saved[0] / "runs", tmp_path / "a")
    (root / "global_step3" / name).unlink()
    code, text = run("verify", root)
    assert code == 1
    assert f"{name} is missing" in text


def test_list_and_show(saved, tmp_path) -> None:
    root = copied(saved[0] / "runs", tmp_path / "a")
    (root / "global_step1" / "rank_1.json").unlink()
    code, text = run("list", root)
    assert code == 0
    lines = text.splitlines()
    assert lines[1].startswith("global_step3")
    assert "complete" in lines[1]
    assert "rank_1.json is missing" in lines[2]
    code, text = run("show", root)
    assert code == 0
    rows = [line.split(None, 1) for line in text.splitlines()]
    facts = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert facts["step"] == "3"
    assert facts["ranks"] == "2"
    assert "'lr': 0.01" in facts["groups"]


def test_export(saved, tmp_path) -> None:
    code, _ = run("export", saved[0] / "runs", "--to", tmp_path / "out")
    assert code == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: value for name, value in saved[1].items() if name != "head.weight"}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert names_in(tmp_path / "out") == ["model.safetensors"]


def test_export_of_a_damaged_one(saved, tmp_path) -> None:
    root = copied(saved[0] / "runs", tmp_path / "a")
    flip_bit(root / "global_step3" / "__1_0.distcp", 0.7)
    with pytest.raises(CheckpointError, match="__1_0"):
        run("export", root, "--to", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_arguments(saved, tmp_path) -> None:
    for command in ("list", "verify", "show"):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            run(command, tmp_path)
    for tag in ("none", "..", "a/b"):
        with pytest.raises(CheckpointError):
            run("show", saved[0] / "runs", "--tag", tag)
    with pytest.raises(ConfigError):
        run("export", saved[0] / "runs", "--to", tmp_path, "--dtype", "int3")
    for size in ("inf", "nan", "1e300", "0", "-1"):
        with pytest.raises(ConfigError, match="use a positive number of GB"):
            run("export", saved[0] / "runs", "--to", tmp_path, f"--shard-gb={size}")
    with pytest.raises(CheckpointError, match="is a checkpoint, which weights in it would damage"):
        run("export", saved[0] / "runs", "--to", saved[0] / "runs" / "global_step1")
    (tmp_path / "file").touch()
    with pytest.raises(RecordError):
        run("export", saved[0] / "runs", "--to", tmp_path / "file" / "x")


class Runs:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (exec, (f"open({self.marker!r}, 'w').close()",))


@pytest.mark.parametrize("command", ["verify", "list", "show", "export"])
def test_hostile_files(command, saved, tmp_path) -> None:
    marker = tmp_path / "marker"
    for name in names_in(saved[0] / "runs" / "global_step3"):
        root = copied(saved[0] / "runs", tmp_path / name)
        (root / "global_step3" / name).write_bytes(pickle.dumps(Runs(marker)))
        args = ["--to", tmp_path / "out"] if command == "export" else []
        try:
            code = run(command, root, *args)[0]
        except CheckpointError:
            continue
        assert command in ("list", "show", "export") or code == 1
    assert not marker.exists()
