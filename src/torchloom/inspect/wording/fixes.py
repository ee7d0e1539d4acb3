"""Advice against recompiles that several reasons share."""

from __future__ import annotations

import re

BRANCH = "each value makes an entry of its own: pass few different ones, or branch outside"
DYNAMIC_FIX = "pass it as a tensor, or compile with dynamic=True"
LENGTHS = (
    "each length makes an entry of its own: pass one length, or stack the values into one tensor"
)
ATTRIBUTES = "give all objects that are passed the same attributes and keys"
SIZES_FIX = "the function branches on this: keep to sizes for which it holds, or branch outside"
NAN = "nan makes an entry of its own: keep it out of numbers, or pass the number as a tensor"
ATTRIBUTE_FIX = (
    "pass it as a tensor, or as an argument of its own; dynamic=True does not help where it is an "
    "attribute of a module"
)
MODULE_FIX = "an attribute of a module is a constant of the graph: make it a buffer, or an argument"
TYPES = "pass values of one type"
APART = "sizes 0 and 1 are compiled apart, also with dynamic=True"


def constant_fix(source: str, value: str) -> str:
    """Return the advice that ends recompiles for a constant that changes.

    Args:
        source: in words. Only numbers among the arguments themselves can become dynamic.
        value: as code.
    """
    is_number = re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?|-?inf|nan", value.strip()) is not None
    if source.startswith("global "):
        return (
            "a global is a constant of the graph: pass it as an argument"
            if not is_number
            else "a global is a constant of the graph: pass it as an argument, as a tensor"
        )
    if source.startswith("self"):
        return (
            MODULE_FIX
            if is_number
            else "an attribute of a module is a constant of the graph: keep it, or pass it as an argument"
        )
    if re.fullmatch(r"-?\d+", value.strip()):
        # Of a name alone nothing tells whether it is a module whose attribute this is.
        return DYNAMIC_FIX if re.fullmatch(r"\w* ?\w+", source) else ATTRIBUTE_FIX
    if is_number:
        return "pass it as a tensor"
    return BRANCH
