"""Measuring what operators allocate for themselves leaves the device as it was, and survives a full one."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.gpu import on_gpu_too
from torchloom.memory import workspace
from torchloom.memory.workspace import Call, WorkspaceTable

mm = torch.ops.aten.mm.default
aten = torch.ops.aten


def test_an_operator_whose_operands_do_not_fit_counts_as_none(monkeypatch) -> None:
    table = WorkspaceTable()
    fits, large = (Call(mm, (torch.randn(n, n), torch.randn(n, n)), {}) for n in (7, 33))
    real_like = workspace.real_like

    def out_of_memory(value):
        if isinstance(value, torch.Tensor) and len(value) == 33:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real_like(value)

    monkeypatch.setattr(workspace, "real_like", out_of_memory)
    assert table.probe_calls([large, fits])
    sizes = [found.result_bytes for found in table.known.values()]
    assert sorted(sizes) == [(), (7 * 7 * 4,)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_generators_of_the_devices_that_compute_are_left(device: str) -> None:
    with FakeTensorMode():
        operand = torch.empty(3, 3, device=device)
    call = Call(mm, (operand,), {"mat2": operand})
    drawn = Call(torch.ops.aten.rand.default, ([3],), {"device": torch.device(device)})
    for calls in ([call, call], [drawn]):  # what draws has no operand on the device
        found = [each.type for each in workspace._cuda_devices(calls)]
        assert found == (["cuda"] if device == "cuda" else [])


@on_gpu_too
def test_measuring_calls_that_draw_leaves_all_generators(device: str) -> None:
    with FakeTensorMode():
        operand = torch.empty(64, 3, device=device)
    calls = [
        Call(aten.rand.default, ([3, 5],), {"device": torch.device(device)}),
        Call(aten.native_dropout.default, (operand, 0.5, True), {}),
    ]
    modules = [torch, torch.cuda] if device == "cuda" else [torch]
    before = [each.get_rng_state() for each in modules]
    table = WorkspaceTable()
    assert table.probe_calls(calls) == 2
    assert all(each.result_bytes for each in table.known.values())
    for module, state in zip(modules, before, strict=True):
        assert torch.equal(module.get_rng_state(), state)
