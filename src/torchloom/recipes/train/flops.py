"""Floating-point operations of a step, and the peak rate of a device.

    per token, forward and backward = 6 N + 6 L D T

N counts the parameters that take part in matrix products: all of them less the embedding, which
is a lookup (a tied embedding is the output head too and stays in). The second term is attention:
L layers of width D over T positions, halved because it is causal. Recomputed work does not count.
"""

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


def flops_per_token(*, num_matmul_params: int, num_layers: int, width: int, seq_len: int) -> float:
    """Return the floating-point operations of one token's forward and backward.

    Args:
        num_matmul_params: N above.
        num_layers: L above.
        width: D above, heads times head size.
        seq_len: T above.
    """
    return 6.0 * num_matmul_params + 6.0 * num_layers * width * seq_len


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device, or `None` when it is not known (any processor)."""
    words = device_name.replace("-", " ").split()
    for name, peak in _PEAK_TFLOPS.items():
        if all(word in words for word in name.split()):
            return peak
    return None
