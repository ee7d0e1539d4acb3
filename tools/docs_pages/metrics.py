"""The list of docs/metrics.md: what each metric of a step is, from the fields of `StepEnded`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from docs_pages.lists import listed
from torchloom.events import StepEnded

_LEFT_OUT = ("step", "rank")
"""Told beside the metrics, not among them."""


def render_metrics() -> str:
    """Return a list of all metrics as Markdown.

    Example:
        >>> "- `grad_norm`: " in render_metrics()
        True
    """
    return listed((f"`{name}`", "", doc) for name, doc in _fields() if name not in _LEFT_OUT)


def _fields() -> Iterator[tuple[str, str]]:
    """Yield the name of each field and the text under it, on one line."""
    (tree,) = ast.parse(inspect.getsource(StepEnded)).body
    assert isinstance(tree, ast.ClassDef)
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(doc))):
                yield name, " ".join(doc.split())
