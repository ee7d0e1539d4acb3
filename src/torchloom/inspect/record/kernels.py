"""Kernels in Inductor's generated code."""

from __future__ import annotations

import re

from torchloom.records import Kernel

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
