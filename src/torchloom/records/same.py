"""Normalizes texts of records, so that equal code has equal text in two records.

Removes what differs between processes that compiled the same: counters of Dynamo, the order in which Python prints
sets, lines and paths in comments.
"""

from __future__ import annotations

import re

_COUNTED = re.compile(
    # `__builtins_dict___3`, `__compiled_fn_4`: a counter of the process stands behind.
    r"(_{2,3}(?:builtins_dict__|compiled_fn|resume_at_\d+|context_manager_\d+|gen_rand_values"
    r"|warnings_warn_wrapper|comprehension_\w+_at_\d+))_\d+"
    # An object's number and the compile's behind it.
    r"|(__\w+?)_(?:\d{5,}|<id>)_c\d+[/_]\d+"
)
_ADDRESS = re.compile(r"(___check_(?:obj|type)_id\(.*?), \d+\)")
_MACHINE = re.compile(r"('backend_hash': )'\w+'")
_SET = re.compile(r"""b?(?P<quote>['"])(?:\\.|(?!(?P=quote)).)*(?P=quote)|\{(?P<inner>[^{}]*)\}""")


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
    return _SET.sub(_in_order, same_names(text))


def same_graph(text: str) -> str:
    """Return a graph, or generated code, without comments, which name lines and paths."""
    lines = (line.rstrip() for line in same_names(text).splitlines())
    kept = (line for line in lines if line and not line.lstrip().startswith("#"))
    return _MACHINE.sub(r"\1''", "\n".join(kept))


def same_kernel(text: str) -> str:
    """Return a kernel's source without what belongs to the machine that it was written on."""
    lines = (line for line in text.splitlines() if not line.startswith(("#include", "# ")))
    return _MACHINE.sub(r"\1''", "\n".join(lines))


def _in_order(braces: re.Match[str]) -> str:
    """Return a set with its parts sorted, also those of texts with commas; dicts keep their order, which counts."""
    inner = braces["inner"]
    return (
        braces[0]
        if inner is None or ": " in inner
        else f"{{{', '.join(sorted(inner.split(', ')))}}}"
    )
