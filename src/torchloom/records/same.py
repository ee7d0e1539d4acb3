"""Normalizes texts of records, so that equal code has equal text in two records.

Removes what differs between processes that compiled the same: counters of Dynamo, the order in which Python prints
sets, lines and paths in comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_COUNTED = re.compile(
    # `__builtins_dict___3`, `__compiled_fn_4`: a counter of the process stands behind.
    r"(_{2,3}(?:builtins_dict__|compiled_fn|resume_at_\d+|context_manager_\d+|gen_rand_values"
    r"|warnings_warn_wrapper|comprehension_\w+_at_\d+))_\d+"
    # An object's number and the compile's behind it.
    r"|(__\w+?)_(?:\d{5,}|<id>)_c\d+[/_]\d+"
)
_ADDRESS = re.compile(r"(___check_(?:obj|type)_id\(.*?), \d+\)")
_MACHINE = re.compile(r"('backend_hash': )'\w+'")
_STRING = re.compile(r"""b?(['"])(?:\\.|(?!\1).)*\1""")
_OPEN, _CLOSED = "([{", ")]}"


def same_names(text: str) -> str:
    """Return a text without the numbers that Dynamo and the process count up.

    Example:
        >>> same_names("G['__builtins_dict___7']['len']")
        "G['__builtins_dict__']['len']"
    """
    return _ADDRESS.sub(r"\1)", _COUNTED.sub(lambda m: m.group(1) or m.group(2), text))


def same_check(text: str) -> str:
    """Return a guard, in code or in words, with the elements of sets in one order.

    Example:
        >>> same_check("L['s'] == {'b', 'a'}")
        "L['s'] == {'a', 'b'}"
    """
    return _sets_sorted(same_names(text))


def same_graph(text: str) -> str:
    """Return a graph, or generated code, without comments, which name lines and paths."""
    lines = (line.rstrip() for line in same_names(text).splitlines())
    kept = (line for line in lines if line and not line.lstrip().startswith("#"))
    return _MACHINE.sub(r"\1''", "\n".join(kept))


def same_kernel(text: str) -> str:
    """Return a kernel's source without what belongs to the machine that it was written on."""
    lines = (line for line in text.splitlines() if not line.startswith(("#include", "# ")))
    return _MACHINE.sub(r"\1''", "\n".join(lines))


def _sets_sorted(text: str) -> str:
    """Return code with the elements of each set sorted; dicts keep their order, which counts."""
    begin = next((at for at, sign in _signs(text) if sign == "{"), None)
    end = None if begin is None else _end(text, begin)
    if begin is None or end is None:
        return text
    parts = [_sets_sorted(part) for part in _parts(text[begin + 1 : end])]
    if not any(_is_pair(part) for part in parts):
        parts.sort()
    return f"{text[:begin]}{{{', '.join(parts)}}}{_sets_sorted(text[end + 1 :])}"


def _end(text: str, begin: int) -> int | None:
    """Return where the bracket that opens at `begin` closes."""
    depth = 0
    for at, sign in _signs(text[begin:]):
        depth += (sign in _OPEN) - (sign in _CLOSED)
        if depth == 0:
            return begin + at
    return None


def _parts(inner: str) -> list[str]:
    """Return what commas part, outside of strings and brackets."""
    found, depth, begin = [], 0, 0
    for at, sign in _signs(inner):
        depth += (sign in _OPEN) - (sign in _CLOSED)
        if sign == "," and depth == 0:
            found.append(inner[begin:at].strip())
            begin = at + 1
    return [*found, inner[begin:].strip()]


def _is_pair(part: str) -> bool:
    depth = 0
    for _, sign in _signs(part):
        depth += (sign in _OPEN) - (sign in _CLOSED)
        if sign == ":" and depth == 0:
            return True
    return False


def _signs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the places of signs outside of strings."""
    at = 0
    while at < len(text):
        found = _STRING.match(text, at)
        if found:
            at = found.end()
            continue
        if text[at] in "([{)]},:":
            yield at, text[at]
        at += 1
