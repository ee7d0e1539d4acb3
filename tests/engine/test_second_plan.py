"""Planning again by measured times never costs a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch.utils.checkpoint import checkpoint

from support.ranks import run_ranks
from support.runs import ADAMW, hears, micro_step, sharded
from torchloom import events
from torchloom.engine import Engine
from torchloom.errors import PassError
from torchloom.events import PlanReviewed
from torchloom.pipeline.weaving import Weaving
from torchloom.plan import Planner
from torchloom.step import CompiledStep


class Checkpointed(nn.Module):
    """Blocks with dropout that the user computes again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(layer(x).relu(), 0.1, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False)
        return x.square().mean()


class Broken(Checkpointed):
    """The same without dropout, captured as two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).relu()
        torch._dynamo.graph_break()
        return self.layers[2](self.layers[1](x).relu()).square().mean()


def start(model: nn.Module, replan_step: int, **options: Any) -> Engine:
    torch._dynamo.reset()
    compiling = {
        "backend": "aot_eager",
        "memory_budget": "1GB",
        "replan_step": replan_step,
        "strict": True,
        **options,
    }
    engine = sharded(model, batch=4, optimizer=ADAMW, compile=compiling)
    engine.compile()
    return engine


def train(engine: Engine, rank: int, steps: int = 4, batch: int = 4) -> list[float]:
    found = []
    for number in range(steps):
        torch.manual_seed(100 * number + rank)
        found.append(micro_step(engine, torch.randn(batch, 64)))
    return found


def losses(rank: int, replan_step: int) -> list[float]:
    torch.manual_seed(0)
    return train(start(Checkpointed(), replan_step), rank)


def test_recorders_hear_that_the_plan_was_reviewed() -> None:
    def fn(rank):
        with events.Recorder() as heard:
            losses(rank, 2)
        return [(e.step, e.duration_s > 0) for e in heard.events if isinstance(e, PlanReviewed)]

    assert run_ranks(2, fn) == [[(2, True)]] * 2


@pytest.mark.parametrize("what", ["measure", "would_change"])
def test_a_second_plan_that_fails_on_one_rank_leaves_the_first(what: str) -> None:
    def fn(rank):
        heard = hears("torchloom.step.planner")
        once = losses(rank, 0)
        if rank == 1:

            def fails(self):
                raise RuntimeError("no figures today")

            setattr(Planner, what, fails)
        return once, losses(rank, 2), heard

    for rank, (once, twice, heard) in enumerate(run_ranks(2, fn)):
        assert twice == pytest.approx(once, rel=1e-5)
        assert any("no figures today" in line for line in heard) is (rank == 1)


def breaks(
    rank: int, ranks: tuple[int, ...], graph: int, times: int, kind: type[Exception] = RuntimeError
) -> None:
    """Let the compile of a graph fail in the second round, on some ranks, so many times."""
    compile_graph, left, seen = Weaving._lower, [times], list[int]()

    def fails(self: Weaving, gm: Any, *rest: Any) -> Any:
        if self.setup.round == 3:
            if len(seen) < graph:
                seen.append(1)
            elif rank in ranks and left[0]:
                left[0] -= 1
                raise kind("no code today\nfor a long reason")
        return compile_graph(self, gm, *rest)

    Weaving._lower = fails  # type: ignore[method-assign]
    Planner.would_change = lambda self: True  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("ranks", "graph", "times", "options"),
    [
        ((1,), 0, 1, {}),
        ((0, 1), 1, 1, {}),
        ((1,), 1, 9, {}),  # the first plan's figures do not help either
        ((0, 1), 0, 9, {}),
        ((1,), 1, 1, {"backend": "inductor"}),
        ((1,), 1, 1, {"strict": False}),
        ((1,), 0, 1, {"kwargs": {"dynamic": False}}),  # of the rank with the larger batch
    ],
)
def test_a_second_plan_that_does_not_compile_leaves_the_first(
    ranks: tuple[int, ...], graph: int, times: int, options: dict[str, Any]
) -> None:
    def fn(rank):
        rows = 4 + 4 * rank * ("kwargs" in options)
        torch.manual_seed(0)
        once = train(start(Broken(), 0, **options), rank, 1, rows)
        heard = hears("torchloom.pipeline.ragged")
        torch.manual_seed(0)
        engine = start(Broken(), 2, **options)
        first = train(engine, rank, 1, rows)
        plan = engine.plan()
        breaks(rank, ranks, graph, times, PassError if "strict" in options else RuntimeError)
        train(engine, rank, 4, rows)
        num_graphs = len(engine.compile_report().graphs)
        train(engine, rank, 3, rows)
        same_graphs = num_graphs == len(engine.compile_report().graphs)
        return once == first, heard, plan == engine.plan(), same_graphs

    for is_same, heard, is_first, stays in run_ranks(2, fn, timeout_s=400):
        assert is_same
        assert len(heard) == 1
        assert f"rank {ranks[0]}" in heard[0]
        assert "no code today" in heard[0]
        assert "long reason" not in heard[0]
        assert is_first
        assert stays


def test_a_second_plan_that_compiles_is_kept() -> None:
    def fn(rank):
        Planner.would_change = lambda self: True  # type: ignore[method-assign]
        torch.manual_seed(0)
        engine = start(Broken(), 2)
        train(engine, rank, 5)
        compiled: CompiledStep = engine._compiled  # type: ignore[assignment]
        return len(engine.compile_report().graphs), compiled.session.trial is None

    assert run_ranks(2, fn) == [(4, True)] * 2


def test_a_graph_that_torch_captures_again_is_compared_all_the_same() -> None:
    def fn(rank):
        compile_graph, calls = Weaving._lower, list[int]()

        def restarts(self: Weaving, gm: Any, *rest: Any) -> Any:
            if self.setup.round == 3:
                calls.append(1)
                if len(calls) == 1:
                    raise TensorifyScalarRestartAnalysis(restart_reason="for the test")
                if len(calls) == 2 and rank == 1:
                    raise RuntimeError("no code today")
            return compile_graph(self, gm, *rest)

        Weaving._lower = restarts  # type: ignore[method-assign]
        Planner.would_change = lambda self: True  # type: ignore[method-assign]
        heard = hears("torchloom.pipeline.ragged")
        torch.manual_seed(0)
        engine = start(Broken(), 2)
        return len(train(engine, rank, 5)), heard

    for steps, heard in run_ranks(2, fn):
        assert steps == 5
        assert len(heard) == 1
        assert "rank 1" in heard[0]
