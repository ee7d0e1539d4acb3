"""The text of constants: Python that gives the same value, or a placeholder in angle brackets."""

from __future__ import annotations

import math
from types import CodeType
from typing import Any

_MAX_CHARS = 200


def constant_text(value: Any) -> str:  # noqa: PLR0911
    """Return the text of a constant; code objects by name, long ones cut, no addresses."""
    if isinstance(value, CodeType):
        return f"<code {value.co_name}>"
    kind = type(value)
    if value is ...:
        return "..."
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float('{value!r}')"
    if kind is complex:
        return _complex_text(value)
    if kind is tuple:
        inside = ", ".join(constant_text(each) for each in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if kind is frozenset:
        inside = ", ".join(sorted(constant_text(each) for each in value))
        return f"frozenset({{{inside}}})" if inside else "frozenset()"
    if kind is slice:
        bounds = (value.start, value.stop, value.step)
        return f"slice({', '.join(constant_text(each) for each in bounds)})"
    return _printed(value)


def _complex_text(value: complex) -> str:
    """Return a literal where it gives the same signs and parts, a call where none does."""
    if value.real == 0 and math.copysign(1, value.real) > 0 and math.isfinite(value.imag):
        return repr(value)
    return f"complex({constant_text(value.real)}, {constant_text(value.imag)})"


def _printed(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  `__repr__` of a class of the program
        return f"<{type(value).__name__}>"
    if " at 0x" in text:
        return f"<{type(value).__name__}>"
    if type(value).__module__ == "torch" and not text.startswith("torch."):
        text = f"torch.{text}"  # a device is printed without it
    return text if len(text) <= _MAX_CHARS + 60 else f"{text[:_MAX_CHARS]}...{text[-1]}"
