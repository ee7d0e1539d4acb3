"""torchloom, stages 1 to 3, through its public API."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arms.base import LEARNING_RATE, WEIGHT_DECAY, Job, Trainee, UnavailableError, join_group

if TYPE_CHECKING:
    from torchloom.engine import Engine
    from torchloom.plan import Plan


def build(
    job: Job,
    *,
    stage: int,
    watched: bool = False,
    symmetric_memory: bool = False,
    backend: str = "inductor",
    regions: bool = True,
    persistence_threshold: int | None = None,
    memory_budget: int | None = None,
    replan_step: int = 0,
) -> Trainee:
    """Build one rank of the torchloom engine; compiled as `engine.compile()` does by default.

    With `watched` all that it does is recorded, from its compile to its last step. With
    `symmetric_memory` the ranks communicate through shared memory. Without `regions` layers are compiled one by one; weights
    of up to `persistence_threshold` elements stay whole. `memory_budget` is in bytes, everything of a rank included;
    what was planned for it is in the facts. With `replan_step` operators are measured at that step
    and the table of costs is kept where later processes find it.

    Raises:
        UnavailableError: torchloom cannot be imported, or has no `initialize` yet.
    """
    try:
        from torchloom import initialize
    except ImportError as error:
        raise UnavailableError(f"torchloom is not importable ({error})") from error
    join_group()
    if watched:
        from torchloom import watch

        watch().__enter__()
    compiling: dict[str, Any] = {
        "symmetric_memory": symmetric_memory,
        "backend": backend,
        "regions": regions,
    }
    if memory_budget is not None:
        compiling |= {"memory_budget": memory_budget, "replan_step": replan_step}
    engine, *_ = initialize(
        model=job.model(), config=_config(job, stage, compiling, persistence_threshold)
    )
    micro_s: float | None = None
    num_collectives = 0

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal micro_s, num_collectives
        before, losses, micro_s = engine.comm_stats().num_collectives, [], 0.0
        for micro in job.micro_batches(tokens, targets):
            started = time.perf_counter()
            loss = engine(*micro)
            engine.backward(loss)
            micro_s += time.perf_counter() - started
            engine.step()
            losses.append(loss.detach())
        num_collectives = engine.comm_stats().num_collectives - before
        return torch.stack(losses).mean()

    return Trainee(
        step=step,
        compile=engine.compile,
        facts=lambda: {
            "num_gathers": num_collectives - job.accumulation * _reductions(engine),
            **({} if memory_budget is None else _planned(engine.plan())),
        },
        micro_s=lambda: micro_s,
    )


def _reductions(engine: Engine) -> int:
    """Return how many collectives of a micro-step reduce gradients."""
    graphs = engine.compile_report().graphs
    return sum(n for g in graphs for op, n in g.collectives.items() if "reduce_start" in op)


def _planned(plan: Plan) -> dict[str, Any]:
    """Return the figures of a plan; the decisions behind them are too many for a record."""
    return {
        "budget_bytes": plan.budget_bytes,
        "base_bytes": plan.base_bytes,
        "peak_bytes": plan.peak_bytes,
        "num_graphs": len(plan.graphs),
        "min_peak_bytes": plan.base_bytes + max((g.min_peak_bytes for g in plan.graphs), default=0),
        "resident_bytes": max((g.resident_bytes for g in plan.graphs), default=0),
        "saved_bytes": max((g.saved_bytes for g in plan.graphs), default=0),
        "num_recomputed": sum(len(g.recompute) for g in plan.graphs),
        "compute_s": 1e-6 * sum(g.compute_us for g in plan.graphs),
        "micro_s": 1e-6 * sum(g.step_us for g in plan.graphs),
        "gap": max((g.gap for g in plan.graphs), default=0.0),
        "measured": sum(g.measured_us for g in plan.graphs)
        / max(1e-9, sum(g.compute_us for g in plan.graphs)),
    }


def _config(
    job: Job, stage: int, compiling: dict[str, Any], persistence_threshold: int | None
) -> dict[str, object]:
    zero: dict[str, Any] = {"stage": stage}
    if persistence_threshold is not None:
        zero["stage3_param_persistence_threshold"] = persistence_threshold
    optimizer = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": zero,
        "compile": compiling,
    }
