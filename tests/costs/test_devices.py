"""Devices: without room to measure on, unknown, and their rated peaks by the names that torch gives them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchloom.costs import measure
from torchloom.costs.hardware import DEVICES, peak_tflops, row_for_cuda_name


def test_an_operator_whose_operands_do_not_fit_is_modelled(monkeypatch) -> None:
    graph = make_fx(torch.mm, tracing_mode="fake")(torch.randn(4, 4), torch.randn(4, 4)).graph
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert measure.measure_node(product, budget_s=0.001) is not None

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "_random", out_of_memory)
    assert measure.measure_node(product) is None


def test_an_unknown_device_is_told_once(caplog) -> None:
    row_for_cuda_name.cache_clear()
    assert [row_for_cuda_name("NVIDIA GeForce GT 710")] * 2 == [DEVICES["a100-80gb"]] * 2
    row_for_cuda_name("NVIDIA GeForce GT 710")
    (told,) = caplog.messages
    assert "GT 710 is not a known device" in told and "torchloom calibrate" in told
    assert row_for_cuda_name("NVIDIA H200").name == "h200-141gb"
    assert row_for_cuda_name("NVIDIA A100-SXM4-80GB").name == "a100-80gb"
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("CPU", None),
        ("NVIDIA GeForce GT 710", None),
    ],
)
def test_peaks_are_known_or_none(name, peak):
    assert peak_tflops(name) == peak
