"""Facts: what a trace read of the model besides its tensors, as plain data that another process can compare.

A fact is a place, a question and its answer: `self.norm.eps` was 1e-05, `self` had no attribute `scale`. Dynamo would
check all of it at each call, by guards on live objects; facts are written once, stored with the program, and asked
again when it is loaded. Looking a fact up follows steps of a few kinds (`pieces.places`) and asks one of the questions
below; no stored expression is evaluated. `builder.trace.guard_facts` makes facts of guards. The code that was traced
is compared by `model.code`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from torchloom.pieces.places import value_at
from torchloom.serve.model.environment import setting_of, settings_like
from torchloom.serve.model.operators import operator_words
from torchloom.serve.model.shared_memory import shared_with
from torchloom.serve.model.spelling import exact, name_of, type_words, words_for

_STEP = re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']+)'\]")
Facts = Mapping[str, Mapping[str, Any]]
"""What was found, by a name for people: `{"place": [["argument", "self"], ...], "was": "1e-05"}`, and with
"ask" what was asked of it, where that is not its value."""


def _type_of(value: Any) -> str:
    return words_for(value) if isinstance(value, nn.Module) else type_words(type(value))


def _length_of(value: Any) -> str:
    return (
        f"of length {value.__length_hint__() if hasattr(value, '__length_hint__') else len(value)}"
    )


def _keys_of(value: Any) -> str:
    return f"with the keys {words_for(list(value))}"


def _members_of(value: Any) -> str:
    members = {name: each.value for name, each in value.__members__.items()}
    return f"with the members {words_for(members)}"


_QUESTIONS: Mapping[str, Callable[[Any], str]] = {
    "value": words_for,
    "type": _type_of,
    "length": _length_of,
    "keys": _keys_of,
    "order": lambda value: f"in the order {exact(list(value))}",
    "members": _members_of,
    "annotations": lambda value: f"with {words_for(dict(value.__annotations__))}",
    "operator": operator_words,
}
"""What is asked of a value."""


def _has(value: Any, name: str) -> str:
    return f"with {name}" if hasattr(value, name) else f"without {name}"


def _has_own(value: Any, name: str) -> str:
    own = getattr(value, "__dict__", {})
    return f"with {name} of its own" if name in own else f"without {name} of its own"


def _contains(value: Any, key: Any) -> str:
    return f"with {key!r}" if key in value else f"without {key!r}"


def _contains_class(value: Any, name: str) -> str:
    is_there = any(isinstance(key, type) and name_of(key) == name for key in value)
    return f"with {name}" if is_there else f"without {name}"


_QUESTIONS_BY_NAME: Mapping[str, Callable[[Any, Any], str]] = {
    "has": _has,
    "has own": _has_own,
    "contains": _contains,
    "contains class": _contains_class,
    "environ": setting_of,
    "environ like": settings_like,
}
"""What is asked of a value and a name or key."""
_QUESTIONS_OF_TWO: Mapping[str, Callable[[Any, Any], str]] = {
    "same as": lambda value, other: "the same object" if value is other else "another object",
    "instance": lambda value, other: "an instance" if isinstance(value, other) else "no instance",
    "subclass": lambda value, other: "a subclass" if issubclass(value, other) else "no subclass",
}
"""What is asked of the values at two places."""


def _which_of(value: Any, others: Sequence[Any]) -> str:
    which = next(i for i, each in enumerate(others) if each is value)
    return f"{type_words(type(value))}, number {which}"


def _one_object(_: Any, others: Sequence[Any]) -> str:
    first: dict[int, int] = {}
    same = [(n, first.setdefault(id(each), n)) for n, each in enumerate(others)]
    return ", ".join(f"number {n} as number {m}" for n, m in same if n != m) or "none of them"


_QUESTIONS_OF_MANY: Mapping[str, Callable[[Any, Sequence[Any]], str]] = {
    "which of": _which_of,
    "one object": _one_object,
    "memory": shared_with,
}


class Asker:
    """Answers what facts ask.

    Args:
        scope: the values of `L` and `G`, where places begin.
    """

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self._scope = scope

    def answer(self, place: Any, ask: Sequence[Any]) -> str:
        """Return what is to be said of a place.

        Args:
            place: the steps to the value.
            ask: the question, and what else it is about: a name, or other places.

        Raises:
            ValueError: there is no such question.
        """
        value = value_at(place, self._scope)
        match list(ask):
            case [str(question)] if question in _QUESTIONS:
                return _QUESTIONS[question](value)
            case [str(question), name] if question in _QUESTIONS_BY_NAME:
                return _QUESTIONS_BY_NAME[question](value, name)
            case [str(question), other] if question in _QUESTIONS_OF_TWO:
                return _QUESTIONS_OF_TWO[question](value, value_at(other, self._scope))
            case [str(question), [*places]] if question in _QUESTIONS_OF_MANY:
                others = [value_at(each, self._scope) for each in places]
                return _QUESTIONS_OF_MANY[question](value, others)
        raise ValueError(f"{ask!r} is no question")


def changed_facts(facts: Facts, scope: Mapping[str, Any]) -> list[str]:
    """Say which facts no longer hold, one line each."""
    asker, lines = Asker(scope), []
    for source, fact in facts.items():
        try:
            now = asker.answer(fact["place"], fact.get("ask", ["value"]))
        except Exception as error:  # noqa: BLE001 - attributes may raise anything
            now = f"gone ({type(error).__name__})"
        if now != fact["was"]:
            lines.append(f"{readable(source)} was {fact['was']}, is {now}")
    return lines


def readable(source: str) -> str:
    """Return a source as a user would write it.

    Example:
        >>> readable("L['self']._modules['layers']._modules['0'].eps")
        'self.layers.0.eps'
    """
    text = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source)
    return _STEP.sub(r".\1", text)
