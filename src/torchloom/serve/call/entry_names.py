"""Names in the text of an entry: what it refers to, and what parameters are called so that they hide none of it."""

from __future__ import annotations

import builtins
import re

_NAMES = frozenset(
    {
        *("PLAIN", "STRIDED", "STATE", "SLOW", "FAILED", "FAILURES", "MODEL", "GLOBALS", "DTYPE"),
        *("HANDLE", "FORWARD", "Tensor", "math", "torch", "inf", "nan"),
        *("apart", "same", "type_words", "is_plainly_laid", "is_inference", "is_grad_enabled"),
        *("is_autocast", "default_dtype", "function_modes", "dispatch_modes", "transform_level"),
        *("is_jit_tracing", "_torchloom_entry", "MISSING", "is_eager", "EAGER"),
    }
)
"""What the text of an entry refers to."""
_MADE = re.compile(
    r"(?:s_|n_|f_|given_).*|(?:kind|keys|dtype|device|fixed|run|table|default)\d+|_error"
)
"""Names of helpers and variables in an entry."""


def given_name(name: str) -> str:
    """Return what a parameter is called where its own name may be one that the conditions use."""
    is_ours = name in _NAMES or "__" in name or hasattr(builtins, name) or _MADE.fullmatch(name)
    return f"given_{name}" if is_ours else name
