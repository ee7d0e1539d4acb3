"""`torchloom train`: its workers, its launcher, signals."""

from __future__ import annotations

from faults.matrix.case import Case, Ends, killed

CASES = [
    Case(name="train.worker killed", program="train", launcher="train", action="kill worker",
         ends=(Ends(codes=(1,), words=("rank 1 was killed by SIGKILL",), anywhere=True, speaks=False),)),
    Case(name="train.launcher killed", program="train", launcher="train", action="kill launcher",
         ends=(killed(9),)),
    Case(name="train.SIGTERM saves", program="train", launcher="train", action="terminate",
         ends=(Ends(codes=(0,), words=("checkpoints",), anywhere=True, speaks=False),)),
    Case(name="train.Ctrl-C saves", program="train", launcher="train", action="interrupt",
         ends=(Ends(codes=(0,), words=("checkpoints",), anywhere=True, speaks=False),)),
]  # fmt: skip
