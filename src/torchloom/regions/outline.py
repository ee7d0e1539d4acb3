"""Replace equal parts of a captured graph by calls of one body.

before   h = norm(x, w1); ...; x1 = add(..)      h = norm(x1, w2); ...; x2 = add(..)
after    [x1] = region('a1b2', 0, [x, w1])       [x2] = region('a1b2', 1, [x1, w2])
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from torchloom._torch.aot import copy_graph_module
from torchloom._torch.bodies import EXIT_AUTOCAST
from torchloom._torch.tensors import symbols_in
from torchloom.graph import digest_of
from torchloom.ops.regions import region
from torchloom.regions.find import Part, find_regions
from torchloom.regions.labels import PARAMETER_OPS, graph_form, is_weight, traced_value
from torchloom.regions.normalize import compute_where_read, drop_identities, hoist_gathers

MakeBody = Callable[[str, fx.GraphModule, Sequence[Any], Sequence[Any], frozenset[int]], Any]
"""(name, the part as a graph, fake operands, sizes, gathered weights among the operands) -> its body"""


class RegionCalls(NamedTuple):
    """A body of a captured graph and what it stands for."""

    body: str
    """Its name: a hash of what it computes."""
    num_nodes: int
    """Nodes of each part."""
    layers: tuple[str, ...]
    """For each call the module that it stands for, "" where none is known."""


@dataclass(frozen=True)
class Outlined:
    """A captured graph whose equal parts are calls."""

    graph_module: fx.GraphModule
    bodies: dict[str, Any] = field(default_factory=dict)
    """By the name that calls know them by."""
    calls: tuple[RegionCalls, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why parts that repeat stayed."""


def outline(gm: fx.GraphModule, key: str, make_body: MakeBody) -> Outlined:
    """Return a copy of a captured graph in which bodies stand for its equal parts.

    Args:
        gm: from Dynamo; not changed.
        key: what else the bodies' code depends on, for their names.
        make_body: makes what the operators know of a body.
    """
    copy = copy_graph_module(gm)
    hoist_gathers(copy)
    drop_identities(copy.graph)
    compute_where_read(copy.graph)
    found = find_regions(copy.graph)
    if not found.groups:
        return Outlined(gm, reasons=found.reasons)
    bodies: dict[str, Any] = {}
    calls: list[RegionCalls] = []
    num_calls = 0
    picked: dict[fx.Node, fx.Node] = {}
    for group in found.groups:
        part = group[0]
        symbols = _symbols(copy.graph, part)
        operands = [traced_value(each) for each in part.operands]
        sizes = [traced_value(each) for each in (*part.sizes, *symbols)]
        weights = frozenset(i for i, node in enumerate(part.operands) if is_weight(node))
        captured = _body_of(copy, part, symbols, picked)
        name = digest_of(f"{key} {sorted(weights)} {graph_form(captured.graph)}")
        if name not in bodies:
            bodies[name] = make_body(name, captured, operands, sizes, weights)
        layers = tuple(map(_layer_of, group))
        for call, part in enumerate(group, num_calls):
            modules = list(_common_modules(part.nodes).values())
            bodies[name].modules[call] = str(modules[-1][0]) if modules else ""
            _replace(copy.graph, part, (name, call), symbols, picked)
        calls.append(RegionCalls(name, len(group[0].nodes), layers))
        num_calls += len(group)
    copy.graph.lint()
    copy.recompile()
    return Outlined(copy, bodies, tuple(calls), found.reasons)


def _symbols(graph: fx.Graph, part: Part) -> list[fx.Node]:
    """Return the inputs of a graph that are symbols of what a part reads, beside those that it reads itself."""
    needed = {
        name for node in (*part.operands, *part.sizes) for name in symbols_in(traced_value(node))
    }
    # From `T // 2` alone, backward could not compute T.
    known = needed & {str(traced_value(node)) for node in part.sizes}
    found = []
    for node in graph.find_nodes(op="placeholder"):
        names = symbols_in(traced_value(node))
        if isinstance(traced_value(node), torch.SymInt) and names <= needed - known:
            found.append(node)
            known |= names
    return found


def _body_of(
    gm: fx.GraphModule,
    part: Part,
    symbols: Sequence[fx.Node],
    picked: Mapping[fx.Node, fx.Node],
) -> fx.GraphModule:
    """Return a part as a graph of its own.

    Args:
        gm: holds the part.
        part: its nodes are copied.
        symbols: inputs of the graph that it is given beside what it reads.
        picked: what took the place of results of parts that are replaced already: the part reads that.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate((*part.operands, *part.sizes, *symbols)):
        operand = env[picked.get(node, node)] = graph.placeholder(f"operand_{index}")
        operand.meta = {"example_value": traced_value(node)}
    entered = [graph.node_copy(node) for node in part.contexts]
    for node in part.nodes:
        env[node] = graph.node_copy(node, lambda used: env[used])
    for node in reversed(entered):
        graph.call_function(EXIT_AUTOCAST, (node,))
    graph.output(tuple(env[node] for node in part.results))
    return fx.GraphModule(gm, graph)


def _layer_of(part: Part) -> str:
    """Return the module that holds most of the parameters that a part gathers."""
    params = [str(node.args[-1]) for node in part.operands if node.target in PARAMETER_OPS]
    owners = [param.rpartition(".")[0] for param in params]
    return module_of_most([path for path in owners if path])


def module_of_most(paths: Sequence[str]) -> str:
    """Return the innermost module that holds more than three quarters of some paths, "" if none does.

    A cut may lie within blocks: a part then reads a weight or two of the next one.

    Example:
        >>> module_of_most(["h.1.mlp.up", "h.1.mlp.down", "h.1.norm", "h.1.q", "h.2.norm"])
        'h.1'
    """
    chosen: list[str] = []
    left = [path.split(".") for path in paths]
    while True:
        names = Counter(path[len(chosen)] for path in left if len(path) > len(chosen))
        name, count = names.most_common(1)[0] if names else ("", 0)
        if 4 * count <= 3 * len(paths):
            return ".".join(chosen)
        left = [path for path in left if len(path) > len(chosen) and path[len(chosen)] == name]
        chosen.append(name)


def _common_modules(nodes: Sequence[fx.Node]) -> dict[str, Any]:
    """Return the modules in which all of a part was traced, outermost first."""
    stacks = [node.meta.get("nn_module_stack") or {} for node in nodes]
    common = dict(stacks[0])
    for stack in stacks[1:]:
        common = {key: value for key, value in common.items() if stack.get(key) == value}
    return common


def _replace(
    graph: fx.Graph,
    part: Part,
    call: tuple[str, int],
    symbols: Sequence[fx.Node],
    picked: dict[fx.Node, fx.Node],
) -> None:
    """Put a call in the place of a part.

    Args:
        graph: edited in place.
        part: its nodes are erased.
        call: the name of the body, and the number of this call.
        symbols: inputs of the graph that the call is given beside what the part reads.
        picked: for results of parts replaced so far, what took their place; extended.
    """
    last = part.nodes[-1]
    operands = [picked.get(each, each) for each in part.operands]
    with graph.inserting_after(last):
        node = graph.call_function(region, (*call, operands, [*part.sizes, *symbols], False))
    node.meta = {"nn_module_stack": _common_modules(part.nodes)}
    if "stack_trace" in last.meta:
        node.meta["stack_trace"] = last.meta["stack_trace"]
    node.meta["example_value"] = [traced_value(each) for each in part.results]
    after = node
    for index, result in enumerate(part.results):
        with graph.inserting_after(after):
            after = picked[result] = graph.call_function(operator.getitem, (node, index))
        after.meta = dict(result.meta)
    for result in part.results:
        result.replace_all_uses_with(picked[result], propagate_meta=False)
    for each in reversed(part.nodes):
        graph.erase_node(each)
