"""Losses that compute a few rows of logits at a time train to the weights of those that make all logits."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.memory import measure
from support.pool import run_ranks
from support.runs import SGD, sharded
from support.zoo import Attention, Block, Norm, SwiGlu
from torchloom.pipeline import PRESETS

CLASSES, WIDTH, LENGTH = 523, 24, 45


class Causal(nn.Module):
    """A causal model as transformers has them: it returns logits beside the loss."""

    def __init__(self, *, tied: bool, classes: int = CLASSES, returns: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, WIDTH)
        self.block = Block(WIDTH, Attention(WIDTH, 4, 2), SwiGlu(WIDTH, 40), Norm)
        self.head = nn.Linear(WIDTH, classes, bias=False)
        self.returns = returns
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.block(self.embed(ids)))
        labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels)
        return (loss, logits) if self.returns else loss


class Run:
    """What a run came to."""

    def __init__(self, engine: Any, losses: list[float], logits: list[float]) -> None:
        report = engine.compile_report()
        self.losses, self.logits = losses, logits
        self.weights = torch.cat([w.flatten() for w in engine.module.state_dict().values()])
        self.notes = [note for g in report.graphs for p in g.passes for note in p.notes]
        self.fallbacks = report.fallbacks
        self.gathers = sum(
            count for g in report.graphs for op, count in g.collectives.items() if "gather" in op
        )


def train(rank: int, stage: int, backend: str, *, tied: bool, chunks: bool, dtype: str) -> Run:
    torch._dynamo.reset()
    torch.manual_seed(0)
    engine = sharded(
        Causal(tied=tied),
        stage,
        batch=2,
        optimizer=SGD,
        gradient_accumulation_steps=2,
        compile={"strict": True},
        **({dtype: {"enabled": True}} if dtype else {}),
    )
    first, *rest = PRESETS[stage]
    rows = [(first, {"chunk_bytes": 20 * CLASSES * 4})] if chunks else []
    engine.compile(backend=backend, passes=[*rows, *rest])
    losses, read = [], []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        loss, logits = engine(torch.randint(0, CLASSES, (2, LENGTH)))
        if step == 2:  # all ranks read, as each gathers its part of the head
            read = logits[0, 3].float().tolist()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return Run(engine, losses, read)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_those_of_all_logits(stage: int) -> None:
    cases = [("aot_eager", True, ""), ("aot_eager", False, "bf16"), ("aot_eager", False, "fp16")]
    cases += [("inductor", False, "")] if stage == 3 else []

    def run(rank: int) -> list[tuple[Run, ...]]:
        return [
            tuple(train(rank, stage, b, tied=t, chunks=c, dtype=d) for c in (False, True))
            for b, t, d in cases
        ]

    for rank in run_ranks(2, run, timeout_s=500):
        for (_, _, dtype), (whole, chunked) in zip(cases, rank, strict=True):
            assert whole.notes == [] and whole.fallbacks == chunked.fallbacks == []
            assert len(chunked.notes) == 1 and "in parts" in chunked.notes[0]
            close = {"rtol": 2e-2, "atol": 2e-3} if dtype else {"rtol": 2e-6, "atol": 2e-7}
            torch.testing.assert_close(chunked.weights, whole.weights, **close)
            torch.testing.assert_close(chunked.losses, whole.losses, **close)
            torch.testing.assert_close(chunked.logits, whole.logits, rtol=5e-2, atol=5e-3)
            # Backward does not read the head again.
            assert chunked.gathers <= whole.gathers


def planned(rank: int, budget: int, chunks: bool = True) -> tuple[int, int, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    chunking = "auto" if chunks else "never"
    compiling = {"strict": True, "memory_budget": budget, "chunk_loss": chunking}
    model = Causal(tied=False, classes=9000, returns=False)
    engine = sharded(model, 0, optimizer=SGD, backend="aot_eager", compile=compiling)
    ids = torch.randint(0, 9000, (2, LENGTH))

    def micro() -> None:
        engine.backward(engine(ids))

    for _ in range(2):
        micro()
        engine.step()
    plan = engine.plan()
    (graph,) = plan.graphs
    return measure(micro).peak, plan.peak_bytes - graph.peak_bytes, graph


def test_a_plan_computes_fewer_rows_at_a_time_where_memory_is_short() -> None:
    def run(rank: int) -> list[Any]:
        free = planned(rank, 10**12)
        whole = planned(rank, 10**12, chunks=False)
        small = import_module("torchloom.passes.chunk_loss")
        with mock.patch.object(small, "_LEAST_BYTES", 0):
            tight = planned(rank, free[1] + int(0.7 * free[2].peak_bytes))
        return [free, whole, tight]

    free, whole, tight = run_ranks(2, run, timeout_s=300)[0]
    assert free[2].loss_rows == whole[2].loss_rows == () and free == whole  # logits fit
    assert tight[2].loss_rows == (LENGTH,) and tight[2].extra_us < 0.01 * tight[2].compute_us
    for measured, _, plan in (free, whole, tight):
        assert abs(measured - plan.peak_bytes) <= 0.01 * plan.peak_bytes
