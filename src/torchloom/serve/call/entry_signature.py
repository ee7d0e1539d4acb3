"""How the arguments of a call pass through an entry: its signature, and the text of the calls in it.

For `forward(self, x, *, causal=True)` with `causal` fixed these are `x, *, causal=fixed3`, `MODEL, given_x, causal=given_causal`
and `{'x': given_x, 'causal': given_causal}`. What has no default behind one that is fixed gets `MISSING` for one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torchloom.serve.contract.conditions import put
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.target import Target

_STARS: Mapping[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Name(str):
    """A text that a signature shows as it is."""

    __slots__ = ()
    __repr__ = str.__str__


class EntrySignature:
    """The parameters of an entry.

    Args:
        target: what is served.
        contract: says which arguments have one value, and need not be passed.
        scope: gets the defaults.
    """

    def __init__(self, target: Target, contract: Contract, scope: dict[str, Any]) -> None:
        self._target = target
        self.parameters = target.parameters_for(contract)
        self.given = {each.name: f"given_{each.name}" for each in self.parameters}
        """What each parameter is called in conditions, so that it hides nothing that these use."""
        self.missing: list[str] = []
        """Parameters that have to be passed and that Python lets be left out, behind one that is fixed."""
        scope["MISSING"] = object()
        shown: list[inspect.Parameter] = []
        has_default = False
        for each in self.parameters:
            default: Any = each.empty
            is_fixed = each.name in contract.fixed and not contract.is_of_call
            if is_fixed and each.kind not in _STARS:  # it need not be passed
                default = _Name(put(scope, "fixed", contract.fixed[each.name]))
            elif each.default is not each.empty:
                default = _Name(put(scope, "default", each.default))
            elif has_default and each.kind in _BY_PLACE:
                self.missing.append(each.name)
                default = _Name("MISSING")
            has_default |= default is not each.empty
            shown.append(each.replace(annotation=each.empty, default=default))
        self.text = str(inspect.Signature(shown))[1:-1]
        """The signature, with the parameters' own names."""

    def call(self) -> str:
        """Return the arguments of a call of a program, the model first."""
        parts = [] if self._target.owner is None else ["MODEL"]
        for each in self.parameters:
            is_named = each.kind is each.KEYWORD_ONLY or each.name in self._target.by_keyword
            start = f"{each.name}=" if is_named else _STARS.get(each.kind, "")
            parts.append(start + self.given[each.name])
        return ", ".join(parts)

    def by_name(self) -> str:
        """Return a dict of the arguments; further positional ones are behind a name with a star."""
        parts = []
        for each in self.parameters:
            star, given = _STARS.get(each.kind, ""), self.given[each.name]
            parts.append(f"**{given}" if star == "**" else f"{star + each.name!r}: {given}")
        return f"{{{', '.join(parts)}}}"

    def values(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments, as `by_name` has them, by the variables that hold them."""
        found: dict[str, Any] = {}
        for each in self.parameters:
            if each.kind is each.VAR_KEYWORD:
                found[self.given[each.name]] = {
                    n: v for n, v in args.items() if n not in self.given
                }
            elif each.kind is each.VAR_POSITIONAL:
                found[self.given[each.name]] = args.get(f"*{each.name}", ())
            else:
                found[self.given[each.name]] = args.get(each.name)
        return found
