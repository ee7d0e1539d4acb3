"""Sentences about the process: global switches of torch, modes, backends, entries that are gone."""

from __future__ import annotations

import re

from torchloom.inspect.wording.reasons.base import Reason, rules

_SWITCHES = {
    "grad_mode": "grad mode",
    "autocast": "autocast",
    "default_dtype": "the default dtype",
    "num_threads": "torch.set_num_threads",
    "deterministic_algorithms": "torch.use_deterministic_algorithms",
    "torch_function": "__torch_function__",
    "allow_": "the precision settings of matrix products",
}


def _global_state(what: str) -> Reason:
    changed = [words for name, words in _SWITCHES.items() if re.search(rf"\b{name}", what)]
    some = ", ".join(changed) or "grad mode, autocast and default dtype"
    return Reason("", "unchanged global state", what.strip(), f"keep {some} the same between calls")


def _mode_stack() -> Reason:
    fix = "keep torch function modes, such as `with torch.device(...)`, the same between calls"
    return Reason("", "the same stack of torch function modes", "another stack", fix)


def _backend(rest: str) -> Reason:
    del rest
    fix = "register the backend under a name, or keep one object"
    return Reason("", "the same backend object", "another one", fix)


def _freed(rest: str) -> Reason:
    del rest
    fix = "keep what the function was compiled for alive while it is called"
    return Reason("", "what it was compiled for still there", "freed", fix)


RULES = rules(
    (r"GLOBAL_STATE[^:]*:(.*)", _global_state),
    (r"___check_torch_function_mode_stack\(\)", _mode_stack),
    (r"BACKEND_MATCH(.*)", _backend),
    (r"(Cache line invalidated.*)", _freed),
)
"""In the order in which they are tried."""
