"""Lists of what a function takes and of what a record holds."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable
from typing import Any

from docs_pages.docstrings import parse


def listed(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return a Markdown list with one line for each name, default and meaning.

    Args:
        rows: the default may be "".

    Example:
        >>> listed([("`a`", "`1`", "A size."), ("`b`", "", "A name.")])
        '- `a` (`1`): A size.\\n- `b`: A name.'
    """
    lines = []
    for names, default, meaning in rows:
        shown = f"{names} ({default})" if default else names
        lines.append(f"- {shown}: {' '.join(meaning.split())}")
    return "\n".join(lines)


def arguments(
    function: Callable[..., Any], *, skip: Collection[str] = (), only_keywords: bool = False
) -> str:
    """Return a list of what a function takes, from its signature and `Args:`; "" if nothing.

    Args:
        function: the function; the docstring has to name each argument.
        skip: arguments that the list leaves out.
        only_keywords: leave out what can be given by position.

    Raises:
        ValueError: the docstring says nothing about an argument.
    """
    said = parse(function.__doc__).arguments
    rows = []
    for name, parameter in inspect.signature(function).parameters.items():
        is_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if name in ("self", *skip) or (only_keywords and not is_keyword):
            continue
        if name not in said:
            raise ValueError(f"{function.__qualname__} takes {name!r}: add it to its `Args:`")
        is_rest = parameter.kind is inspect.Parameter.VAR_KEYWORD
        shown = f"`{'**' if is_rest else ''}{name}`"
        rows.append((shown, _default(name, parameter.default), _capital(said[name])))
    return listed(rows)


def fields(record: type) -> str:
    """Return a list of the fields of a dataclass and the docstrings below them."""
    said = _field_docstrings(record)
    rows = [
        (f"`{each.name}`", _default(each.name, each.default), said.get(each.name, ""))
        for each in dataclasses.fields(record)
    ]
    return listed(rows)


def _field_docstrings(record: type) -> dict[str, str]:
    """Return what the string below each annotated name of a class body says."""
    body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(body, ast.ClassDef), record
    found = {}
    for above, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name):
            text = _string(below)
            if text is not None:
                found[above.target.id] = " ".join(text.split())
    return found


def _string(node: ast.stmt) -> str | None:
    value = node.value if isinstance(node, ast.Expr) else None
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return value.value if is_text else None


def _default(name: str, value: object) -> str:
    if value is inspect.Parameter.empty or value is dataclasses.MISSING or value in (None, "", ()):
        return ""
    if name.endswith("_bytes") and isinstance(value, int) and value and value % (1 << 20) == 0:
        return f"{value >> 20} MiB"
    return f"`{value!r}`"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
