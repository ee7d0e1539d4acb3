"""Graphs as text: stable names, shapes and dtypes, one node a line.

    %gather : f32[64, 32] = torchloom.gather(%primals_1, [64, 32], f32, f32, '2x1#0', 'a.weight')

The text depends on the graph alone (no addresses, no process state), so it serves golden files,
dumps and hashes.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Any

import torch
from torch import fx

from torchloom._torch.operators import OpOverload

_SERIAL = re.compile(r"'(\d+x\d+)#\d+(?:/model\d+)?'")
"""The handle of a communicator: sizes of its groups, and a serial number of the process."""
_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b1",
}


def graph_text(graph: fx.Graph) -> str:
    """Return a readable, deterministic text of a graph, ending in a newline."""
    return "".join(f"{_line(node)}\n" for node in graph.nodes)


def graph_digest(graph: fx.Graph) -> str:
    """Return a short hash of a graph, equal on all ranks that captured the same.

    Which of several communicators over as many ranks it names does not count: a plan of one engine is
    good for the next.
    """
    text = _SERIAL.sub(r"\1", graph_text(graph))
    return digest_of(text)


def digest_of(text: str, num_bytes: int = 8) -> str:
    """Return a hash of a text that is the same in each process."""
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def op_counts(graph: fx.Graph) -> dict[str, int]:
    """Return how often each operator is called, by name, sorted."""
    names = (target_name(node.target) for node in graph.nodes if node.op == "call_function")
    return dict(sorted(Counter(names).items()))


def target_name(target: Any) -> str:
    """Return an operator's name without its overload when that is the default one."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def short_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's short name, e.g. "f32"."""
    return _SHORT.get(dtype, str(dtype))


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_format(node.args[0])}"
    kind = _type(node.meta.get("val"))
    if node.op in ("placeholder", "get_attr"):
        return f"%{node.name}{kind} = {node.op}"
    args = [_format(arg) for arg in node.args]
    args += [f"{key}={_format(value)}" for key, value in node.kwargs.items()]
    marks = node.meta.get("recompute")
    tail = f"  # {marks.name}" if hasattr(marks, "name") else ""
    return f"%{node.name}{kind} = {target_name(node.target)}({', '.join(args)}){tail}"


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f" : {short_dtype(value.dtype)}[{shape}]"
    if isinstance(value, (list, tuple)):
        return f" : {len(value)} values"
    return ""


def _format(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        body = ", ".join(_format(item) for item in value)
        return f"[{body}]" if isinstance(value, list) else f"({body})"
    if isinstance(value, torch.dtype):
        return short_dtype(value)
    if isinstance(value, torch.device):
        return value.type  # ranks of one host have devices of other numbers, and equal graphs
    return repr(value)
