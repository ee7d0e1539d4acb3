"""Custom operators as text: their schemas, and a digest of what their fake implementations do."""

from __future__ import annotations

import dis
import hashlib
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torchloom._torch.operators import Operator, schemas_of, traced_functions
from torchloom.bytecode import code_digest, nested
from torchloom.serve.model.functions import functions_in, has_version
from torchloom.serve.model.spelling import words_for

_DEPTH = 4
"""How many calls deep functions are followed."""


def operator_words(operator: Operator) -> str:
    """Return what another process compares: any other schema, tag or fake has another text."""
    parts = [
        f"{kind} {text}"
        for kind, function in traced_functions(operator)
        for text in _digests(function)
    ]
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
    return f"{'; '.join(schemas_of(operator))}, traced as {digest}"


def _digests(function: Any) -> list[str]:
    """Return what a function does, and what the functions do that it finds among its globals and in its cells.

    Of torch's own only what they wrap counts: they keep notes in their cells.
    """
    found, seen = list[str](), set[types.CodeType]()
    waiting = [(each, 0) for each in functions_in(function)]
    while waiting:
        each, depth = waiting.pop()
        if each.__code__ in seen or depth > _DEPTH:
            continue
        seen.add(each.__code__)
        is_torchs = has_version(each.__code__)
        if not is_torchs:
            given = (each.__defaults__, each.__kwdefaults__)
            found.append(f"{code_digest(each.__code__)} {words_for(given)}")
        for name, value in [*_cells_of(each), *([] if is_torchs else _globals_of(each))]:
            inner = list(functions_in(value))
            waiting += [(one, depth + 1) for one in inner]
            if not inner and not is_torchs:
                found.append(f"{name} {words_for(value)}")
    return found


def _cells_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for code in nested(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL" and step.argval in function.__globals__:
                yield step.argval, function.__globals__[step.argval]
