"""Optimizer states live in host memory and stream through the optimizer step.

    before   step(all parameters)
    after    load states 0, load states 1, step 0, store 0, load states 2, step 1, ...

The step is no part of a captured graph: where this pass is among those that run, the engine streams
the states (`torchloom.engine.stream`), and the graphs stay as they are. So a schedule can begin or
end it at a step. Needs nothing. Changes no values.
"""

from __future__ import annotations

from torch import fx

from torchloom.graph import PassContext


def offload_opt_states(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Leave the graph as it is."""
    return 0
