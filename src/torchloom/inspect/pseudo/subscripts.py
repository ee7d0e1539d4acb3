"""Which place of a list a subscript means, where that is known."""

from __future__ import annotations

from torchloom.inspect.pseudo.values import Constant, Part, Slice


def place_of(key: Part) -> int | slice | None:
    """Return the index or slice that a constant key stands for, None for any other."""
    if isinstance(key, Constant):
        return key.value if type(key.value) is int or _is_simple(key.value) else None
    if not isinstance(key, Slice):
        return None
    bounds = [each.value if isinstance(each, Constant) else each for each in key.bounds]
    found = slice(*bounds)
    return found if _is_simple(found) else None


def _is_simple(value: object) -> bool:
    if type(value) is not slice:
        return False
    ends = (value.start, value.stop)
    return value.step is None and all(each is None or type(each) is int for each in ends)
