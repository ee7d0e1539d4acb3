"""What carries collectives: one class and one row in `table` for each transport.

    gloo      direct messages between all pairs of ranks
    c10d      the tensor collectives of any other backend of torch.distributed (NCCL)
    shm       memory that the ranks of one host share

`summing` is what those do alike that sum by themselves.
"""

from __future__ import annotations
