"""A hash of what a graph computes. Names of its nodes, symbols and modules do not enter it."""

from __future__ import annotations

import hashlib
import operator
import re
from typing import Any

import torch
from torch import fx

from torchloom._torch.operators import OpOverload, OpOverloadPacket
from torchloom._torch.shapes import range_text
from torchloom.graph.text import short_dtype, target_name

_SYMBOL = re.compile(r"\b[su]\d+\b")


def graph_digest(module: fx.GraphModule) -> str:
    """Return a hash of a graph that the names of its nodes, symbols and modules do not enter."""
    names: dict[str, str] = {}
    symbols: dict[str, str] = {}

    def symbolic(text: str) -> str:
        return _SYMBOL.sub(lambda found: symbols.setdefault(found[0], f"n{len(symbols)}"), text)

    lines = []
    for number, node in enumerate(module.graph.nodes):
        names[node.name] = f"%{number}"
        line = f"{node.op} {target_text(node)} {_spelled(node.args, names)} {_spelled(node.kwargs, names)}"
        if node.op == "get_attr":
            line = f"get_attr {_constant(module, str(node.target))}"
        elif node.op == "placeholder":
            value = node.meta["example_value"]
            line = f"placeholder {symbolic(typed(value))} {_hints(value)}"
        lines.append(line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def target_text(node: fx.Node) -> str:
    """Return what a node calls, by a name that is the same in each process."""
    if node.op == "placeholder":
        return ""
    if isinstance(node.target, (str, OpOverload, OpOverloadPacket)):
        return str(node.target)
    module = getattr(node.target, "__module__", "")
    return f"{module}.{getattr(node.target, '__qualname__', target_name(node.target))}"


def _spelled(value: Any, names: dict[str, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value.name]
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_spelled(each, names) for each in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_spelled(each, names)}' for key, each in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_spelled((value.start, value.stop, value.step), names)}"
    return repr(value)


def typed(value: Any) -> str:
    """Return what a value looks like: dtype, sizes, strides, device."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        strides = ", ".join(str(stride) for stride in value.stride())
        grad = " grad" if value.requires_grad else ""
        return f"{short_dtype(value.dtype)}[{sizes}]({strides}) {value.device}{grad}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(typed(each) for each in value)})"
    return str(value)


def _hints(value: Any) -> str:
    """Return what sizes were during the trace, for which compilers tune, and their ranges."""
    if isinstance(value, torch.Tensor):
        return " ".join(_hints(size) for size in value.shape)
    if isinstance(value, torch.SymInt):
        return f"{value.node.hint} of {range_text(value)}"
    return str(value)


def _constant(module: fx.GraphModule, name: str) -> str:
    value: Any = operator.attrgetter(name)(module)
    if isinstance(value, fx.GraphModule):
        return f"graph {graph_digest(value) if _has_examples(value) else value.code}"
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{typed(value)} {hashlib.sha256(content).hexdigest()}"
    return repr(value)


def _has_examples(module: fx.GraphModule) -> bool:
    return all("example_value" in node.meta for node in module.graph.find_nodes(op="placeholder"))
