"""Rated peaks of matrix products: what model FLOP utilization (MFU) is a part of."""

from __future__ import annotations

_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A10G": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "MI300X": 1307.0,
}
"""Dense bf16 peak per device in TFLOP/s, from the vendors' data sheets; the first match counts."""


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s, or None where it is not known (any processor).

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("CPU")
        (989.0, None)
    """
    words = device_name.replace("-", " ").split()
    for name, peak in _PEAK_TFLOPS.items():
        if all(word in words for word in name.split()):
            return peak
    return None
