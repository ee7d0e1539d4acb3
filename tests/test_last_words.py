"""What a rank says when it ends by an error."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchloom
from support.commands import python
from support.ranks import run_ranks
from torchloom import last_words as words
from torchloom.errors import AgreementError, program_error

LIBRARY = f"{torchloom.__path__[0]}/"


def test_an_error_of_ours_is_one_sentence_and_a_line_of_the_program() -> None:
    try:
        raise AgreementError("ranks differ")
    except AgreementError as error:
        text = words.last_words(error, error.__traceback__)
    assert text.startswith("AgreementError: ranks differ\n  at ")
    assert __file__ in text


class Bad(Dataset):
    """Has samples that raise."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError(f"bad sample {index}")


def test_an_error_in_a_loaders_process_names_the_cause_without_frames_of_torch() -> None:
    try:
        list(DataLoader(Bad(), num_workers=1))
    except ValueError as error:
        text = words.last_words(error, error.__traceback__)
        assert "bad sample 0" in words._first_line(error)
    assert "ValueError: bad sample 0" in text
    assert "/torch/" not in text
    assert "in __getitem__" in text


def test_lines_that_are_no_frames_stay() -> None:
    text = f'a\n    indented\n  File "{LIBRARY}x.py", line 3, in f\n    g()\n    ^^^\nb\n'
    assert words._without_libraries(text) == "a\n    indented\nb\n"


DOORS = """
import sys, torch, torchloom
from torchloom.integrations.accelerate import TorchloomAccelerator
model = torch.nn.Linear(2, 2)
for door in (
    lambda: torchloom.initialize(model=model, config={"optimiser": {}}),
    lambda: torchloom.shard_model(model, stage=7),
    lambda: torchloom.compile(model),
    lambda: torchloom.serve.build(model, torchloom.serve.Contract({}), level=9),
    lambda: torchloom.jit(1),
    lambda: TorchloomAccelerator(torchloom={"optimiser": {}}),
):
    try:
        door()
    except torchloom.TorchloomError as error:
        sys.excepthook(type(error), error, error.__traceback__)
model(torch.ones(3))
"""


def test_without_a_launcher_errors_of_ours_alone_are_one_sentence_with_the_users_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DOORS)
    done = python(script)
    assert done.returncode == 1
    told, _, foreign = done.stderr.partition("Traceback (most recent call last)")
    lines = told.splitlines()
    places = [line for line in lines if line.startswith("  at ")]
    assert [line.split()[1] for line in places] == [f"{script}:{n}" for n in range(6, 12)], told
    assert [line.split(":")[0] for line in lines if "Error: " in line] == (
        ["ConfigError", "ShardError", "ShardError", "ServeError", "InspectError", "ConfigError"]
    ), told
    assert "/torch/" in foreign


def test_files_that_a_compiler_wrote_are_not_the_users(tmp_path, monkeypatch) -> None:
    assert not words.is_users("/tmp/torchinductor_me/ab/cab.py")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert not words.is_users(f"{tmp_path}/ab/cab.py")
    assert words.is_users(__file__)


SCRIPT = """
import sys, time, torch, torch.distributed as dist, torchloom
engine, *_ = torchloom.initialize(model=torch.nn.Linear(8, 8), config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}})
if engine.rank == int(sys.argv[1]):
    dist.barrier()
"""


@pytest.mark.parametrize("who", ["0", "1"])
def test_a_collective_of_the_program_that_loses_its_peer_is_explained(tmp_path, who) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    head = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = python(*head, script, who)
    assert done.returncode == 1
    other = 1 - int(who)
    assert f"[rank {who}] PeerLostError: rank {other} has ended its program" in done.stderr
    assert f"torch.distributed.barrier ({script}:6)" in done.stderr
    _, _, summary = done.stderr.partition("Root Cause")
    assert f"PeerLostError: rank {other} has ended its program" in summary


def test_an_error_of_another_kind_in_a_collective_stays_as_it_is() -> None:
    def fn(rank):
        try:
            torch.distributed.all_reduce(torch.ones(2).to_sparse_csr())
        except Exception as error:  # noqa: BLE001  whatever it is
            return words._broken_call(error, error.__traceback__)
        return "none"

    assert run_ranks(2, fn) in (["", ""], ["none", "none"])


def test_an_error_while_dynamo_traces_is_told_as_the_programs_own() -> None:
    linear = torch.nn.Linear(16, 16)
    try:
        torch.compile(linear, backend="eager", dynamic=False)(torch.randn(2, 5))
    except RuntimeError as error:
        assert type(error).__module__ == "torch._dynamo.exc"
        assert "[2, 5] X [16, 16]" in str(program_error(error))
    else:
        raise AssertionError
