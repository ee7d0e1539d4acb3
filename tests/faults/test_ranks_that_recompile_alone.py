"""Lengths that differ between ranks: each recompiles when it must, and all train alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens
from support.pool import run_ranks
from support.runs import hears, make_engine, micro_step, weights
from torchloom.errors import AgreementError

LENGTHS = {0: (7, 7, 9, 7, 12, 5), 1: (7, 8, 7, 7, 7, 7)}
"""Rank 0 recompiles at steps 2 and 4, rank 1 at step 1."""


def train(rank: int, stage: int, backend: str, lengths, **rest) -> tuple[list[float], dict]:
    engine, model = make_engine(stage, gradient_clipping=1.0, **rest)
    if backend:
        engine.compile(backend=backend)
    losses = []
    for step, length in enumerate(lengths[rank]):
        losses.append(micro_step(engine, tokens(step, rank, length=length)))
    return losses, weights(model)


@pytest.mark.parametrize(
    ("stage", "shared"),
    [
        (1, False),
        (3, False),
        (3, True),
        *(
            pytest.param(stage, shared, marks=pytest.mark.exhaustive)
            for stage, shared in ((0, False), (2, False), (0, True), (1, True), (2, True))
        ),
    ],
)
def test_lengths_differ_between_ranks(stage: int, shared: bool) -> None:
    def fn(rank):
        rest = {"compile": {"symmetric_memory": shared}}
        compiled = train(rank, stage, "aot_eager", LENGTHS, **rest)
        eager = train(rank, stage, "", LENGTHS, **rest)
        return compiled, eager

    for (losses, state), (want_losses, want_state) in run_ranks(2, fn):
        assert losses == pytest.approx(want_losses, abs=1e-5)
        for name, value in want_state.items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_one_rank_alone_recompiles() -> None:
    alone = {0: (7,) * 6, 1: (7, 7, 8, 9, 7, 10)}

    def fn(rank):
        return train(rank, 3, "aot_eager", alone)[0], train(rank, 3, "", alone)[0]

    for losses, want in run_ranks(2, fn):
        assert losses == pytest.approx(want, abs=1e-5)


@pytest.mark.slow
def test_inductor() -> None:
    def fn(rank):
        return train(rank, 3, "inductor", LENGTHS)[0], train(rank, 3, "", LENGTHS)[0]

    for losses, want in run_ranks(2, fn):
        assert losses == pytest.approx(want, abs=1e-5)


def test_one_rank_alone_has_more_sizes_and_modes_than_torchs_limit() -> None:
    def train_with_evaluations(rank, backend):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        torchloom.shard_model(model, stage=3, persistence_threshold=0)
        session = torchloom.compile(model, backend=backend) if backend else None
        losses = []
        for step in (0, 1):
            for more in (0, step, -6 * step):  # a size of 1 is specialized
                batch = torch.ones(7 + more * (rank == 1), 4) / (step + 1)
                for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
                    model.train(mode is not torch.inference_mode)
                    with mode():
                        loss = model(batch).square().mean()
                    losses.append(loss.item())
                loss.backward()
                with torch.no_grad():
                    model.eval()(batch)
        return losses, session and len(session.report.graphs)

    def fn(rank):
        losses, num_graphs = train_with_evaluations(rank, "aot_eager")
        return losses, train_with_evaluations(rank, "")[0], num_graphs

    found = run_ranks(2, fn)
    for losses, want, _ in found:
        assert losses == pytest.approx(want, abs=1e-5)
    assert found[1][2] > 8, "torch's recompile_limit was not reached"


def test_a_rank_that_has_met_too_many_sizes_says_so() -> None:
    def fn(rank):
        heard = hears("torchloom.pipeline.ragged")
        torch._dynamo.config.recompile_limit = 3
        engine, _ = make_engine(3)
        engine.compile(backend="aot_eager", compile_kwargs={"dynamic": False})
        with pytest.raises(AgreementError) as caught:
            for step in range(6):
                loss = engine(tokens(step, rank, length=7 + step * (rank == 0)))
                engine.backward(loss)
                engine.step()
        return heard, str(caught.value), step

    for rank, (heard, sentence, step) in enumerate(run_ranks(2, fn)):
        assert step == 3
        assert [("recompile_limit" in line) for line in heard] == [True] * (rank == 0)
        assert "docs/ragged.md" in sentence
