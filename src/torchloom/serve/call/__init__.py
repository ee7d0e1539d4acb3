"""What runs when a program is called.

    program              what `build` and `load` return: one `variant` for each box of sizes
    entry                the generated function that each call goes through: `entry_signature`, the comparisons
                         (`entry_conditions`, `arguments`, `tied_names`, `layouts`) with `entry_names`
    weight_checks        one comparison of all weights before a graph runs
    assemble             the pieces of a graph as one function: `stitching`, recorded as `cuda_graphs` where asked for;
                         around it `padded` for buckets
    refusals             why a call is outside of the contract

Beside calls: `warm_up` records CUDA graphs before the first one, `peak_memory` measures the largest, `eager` lets
models run as they are.
"""

from __future__ import annotations
