"""A small graph as one expression: `2 * x` instead of five lines."""

from __future__ import annotations

import ast
import operator
from typing import Any

from torch import fx

_INFIX: dict[str, ast.operator] = {
    "add": ast.Add(),
    "sub": ast.Sub(),
    "mul": ast.Mult(),
    "truediv": ast.Div(),
    "div": ast.Div(),
    "matmul": ast.MatMult(),
    "pow": ast.Pow(),
}
_MAX_CHARS = 500


def expression(graph: fx.Graph) -> str:
    """Return the outputs of a graph as an expression of its inputs.

    Inputs have the name that the user gave them. Long expressions end in "...".
    """
    *_, output = graph.nodes
    result = output.args[0]
    if isinstance(result, (tuple, list)):
        tree = ast.Tuple([_tree(each) for each in result], ast.Load())
        text = ast.unparse(tree.elts[0] if len(result) == 1 else tree)
    else:
        text = ast.unparse(_tree(result))
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def _tree(value: Any) -> ast.expr:
    """Return a value as a tree of Python, whose text has the parentheses that it needs."""
    if not isinstance(value, fx.Node):
        return ast.Name(repr(value))
    if value.op in ("placeholder", "get_attr"):
        is_input = value.op == "placeholder"
        return ast.Name(_input_name(value) if is_input else str(value.target))
    name = value.target if isinstance(value.target, str) else value.target.__name__
    name = name.removesuffix(".default").removesuffix(".Tensor")
    args = [_tree(each) for each in value.args]
    if value.target is operator.getitem:
        return ast.Subscript(args[0], args[1], ast.Load())
    if name == "neg":
        return ast.UnaryOp(ast.USub(), args[0])
    if name in _INFIX and len(args) == 2:
        return ast.BinOp(args[0], _INFIX[name], args[1])
    called: ast.expr = ast.Name(name)
    if value.op == "call_method" and args:
        called, *args = ast.Attribute(args[0], name, ast.Load()), *args[1:]
    keywords = [ast.keyword(key, _tree(each)) for key, each in value.kwargs.items()]
    return ast.Call(called, args, keywords)


def _input_name(node: fx.Node) -> str:
    """Return the user's name of an input: Dynamo writes `l_x_` for the argument x."""
    name = str(node.target).lower() if isinstance(node.target, str) else node.name
    if name.startswith("l_") and name.endswith("_"):
        return name[2:-1].strip("_") or node.name
    return node.name
