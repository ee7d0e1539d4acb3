"""Names that stood for one object in the trace, such as tied weights: each call checks that they still do.

    MODEL._modules['head']._parameters['weight'] is MODEL._modules['embed']._parameters['weight']

A graph takes tied weights as one input, so it would use the old tensor for both if one name were set anew. The
conditions follow from facts. Each costs about 0.1 us a call, so names are checked only where they may hold tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from torchloom.pieces.places import Place
from torchloom.serve.model.facts import Facts
from torchloom.serve.model.target import Target


def ties_among(facts: Iterable[Facts], target: Target) -> dict[str, Facts]:
    """Return the facts on names for one object that calls ask for, by their conditions in Python.

    Args:
        facts: of programs.
        target: what is served; conditions call it `MODEL` and its globals `GLOBALS`.
    """
    found: dict[str, Facts] = {}
    for each in facts:
        for source, fact in each.items():
            match fact.get("ask"):
                case ["same as", other]:
                    condition = _condition(fact["place"], other, target)
                    if condition is not None:
                        found.setdefault(condition, {source: fact})
    return found


def names_for(target: Target) -> dict[str, Any]:
    """Return what conditions refer to."""
    return {"MODEL": target.owner, "GLOBALS": target.function.__globals__}


def _condition(place: Place, other: Place, target: Target) -> str | None:
    expressions = [_expression(each, target) for each in (place, other)]
    if None in expressions:
        return None
    one, two = expressions
    try:
        value = eval(str(one), names_for(target))  # written here, of steps that are names and keys
    except Exception:  # noqa: BLE001 - attributes may raise anything; what is gone is a changed fact
        return None
    return f"{one} is {two}" if _may_hold_tensors(value) else None


def _may_hold_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(each, Tensor) for each in value)
    if isinstance(value, dict):
        return any(isinstance(each, Tensor) for each in value.values())
    return isinstance(value, (Tensor, nn.Module))


def _expression(place: Place, target: Target) -> str | None:
    """Return a place as Python; None where it begins or goes on otherwise than by names and keys."""
    parts = list(_parts(place, target))
    return None if None in parts else "".join(map(str, parts))


def _parts(place: Place, target: Target) -> Iterator[str | None]:
    (kind, name, *_), *steps = place
    own = target.function.__code__.co_varnames[:1] if target.owner is not None else ()
    roots: Mapping[str, str | None] = {
        "argument": "MODEL" if own == (name,) else None,
        "global": f"GLOBALS[{name!r}]",
    }
    yield roots.get(kind)
    for step in steps:
        match step:
            case ["attribute", str(attribute)] if attribute.isidentifier():
                yield f".{attribute}"
            case ["item", str() | int() as key]:
                yield f"[{key!r}]"
            case _:
                yield None
