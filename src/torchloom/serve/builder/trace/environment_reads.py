"""Guards on variables of the environment that code may ask for. Dynamo guards those that are set, and no others."""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torchloom._torch.full_capture import GuardOn
from torchloom.envs import reads_environment
from torchloom.pieces.places import ENVIRON
from torchloom.serve.builder.trace.absent_names import texts_of

_NAMES = frozenset({"environ", "getenv", "environb"})
_WRITTEN = re.compile(r"[A-Z][A-Z0-9_]*")
"""How names of variables are written, mostly."""
_JOIN = frozenset({"format", "join", "upper", "replace"})


def environ_guards(
    values: Sequence[tuple[str, Any]], codes: Sequence[types.CodeType]
) -> Iterator[GuardOn]:
    """Yield guards on variables that code may ask for.

    Args:
        values: what the trace read, by its expressions.
        codes: the user's functions that were traced.
    """
    asking = [code for code in codes if not _NAMES.isdisjoint(code.co_names)]
    if not asking and not any(reads_environment(value) for _, value in values):
        return
    read = {value for _, value in values if isinstance(value, str)}
    handed = {text for text in {*texts_of(codes), *read} if _WRITTEN.fullmatch(text)}
    for name in sorted({*texts_of(asking), *handed}):
        yield GuardOn("ENVIRON", ENVIRON, name)
    parts = {each for code in asking if _makes_texts(code) for each in code.co_consts}
    for part in sorted({each for each in {*parts, *handed} if _is_part(each)} if parts else ()):
        yield GuardOn("ENVIRON_LIKE", ENVIRON, part)


def _makes_texts(code: types.CodeType) -> bool:
    """Return whether code may put names together."""
    if not _JOIN.isdisjoint(code.co_names):
        return True
    return any(
        step.opname.startswith(("FORMAT_", "BUILD_STRING", "BINARY_ADD")) or step.argrepr == "+"
        for step in dis.get_instructions(code)
    )


def _is_part(value: object) -> bool:
    return isinstance(value, str) and len(value) > 1 and value.replace("_", "a").isalnum()
