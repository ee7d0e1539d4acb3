"""What runs when a program is called.

    program              what `build` and `load` return: one `variant` for each box of sizes
    entry                the generated function that each call goes through: `entry_signature`, then the comparisons
                         of `conditions`, each with the sentence that refuses a call
    live_model           whether the model is still what was compiled; `weight_checks` compares all weights
    stitching            the pieces of a graph as one function, recorded by `cuda_graphs` where asked for;
                         around it `padded` for buckets

Beside calls: `warm_up` records CUDA graphs before the first one and measures the largest, `eager` lets models run as they
are.
"""

from __future__ import annotations
