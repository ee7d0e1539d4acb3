"""Variables of the environment as facts: whether they are set, and a digest of what to."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Mapping

_ITEM = re.compile(r"(.+)\._data\[(b'[^']*')\]")


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


def settings_like(environ: Mapping[str, str], part: str) -> str:
    """Return what all variables are set to whose names contain a text, in words that do not give it away."""
    found = sorted(name for name in environ if part in name)
    texts = [f"{name} {setting_of(environ, name)}" for name in found]
    digest = hashlib.blake2b("\n".join(texts).encode(errors="surrogateescape"), digest_size=8)
    return f"{len(found)} ({digest.hexdigest()})"


def _bytes(text: str) -> bytes:
    value: bytes = ast.literal_eval(text)
    return value
