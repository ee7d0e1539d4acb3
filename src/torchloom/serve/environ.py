"""Variables of the environment that code may ask for. Dynamo guards what it finds of them, not what is not set."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchloom._torch.places import ENVIRON, GuardOn
from torchloom.serve.absent import texts_of

_NAMES = frozenset({"environ", "getenv", "environb"})
_WRITTEN = re.compile(r"[A-Z][A-Z0-9_]*")
"""How names of variables are written, mostly."""
_ITEM = re.compile(r"(.+)\._data\[(b'[^']*')\]")


def environ_guards(
    values: Iterable[tuple[str, Any]], codes: Sequence[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on variables that code may ask for.

    Args:
        values: what the trace read, by its expressions.
        codes: the user's functions that were traced.
    """
    asking = [code for code in codes if not _NAMES.isdisjoint(code.co_names)]
    if not asking:
        return
    names = set(texts_of(asking))
    handed = {*texts_of(codes), *(value for _, value in values if isinstance(value, str))}
    names |= {text for text in handed if _WRITTEN.fullmatch(text)}
    for name in sorted(names):
        yield GuardOn("ENVIRON", ENVIRON, name)


def variable_of(source: str) -> tuple[str, str] | None:
    """Return where the environment is that an expression reads a variable from, and which; None if it reads none."""
    found = _ITEM.fullmatch(source)
    if found is None or os.name != "posix":
        return None
    return found[1], os.fsdecode(_bytes(found[2]))


def setting_of(environ: Mapping[str, str], name: str) -> str:
    """Return what a variable is set to, in words that do not give it away."""
    value = environ.get(name)
    if value is None:
        return "not set"
    digest = hashlib.blake2b(value.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return f"set ({digest})"


def _bytes(text: str) -> bytes:
    value: bytes = ast.literal_eval(text)
    return value
