"""The graphs and the generated code of an entry at every stage that torch logs, and the kernels in that code."""

from __future__ import annotations

import re

from torchloom.inspect.collected import Row
from torchloom.records import Artifact, Entry, Kernel

_KERNEL = re.compile(
    r"^(\w+) = async_compile\.(cpp_pybinding|cpp|triton|cutedsl|pallas)\((.*?)('''|\"\"\")(.*?)\4",
    re.S | re.M,
)
_NODES = re.compile(r"Source Nodes: \[([^\]]*)\]|Topologically Sorted Source Nodes: \[([^\]]*)\]")
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)")
_LANGUAGES = {"cpp_pybinding": "C++", "cpp": "C++", "triton": "Triton"}


def parse_kernels(code: str, graph: str = "") -> list[Kernel]:
    """Return the kernels that a generated module defines, with what each computes.

    Args:
        code: a module that Inductor wrote.
        graph: text of the graph that it was made of, whose operators give a kernel's name meaning.
    """
    nodes = _nodes_by_kernel(code)
    known = set(_ATEN.findall(graph))
    return [
        Kernel(
            name=match.group(1),
            language=_LANGUAGES.get(match.group(2), match.group(2)),
            source=match.group(5).strip("\n"),
            nodes=nodes.get(match.group(1)) or _ops_in_name(match.group(1), known),
        )
        for match in _KERNEL.finditer(code)
    ]


def _ops_in_name(name: str, known: set[str]) -> list[str]:
    """Read the operators that Inductor joined into the name of a fused kernel.

    Example:
        >>> _ops_in_name("cpp_fused_add_native_layer_norm_0", {"add", "native_layer_norm"})
        ['add', 'native_layer_norm']
    """
    words = name.partition("fused_")[2].rpartition("_")[0].split("_")
    found, start = [], 0
    while start < len(words):
        for end in range(len(words), start, -1):
            candidate = "_".join(words[start:end])
            if candidate in known:
                found.append(candidate)
                start = end
                break
        else:
            start += 1
    return found


def _nodes_by_kernel(code: str) -> dict[str, list[str]]:
    """Read the comment that stands above the first call of each kernel."""
    found: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in code.splitlines():
        match = _NODES.search(line)
        if match:
            names = (match.group(1) or match.group(2) or "").split(",")
            waiting = [name.strip() for name in names if name.strip()]
            continue
        called = re.match(r"\s+(\w+)(?:\.run)?\(", line)
        if called and waiting:
            found.setdefault(called.group(1), waiting)
            waiting = []
    return found


GRAPHS = {
    "dynamo_output_graph": ("dynamo", "captured by Dynamo"),
    "before_pre_grad_graph": ("pre_grad", "before pre-grad passes"),
    "aot_joint_graph": ("joint", "joint graph"),
    "aot_forward_graph": ("forward", "forward"),
    "aot_backward_graph": ("backward", "backward"),
    "aot_inference_graph": ("inference", "inference"),
    "before_post_grad_graph": ("before_post_grad", "before post-grad passes"),
    "inductor_post_grad_graph": ("post_grad", "after post-grad passes"),
    "inductor_output_code": ("output_code", "generated code"),
    "fx_graph_runnable": ("runnable", "runnable repro"),
}
"""Kind and title of an artifact by the kind of the trace's row."""
_ONE_EACH_SIDE = ("output_code", "post_grad", "before_post_grad", "runnable")
"""Kinds that torch logs once for the forward graph and once for the backward graph."""
_GRAPH_ID = re.compile(r"^\s*# graph id: \d+\n?", re.M)


def add_graph(entry: Entry, row: Row) -> None:
    """Add a graph, or generated code with its kernels, to an entry.

    Args:
        entry: gets the artifact.
        row: of a kind in `GRAPHS`.
    """
    kind, title = GRAPHS[row.kind]
    text = _GRAPH_ID.sub("", row.payload or "")
    if kind in _ONE_EACH_SIDE:
        earlier = sum(a.kind == kind for a in entry.artifacts)
        side = ("forward", "backward")[earlier] if earlier < 2 else str(earlier)
        has_backward = any(a.kind in ("backward", "forward") for a in entry.artifacts)
        title = f"{title}, {side}" if has_backward else title
    entry.artifacts.append(
        Artifact(kind=kind, title=title, text=text, num_bytes=len(text.encode()))
    )
    if kind == "output_code":
        graphs = [a.text for a in entry.artifacts if a.kind == "post_grad"]
        entry.kernels += parse_kernels(text, graphs[-1] if graphs else "")
