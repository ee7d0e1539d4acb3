"""Rated peaks of devices, by the names that torch gives them."""

from __future__ import annotations

import pytest

from torchloom.costs.hardware import peak_tflops


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
