"""Checkpoints in DeepSpeed's layout, imported: weights, states and the next step are those of the run that saved."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import torchloom
from support.deepspeed_checkpoint import Whole, write_deepspeed
from support.models import tricky
from support.pool import run_ranks
from support.runs import assert_equal, settings, train
from torchloom.checkpoints.contents import read_contents
from torchloom.checkpoints.deepspeed import import_deepspeed
from torchloom.cli import make_app
from torchloom.errors import CheckpointError

KINDS = ["1", "2", "3", "universal", "universal 3"]
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}


def small(seed: int) -> nn.Module:
    """Return a model with tied, frozen and odd-shaped weights; one without elements has no states."""
    model = tricky(seed)
    model.empty.requires_grad_(False)
    return model


def split(model: nn.Module) -> list[list[str]]:
    """Return the names of matrices and of vectors that are trained."""
    named = [(name, p.dim() > 1) for name, p in model.named_parameters() if p.requires_grad]
    return [[n for n, big in named if big], [n for n, big in named if not big]]


def two_groups(stage: int, seed: int):
    model = small(seed)
    params = dict(model.named_parameters())
    groups = [
        {"params": [params[name] for name in names], "weight_decay": decay}
        for names, decay in zip(split(model), (0.1, 0.0), strict=True)
    ]
    config = settings(stage, scheduler=SCHEDULE)
    engine, *_ = torchloom.initialize(model=model, model_parameters=groups, config=config)
    return engine


def whole_state(engine) -> dict[str, torch.Tensor]:
    """Return weights, buffers and optimizer states, whole."""
    with torchloom.shard.gathered(engine.module):
        found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for each in engine.local:
        for key, value in engine.optimizer.state[each.param].items():
            if value.dim() and each.is_divided:
                full = value.new_empty(value.numel() * engine.world.world_size)
                engine.world.comm.gather_into([value], [full], ["w"])
                value = full[: each.spec.numel].view(each.spec.shape)
            found[f"{each.spec.name} {key}"] = value.clone()
    return found


def test_continues_as_the_run_that_saved(tmp_path) -> None:
    def fn(rank):
        run = two_groups(3, seed=0)
        train(run, rank, 3)
        whole = whole_state(run)
        if rank == 0:
            model = small(1)
            model.load_state_dict({n: whole[n] for n in model.state_dict()})
            groups = split(model)
            keys = ("exp_avg", "exp_avg_sq")
            states = {n: {k: whole[f"{n} {k}"] for k in keys} for names in groups for n in names}
            kept = [
                {key: value for key, value in group.items() if key != "params"}
                for group in run.optimizer.param_groups
            ]
            saved = Whole(model, groups, states, kept, 3.0, {"epoch": 7})
            for kind in KINDS:
                write_deepspeed(tmp_path / kind, saved, kind)
                import_deepspeed(tmp_path / kind, tmp_path / "out" / kind)
        position = run.lr_scheduler.state_dict()
        train(run, rank, 1, first=3)
        after = whole_state(run)
        torch.distributed.barrier()
        for number, kind in enumerate(KINDS):
            engine = two_groups(3, seed=5 + number)
            _, client = engine.load_checkpoint(tmp_path / "out" / kind)
            assert client == {"epoch": 7}
            assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 3, 18)
            assert engine.lr_scheduler.state_dict() == position
            assert_equal(whole_state(engine), whole)
            train(engine, rank, 1, first=3)
            assert_equal(whole_state(engine), after)
        engine = two_groups(1, seed=4)
        engine.load_checkpoint(tmp_path / "out" / "3")
        assert_equal(whole_state(engine), whole)

    run_ranks(2, fn)


@pytest.fixture
def saved():
    model = small(0)
    groups = split(model)
    params = dict(model.named_parameters())
    states = {
        name: {key: torch.rand_like(params[name]) for key in ("exp_avg", "exp_avg_sq")}
        for names in groups
        for name in names
    }
    return Whole(model, groups, states, [{"lr": 0.1}, {"lr": 0.2}], 4.0)


@pytest.mark.parametrize(("kind", "ranks"), [("1", 3), ("3", 5), ("3", 1)])
def test_command_imports_what_other_commands_read(kind, ranks, saved, tmp_path) -> None:
    path = write_deepspeed(tmp_path / "ds", saved, kind, ranks=ranks)
    result = CliRunner().invoke(
        make_app("checkpoint"), ["checkpoint", "import", str(path), str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    assert "step 4" in result.output
    contents = read_contents(tmp_path / "out" / "global_step4")
    for name, param in saved.model.named_parameters():
        assert torch.equal(contents.whole(f"model/{name}"), param.detach()), name
    for name, held in saved.states.items():
        for key, value in held.items():
            assert torch.equal(contents.whole(f"optim/{name}/{key}"), value), name
    metadata = torch.distributed.checkpoint.FileSystemReader(contents.path).read_metadata()
    assert "head.weight" in metadata.state_dict_metadata  # the other name of the tied weight
    verified = CliRunner().invoke(
        make_app("checkpoint"), ["checkpoint", "verify", str(tmp_path / "out")]
    )
    assert "ok" in verified.output


class Runs:
    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def damage(path: Path, what: str) -> None:
    optim = path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    model = path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    if what == "cut":
        optim.write_bytes(optim.read_bytes()[:-3000])
    elif what == "gone":
        optim.unlink()
    elif what == "no latest":
        (path.parent / "latest").unlink()
    elif what == "tensor parallel":
        shutil.copy(model, path / "zero_pp_rank_0_mp_rank_01_model_states.pt")
    elif what == "hostile":
        torch.save({"module": Runs(path / "ran")}, model)
    elif what == "short":
        state = torch.load(model, weights_only=True)
        del state["param_shapes"][1]["down.weight"]
        torch.save(state, model)
    else:
        torch.save({"module": {}}, model)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut", "optim_states.pt (is damaged|cannot be read)"),
        ("gone", "was saved by 2 ranks and has the files of 1"),
        ("no latest", "no checkpoint of DeepSpeed's in"),
        ("tensor parallel", "is of tensor, pipeline or expert parallelism"),
        ("hostile", "holds .*system, which is not read because it could run code"),
        ("short", "more than its parameters|are missing"),
        ("foreign", "is no checkpoint of DeepSpeed's ZeRO"),
    ],
)
def test_refuses_in_one_sentence(what, message, saved, tmp_path) -> None:
    path = write_deepspeed(tmp_path / "ds", saved, "3")
    damage(path, what)
    with pytest.raises(CheckpointError, match=message) as caught:
        import_deepspeed(tmp_path / "ds", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not (path / "ran").exists()
