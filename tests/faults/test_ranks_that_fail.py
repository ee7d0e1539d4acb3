"""A rank that fails takes the run down within seconds, with words and a non-zero exit."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time

import pytest

from support.ranks import run_ranks
from support.runs import make_engine, train
from torchloom import envs
from torchloom.errors import AgreementError
from torchloom.runtime.exchanges import new_agreement

SCRIPT = """
import os, signal, sys, torch, torchloom
rank = int(os.environ["RANK"])
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10}}
if sys.argv[1] == "typo":
    config["zero_optimization"]["stage"] = 7
engine, *_ = torchloom.initialize(model=model, config=config)
for step in range(100):
    if sys.argv[1] == "killed" and step == 2 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.backward(engine(torch.ones(2, 64)).mean())
    engine.step()
"""


@pytest.mark.parametrize(("fault", "words"), [("typo", "stage"), ("killed", "")])
def test_the_launcher_exits_non_zero(fault: str, words: str, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, str(script), fault],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=envs.child_environment({"OMP_NUM_THREADS": "1"}),
    )
    assert done.returncode != 0
    assert words in done.stderr


def test_agreement_names_the_rank_that_never_came() -> None:
    def fn(rank):
        agreement = new_agreement(rank, 2, timeout_s=1.0)
        if rank == 1:
            return ""
        try:
            agreement.check("the plan", "a")
        except AgreementError as error:
            return str(error)
        return "none"

    assert "ranks [1] did not reach 'the plan'" in run_ranks(2, fn)[0]


def test_a_forked_child_that_ends_is_not_taken_for_its_rank() -> None:
    def fn(rank):
        engine, _ = make_engine()
        train(engine, rank, 1)
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()  # what the end of an interpreter would do
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)
        if rank == 0:
            time.sleep(2.5)  # the other one waits, and is judged
        return len(train(engine, rank, 2, first=1))

    assert run_ranks(2, fn) == [2, 2]
