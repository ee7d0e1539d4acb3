"""Predicted peaks are the allocator's, to the byte: 21 models, 10 plans each, on the boxed route.

Two of the plans each time, all ten under `-m exhaustive`.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch

from support.planned import Captured
from support.zoo import ZOO
from torchloom.graph import Choices, forward_nodes, is_view
from torchloom.memory import WorkspaceTable, measure_peak, micro_step


def plans(joint, seed: int):
    """None (min-cut), keep all, drop all, keep products only, and random ones."""
    names = [node.name for node in forward_nodes(joint.graph) if not is_view(node)]
    products = {n.name for n in forward_nodes(joint.graph) if "mm" in n.name or "conv" in n.name}
    yield Choices(recompute=frozenset())
    yield Choices(recompute=frozenset(names))
    yield Choices(recompute=frozenset(set(names) - products))
    draw = random.Random(seed)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.95):
        yield Choices(recompute=frozenset(n for n in names if draw.random() < share))


# The longest to compile are among those below as well.
@pytest.mark.parametrize("name", sorted(ZOO.keys() - {"llama_deep", "llama_bf16", "llama_tied"}))
def test_the_prediction_is_the_measurement(name: str) -> None:
    check(name, [6])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ZOO)
def test_ten_plans_each(name: str) -> None:
    saved = check(name, range(9))
    assert len(saved) > 1 or name == "checkpointed"  # the plans do differ


def check(name: str, which: Iterable[int]) -> set[int]:
    """Compare plans with what they allocate; return the bytes that each lets cross to backward."""
    torch.manual_seed(7)
    model, batch = ZOO[name]()
    captured = Captured(model, batch)
    workspace = WorkspaceTable()
    first = captured.planned(None)
    saved = set()
    chosen = list(plans(first.joint, seed=len(name)))
    for choices in (None, *(chosen[i] for i in which)):
        planned = captured.planned(choices)
        workspace.probe([*planned.forward.graph.nodes, *planned.backward.graph.nodes])
        predicted = micro_step(planned.forward.graph, planned.backward.graph, probe=workspace)
        captured.drop_gradients()
        measured = measure_peak(planned.step)
        assert predicted.peak_bytes == measured.peak_bytes, (
            choices,
            predicted.peak_bytes,
            measured,
        )
        saved.add(predicted.after_forward_bytes)
    return saved


def test_measuring_says_nothing_on_the_terminal() -> None:
    code = "import torch; from torchloom.memory import measure_peak; measure_peak(lambda: torch.ones(9))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_a_profile_that_a_plan_interrupts_is_told_of(caplog) -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Linear(3, 3)).graph
    left, right = torch.ones(2, 3), torch.ones(3, 2)
    product = graph.call_function(torch.ops.aten.mm.default, (left, right))
    product.meta["val"] = left @ right
    with (
        contextlib.suppress(RuntimeError),
        torch.profiler.profile(acc_events=True),
    ):  # 2.11 raises at its end
        WorkspaceTable().probe([product])
    assert "Begin to profile behind the first step" in caplog.text
    caplog.clear()
    WorkspaceTable().probe([product])
    assert not caplog.text


@pytest.mark.parametrize("level", [None, "3"])
def test_the_level_of_the_profilers_messages_is_put_back(level, monkeypatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("KINETO_LOG_LEVEL", level)
    assert measure_peak(lambda: torch.ones(10).sum()).peak_bytes == 44
    assert os.environ.get("KINETO_LOG_LEVEL") == level
