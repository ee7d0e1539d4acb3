"""Floating-point operations of a step.

    per token, forward and backward = 6 N + 6 L D T

N counts the parameters that take part in matrix products: all of them less the embedding, which
is a lookup (a tied embedding is the output head too and stays in). The second term is attention:
L layers of width D over T positions, halved because it is causal. Recomputed work does not count.
"""

from __future__ import annotations


def flops_per_token(*, num_matmul_params: int, num_layers: int, width: int, seq_len: int) -> float:
    """Return the floating-point operations of one token's forward and backward.

    Args:
        num_matmul_params: N above.
        num_layers: L above.
        width: D above, heads times head size.
        seq_len: T above.
    """
    return 6.0 * num_matmul_params + 6.0 * num_layers * width * seq_len
