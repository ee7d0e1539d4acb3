"""Read whole parameters in place, without a copy.

    before   w = replicate(p)     a copy in eager code, so that the operator has no alias
    after    w = p                or a cast, where the compute dtype differs

Changes no values.
"""

from __future__ import annotations

import torch
from torch import fx

from torchloom import ops
from torchloom.graph import PassContext, args_of, call, find, replace, value_of


def elide_copies(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Replace copies of whole parameters by the parameters; return how many."""
    nodes = find(gm.graph, ops.replicate)
    for node in nodes:
        whole, dtype = args_of(node)[:2]
        if value_of(whole).dtype == dtype:
            replace(node, whole)
            continue
        with gm.graph.inserting_before(node):
            cast = call(gm.graph, torch.ops.prims.convert_element_type.default, (whole, dtype))
        replace(node, cast)
    return len(nodes)
