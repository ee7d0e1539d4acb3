"""What a rank says when it ends by an error."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchloom
from support.ranks import run_ranks
from torchloom import envs
from torchloom.errors import AgreementError
from torchloom.runtime.lines import last_words as words

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
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*head, str(script), who],
        capture_output=True, text=True, timeout=120, check=False,
        env=envs.child_environment({"OMP_NUM_THREADS": "1"}),
    )  # fmt: skip
    assert done.returncode == 1
    other = 1 - int(who)
    assert f"[rank {who}] PeerLostError: rank {other} has ended its program" in done.stderr
    assert f"torch.distributed.barrier ({script}:6)" in done.stderr


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
        torch.compile(linear, backend="eager")(torch.randn(2, 5))
    except RuntimeError as error:
        assert type(error).__module__ == words._DYNAMO
        assert "[2, 5] X [16, 16]" in str(words._first(error))
    else:
        raise AssertionError
