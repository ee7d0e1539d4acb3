"""How the arguments of a call pass through an entry: its signature, and the text of the calls in it.

For `forward(self, x, *, causal=True)` with `causal` fixed these are `x, *, causal=fixed3`, `MODEL, x, causal=causal`
and `{'x': x, 'causal': causal}`. What has no default behind one that is fixed gets `MISSING` for one.
"""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Mapping
from typing import Any

from torchloom.serve.contract.conditions import put
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.target import Target

_NAMES = frozenset(
    {
        *("PLAIN", "STRIDED", "STATE", "SLOW", "FAILED", "FAILURES", "MODEL", "DTYPE"),
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


class EntrySignature:
    """The parameters of an entry.

    Args:
        target: what is served.
        contract: says which arguments have one value, and need not be passed.
        scope: gets the defaults.
    """

    def __init__(self, target: Target, contract: Contract, scope: dict[str, Any]) -> None:
        self._target, self._contract, self._scope = target, contract, scope
        self.parameters = target.parameters_for(contract)
        self.missing: list[str] = []
        """Parameters that have to be passed and that Python lets be left out, behind one that is fixed."""
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        has_default = False
        for each in self.parameters:
            is_fixed = each.name in contract.fixed and not contract.is_of_call
            if (
                has_default
                and not is_fixed
                and each.default is each.empty
                and each.kind in by_place
            ):
                self.missing.append(each.name)
            has_default |= is_fixed or each.default is not each.empty
        self._scope["MISSING"] = object()
        self.given = {p.name: _given_name(p.name) for p in self.parameters}
        """What each parameter is called in conditions, so that it hides nothing that these use."""

    @property
    def is_plain(self) -> bool:
        """Whether each parameter has its own name in the conditions."""
        return all(name == given for name, given in self.given.items())

    def text(self) -> str:
        """Return the signature, with the parameters' own names."""
        parts: list[str] = []
        was_keyword = False
        kinds = [parameter.kind for parameter in self.parameters]
        for place, parameter in enumerate(self.parameters):
            name, kind = parameter.name, parameter.kind
            if kind is parameter.KEYWORD_ONLY and not was_keyword:
                if inspect.Parameter.VAR_POSITIONAL not in kinds:
                    parts.append("*")
                was_keyword = True
            star = "*" if kind is parameter.VAR_POSITIONAL else ""
            star = "**" if kind is parameter.VAR_KEYWORD else star
            default = self._default(parameter)
            parts.append(f"{star}{name}{default}")
            is_last = place + 1 == len(kinds) or kinds[place + 1] is not parameter.POSITIONAL_ONLY
            if kind is parameter.POSITIONAL_ONLY and is_last:
                parts.append("/")
        return ", ".join(parts)

    def call(self) -> str:
        """Return the arguments of a call of a program, the model first."""
        parts = [] if self._target.owner is None else ["MODEL"]
        for parameter in self.parameters:
            name = parameter.name
            given = self.given[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                parts.append(f"*{given}")
            elif parameter.kind is parameter.VAR_KEYWORD:
                parts.append(f"**{given}")
            elif parameter.kind is parameter.KEYWORD_ONLY or name in self._target.by_keyword:
                parts.append(f"{name}={given}")
            else:
                parts.append(given)
        return ", ".join(parts)

    def by_name(self) -> str:
        """Return a dict of the arguments; further positional ones are behind a name with a star."""
        parts = []
        for parameter in self.parameters:
            name, given = parameter.name, self.given[parameter.name]
            if parameter.kind is parameter.VAR_KEYWORD:
                parts.append(f"**{given}")
            elif parameter.kind is parameter.VAR_POSITIONAL:
                parts.append(f"{'*' + name!r}: {given}")
            else:
                parts.append(f"{name!r}: {given}")
        return f"{{{', '.join(parts)}}}"

    def values(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments, as `by_name` has them, by the variables that hold them."""
        named = {parameter.name for parameter in self.parameters}
        found: dict[str, Any] = {}
        for parameter in self.parameters:
            name, kind = parameter.name, parameter.kind
            if kind is parameter.VAR_POSITIONAL:
                found[self.given[name]] = args.get(f"*{name}", ())
            elif kind is parameter.VAR_KEYWORD:
                rest = {each: value for each, value in args.items() if each not in named}
                found[self.given[name]] = rest
            else:
                found[self.given[name]] = args.get(name)
        return found

    def _default(self, parameter: inspect.Parameter) -> str:
        is_fixed = parameter.name in self._contract.fixed and not self._contract.is_of_call
        if is_fixed and parameter.kind is not parameter.VAR_KEYWORD:  # it need not be passed
            return f"={put(self._scope, 'fixed', self._contract.fixed[parameter.name])}"
        if parameter.name in self.missing:
            return "=MISSING"
        if parameter.default is parameter.empty:
            return ""
        return f"={put(self._scope, 'default', parameter.default)}"


def _given_name(name: str) -> str:
    """Return what a parameter is called where its own name may be one that the conditions use."""
    is_ours = name in _NAMES or "__" in name or hasattr(builtins, name) or _MADE.fullmatch(name)
    return f"given_{name}" if is_ours else name
