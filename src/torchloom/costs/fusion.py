"""What fused code reads and writes: a chain of elementwise operators moves its first inputs and last outputs alone.

Inductor makes one kernel of pointwise operators and of reductions over the last dimension that follow each other, and
values inside of a kernel stay in registers. The groups here are those of connected operators that work on equally many
elements and have the same products and attention in front of them: code that has to wait for a product is another kernel.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from torchloom._torch.operators import OpOverload
from torchloom._torch.tensors import size_hint
from torchloom.costs.hardware import Device
from torchloom.costs.roofline import bytes_of, is_computed
from torchloom.graph import argument, readers, source_of, tensors_in, value_of, viewed, written

aten = torch.ops.aten
# Pointwise or row by row in Inductor's code, without a tag that says so.
_ROW_BY_ROW = frozenset(
    {
        aten._to_copy.default,
        aten.cat.default,
        aten.embedding.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten.native_layer_norm.default,
        aten._fused_rms_norm.default,
        aten._fused_rms_norm_backward.default,
        aten.native_dropout.default,
        aten.slice_backward.default,
    }
)
_DIMS = aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.var_mean.correction


def fused_us(graph: fx.Graph, device: Device) -> dict[fx.Node, float]:
    """Return the time of each operator of a fused group in microseconds; operators that run alone are left out.

    What a group reads counts for its first operator that needs it; one of them stands for the start of its kernel.

    Args:
        graph: as passes leave it, with recorded values.
        device: whose rates count.
    """
    groups = _groups(graph)
    times: dict[fx.Node, float] = {}
    read: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node, group in groups.items():
        moved = 0
        for used in node.all_input_nodes:
            source = source_of(used)
            if groups.get(source) is not group and source not in read[group]:
                read[group].add(source)
                moved += _read_bytes(node, used)
        if any(groups.get(user) is not group for user in readers([node]) if viewed(user) is None):
            moved += sum(bytes_of(value) for value in tensors_in(value_of(node)))
        start_us = device.launch_us if node is group else 0.0
        times[node] = start_us + 1e6 * moved / device.memory_bytes_per_s
    return times


def _groups(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return one operator that stands for its group, for each operator that can be fused."""
    rank: dict[fx.Node, int] = {}
    loop: dict[fx.Node, int] = {}
    groups: dict[fx.Node, fx.Node] = {}

    def first(node: fx.Node) -> fx.Node:
        while groups[node] is not node:
            node = groups[node]
        return node

    for node in graph.nodes:
        sources = [source_of(each) for each in node.all_input_nodes]
        # How many kernels of other kinds have to run before: equal ranks can share one.
        rank[node] = max(
            (rank[each] + (is_computed(each) and each not in groups) for each in sources), default=0
        )
        if not _is_fusible(node):
            continue
        groups[node] = node
        inside = [each for each in sources if each in groups and rank[each] == rank[node]]
        # What works on the sum of a row runs in the kernel that sums it up.
        size = _elements(node)
        loop[node] = max([size, *(loop[each] for each in inside if _elements_of(each) == size)])
        for each in inside:
            if loop[each] == loop[node]:
                groups[first(node)] = first(each)
    return {node: first(node) for node in groups}


def _is_fusible(node: fx.Node) -> bool:
    target = node.target
    if not is_computed(node) or not isinstance(target, OpOverload) or written(node):
        return False
    if target in _DIMS:
        dims = argument(node, 1, "dim")
        rank = value_of(node.all_input_nodes[0]).dim()
        return dims is not None and [each % rank for each in dims] == [rank - 1]
    return target in _ROW_BY_ROW or torch.Tag.pointwise in target.tags


def _elements(node: fx.Node) -> int:
    """Return the size of the loop that computes a node: its largest operand or result."""
    picks = node.target is aten.embedding.default
    return max(map(_elements_of, (node, *([] if picks else node.all_input_nodes))))


def _elements_of(node: fx.Node) -> int:
    sizes = (size_hint(value.numel()) for value in tensors_in(value_of(node)))
    return max(sizes, default=0)


def _read_bytes(node: fx.Node, used: fx.Node) -> int:
    if node.target is aten.embedding.default and used is node.all_input_nodes[0]:
        return sum(bytes_of(value) for value in tensors_in(value_of(node)))
    return sum(bytes_of(value) for value in tensors_in(value_of(used)))
