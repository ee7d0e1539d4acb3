"""Matrix products run on the implementation that measured fastest.

    before   y = mm(a, b)
    after    y = matmul(a, b, None, 'onednn')      where the context says so

The choice is the context's: products that it does not name stay with torch's own. Needs nothing.
Changes the order of sums inside a product, so results differ in the last bits: see docs/costs.md
for the bound.
"""

from __future__ import annotations

from torch import fx

from torchloom import ops
from torchloom.graph import PassContext, call, replace, value_of
from torchloom.ops.compute import operands_of, product_of


def choose_kernels(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Hand products to the implementations that the context names; return how many."""
    chosen = dict(ctx.kernels)
    num_replaced = 0
    for node in list(gm.graph.nodes):
        product = product_of(node)
        kernel = None if product is None else chosen.get(product.key)
        value = value_of(node)
        if kernel is None or value is None or not value.is_contiguous():
            continue
        operands = operands_of(node)
        assert operands is not None, "it is a product"
        with gm.graph.inserting_before(node):
            new = call(gm.graph, ops.matmul, (*operands, kernel), name=node.name)
        replace(node, new)
        num_replaced += 1
    return num_replaced
