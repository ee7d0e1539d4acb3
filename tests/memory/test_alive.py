"""What is alive at a peak adds up to the peak, and is told by kind and layer."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from support.graphs import TwoLayers, apply, captured
from support.planned import Captured
from support.zoo import ZOO
from torchloom.files import from_plain
from torchloom.graph import Choices, forward_nodes, is_view
from torchloom.memory import PeakContents, Transit, WorkspaceTable, alive_at_peak, micro_step


@pytest.mark.parametrize("name", ["llama", "checkpointed", "in_place"])
@pytest.mark.parametrize("drops", [False, True])
def test_groups_add_up_to_the_peak(name: str, drops: bool) -> None:
    torch.manual_seed(7)
    model, batch = ZOO[name]()
    case = Captured(model, batch)
    planned = case.planned(None)
    if drops:
        names = [n.name for n in forward_nodes(planned.joint.graph) if not is_view(n)]
        planned = case.planned(Choices(recompute=frozenset(names)))
    graphs = planned.forward.graph, planned.backward.graph
    workspace = WorkspaceTable()
    workspace.probe([*graphs[0].nodes, *graphs[1].nodes])
    step = micro_step(*graphs, probe=workspace, keeps_lives=True)
    found = alive_at_peak(*graphs, step, {})
    assert found.peak_bytes == step.peak_bytes > 0
    assert sum(group.num_bytes for group in found.groups) == found.peak_bytes
    assert {group.kind for group in found.groups} <= {
        "activations", "gradients", "workspace", "gathered weights",
    }  # fmt: skip
    assert from_plain(PeakContents, json.loads(json.dumps(asdict(found)))) == found


def test_gathered_weights_and_transfers_are_told_by_their_parameters() -> None:
    found = captured(TwoLayers(), [torch.ones(4, 6)], ["zero3"])
    for half in ("forward", "backward"):
        apply(found[half], ["place", "bucket"])
    graphs = found["forward"].graph, found["backward"].graph
    transit = Transit(
        started_bytes=lambda target, args: 1000, regathered_bytes=lambda uses: [0 for _ in uses]
    )
    step = micro_step(*graphs, transit=transit, keeps_lives=True)
    contents = alive_at_peak(*graphs, step, {})
    assert contents.peak_bytes == step.peak_bytes
    by_kind = {group.kind: group for group in contents.groups}
    assert by_kind["communication"].num_bytes == 1000
    weights = {g.layer for g in contents.groups if g.kind == "gathered weights"}
    gradients = {g.layer for g in contents.groups if g.kind == "gradients"}
    assert weights | gradients >= {"first"}
    assert weights | gradients <= {"first", "second", ""}
