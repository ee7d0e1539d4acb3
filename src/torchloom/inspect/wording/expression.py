"""A small graph as one expression: `2 * x` instead of five lines."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

_INFIX = {
    "add": ("+", 1),
    "sub": ("-", 1),
    "mul": ("*", 2),
    "truediv": ("/", 2),
    "div": ("/", 2),
    "matmul": ("@", 2),
    "pow": ("**", 4),
}
_MAX_CHARS = 500


def expression(graph: fx.Graph) -> str:
    """Return the outputs of a graph as an expression of its inputs.

    Inputs have the name that the user gave them. Long expressions end in "...".
    """
    *_, output = graph.nodes
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    texts = [_text(each)[0] for each in results]
    text = texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def _text(value: Any) -> tuple[str, int]:  # noqa: PLR0911
    """Return the text of a value, and how strongly its outermost operator binds."""
    if not isinstance(value, fx.Node):
        return repr(value), 9
    if value.op == "placeholder":
        return _input_name(value), 9
    if value.op == "get_attr":
        return str(value.target), 9
    name = value.target if isinstance(value.target, str) else value.target.__name__
    name = name.removesuffix(".default").removesuffix(".Tensor")
    args = [_text(arg) for arg in value.args]
    if value.target is operator.getitem:
        return f"{args[0][0]}[{args[1][0]}]", 9
    if name == "neg":
        return f"-{_wrapped(args[0], 3)}", 3
    if name in _INFIX and len(args) == 2:
        sign, strength = _INFIX[name]
        return f"{_wrapped(args[0], strength)} {sign} {_wrapped(args[1], strength + 1)}", strength
    texts = [text for text, _ in args] + [f"{k}={_text(v)[0]}" for k, v in value.kwargs.items()]
    if value.op == "call_method" and texts:
        return f"{_wrapped(args[0], 9)}.{name}({', '.join(texts[1:])})", 9
    return f"{name}({', '.join(texts)})", 9


def _wrapped(part: tuple[str, int], strength: int) -> str:
    text, own = part
    return text if own >= strength else f"({text})"


def _input_name(node: fx.Node) -> str:
    """Return the user's name of an input: Dynamo writes `l_x_` for the argument x."""
    name = str(node.target).lower() if isinstance(node.target, str) else node.name
    if name.startswith("l_") and name.endswith("_"):
        return name[2:-1].strip("_") or node.name
    return node.name
