"""Weights to safetensors from sharded models: whole, tied once, one at a time, all ranks or none."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import torchloom
from support.checkpoints import read_export
from support.models import tokens, tricky
from support.pool import run_ranks
from torchloom import ops
from torchloom.errors import CheckpointError, ConfigError
from torchloom.shard import full_state_dict


@pytest.mark.parametrize(
    ("stage", "ranks", "size"), [(3, 2, 1500), (2, 3, "1.2KB"), (3, 2, "5GB"), (0, 2, 900)]
)
def test_the_files_hold_the_whole_model(tmp_path, stage, ranks, size) -> None:
    (tmp_path / "config.json").write_text("{}")

    def fn(rank: int):
        model = torchloom.shard_model(tricky(), stage=stage, persistence_threshold=20)
        model.again = model.up
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens(0, rank)).backward()
        optimizer.step()
        paths = torchloom.save_model(model, tmp_path, max_shard_size=size)
        paths = torchloom.save_model(model, tmp_path, max_shard_size=size)  # in place of the first
        return paths, full_state_dict(model)

    (paths, whole), *others = run_ranks(ranks, fn)
    assert all(each[0] == paths for each in others)
    assert {Path(path).name for path in paths} | {"config.json"} == {
        p.name for p in tmp_path.iterdir()
    }
    stored = read_export(tmp_path)
    tied = {"head.weight", "again.weight", "again.bias"}
    assert stored.keys() == whole.keys() - tied
    for name, value in stored.items():
        assert torch.equal(value, whole[name]), name
    if isinstance(size, int):
        sizes = [Path(path).stat().st_size for path in paths[:-1]]
        assert len(sizes) > 2
        assert max(sizes) < size + 2000  # headers
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_dtypes_and_kinds_of_values(tmp_path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.wide = nn.Linear(9, 7).double()
            self.low = nn.Parameter(torch.randn(40).bfloat16())
            self.register_buffer("count", torch.arange(5))
            self.register_buffer("scalar", torch.tensor(2.5))
            self.register_buffer("view", torch.randn(4, 6).T)
            self.register_buffer("not_kept", torch.ones(3), persistent=False)

        def get_extra_state(self) -> dict[str, int]:
            return {"mine": 1}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    def fn(rank: int):
        precision = torchloom.shard.Precision(master=None)
        model = torchloom.shard_model(Mixed(), persistence_threshold=8, precision=precision)
        torchloom.save_model(model, tmp_path / "kept")
        torchloom.save_model(model, tmp_path / "fp16", dtype=torch.float16)
        return full_state_dict(model)

    whole = run_ranks(2, fn)[0]
    whole.pop("_extra_state")
    kept, half = read_export(tmp_path / "kept"), read_export(tmp_path / "fp16")
    assert kept.keys() == half.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(kept[name], value)
        assert kept[name].dtype == value.dtype
        assert torch.equal(half[name], value.half() if value.is_floating_point() else value)


def test_no_rank_holds_more_than_one_whole_weight(tmp_path) -> None:
    def fn(rank: int) -> int:
        model = torchloom.shard_model(
            nn.Sequential(*(nn.Linear(31, 31) for _ in range(9))), persistence_threshold=20
        )
        alive: list[weakref.ref] = []
        most, gather = 0, ops.gather

        def watched(*args):
            nonlocal most
            most = max(most, sum(ref() is not None for ref in alive))
            found = gather(*args)
            alive.append(weakref.ref(found))
            return found

        ops.gather = watched
        try:
            torchloom.save_model(model, tmp_path)
        finally:
            ops.gather = gather
        assert len(alive) >= 9
        return most

    assert max(run_ranks(2, fn)) <= 1


@pytest.mark.parametrize("is_first", [True, False])
def test_all_ranks_raise_and_none_waits(tmp_path, is_first) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "x" if is_first else tmp_path / "full"

    def fn(rank: int) -> str:
        model = torchloom.shard_model(tricky(), persistence_threshold=20)
        if not is_first and rank == 0:
            from torchloom.checkpoints import save_model as module

            real, count = module._write, []

            def full(*args):
                count.append(1)
                if len(count) == 2:
                    raise OSError(28, "No space left on device", str(folder))
                return real(*args)

            module._write = full
        with pytest.raises(CheckpointError) as caught:
            torchloom.save_model(model, folder, max_shard_size=900)
        model(tokens(0, rank)).backward()  # all goes on
        return str(caught.value)

    first, second = run_ranks(2, fn)
    assert first == second
    assert "the weights cannot be written to" in first
    assert ("Not a directory" if is_first else "No space left on device") in first
    assert not is_first or not folder.exists()
    assert is_first or list(folder.iterdir()) == []


def test_ranks_that_ask_for_different_exports_are_told(tmp_path) -> None:
    def fn(rank: int) -> str:
        model = torchloom.shard_model(tricky(), persistence_threshold=20)
        with pytest.raises(ConfigError, match="max_shard_size='5 apples' is no number of bytes"):
            torchloom.save_model(model, tmp_path, max_shard_size="5 apples")
        with pytest.raises(CheckpointError) as caught:
            torchloom.save_model(model, tmp_path / str(rank))
        with pytest.raises(CheckpointError, match=r"asked for different ones .*bfloat16"):
            torchloom.save_model(model, tmp_path, dtype=[None, torch.bfloat16][rank])
        return str(caught.value)

    for text in run_ranks(2, fn):
        assert "the ranks were asked for different ones (rank 0: path=" in text


def test_transformers_reads_an_export(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=37, tie_word_embeddings=True,
    )  # fmt: skip

    def fn(rank: int):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        torchloom.shard_model(model, persistence_threshold=20)
        torchloom.save_model(model, tmp_path, max_shard_size="4KB")
        if rank == 0:
            config.save_pretrained(tmp_path)
        ids = torch.arange(12).view(2, 6)
        return model(ids, labels=ids).loss.item()

    loss, _ = run_ranks(2, fn)
    model, facts = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    ids = torch.arange(12).view(2, 6)
    assert model(ids, labels=ids).loss.item() == loss
