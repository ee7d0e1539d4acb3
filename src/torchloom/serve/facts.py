"""What a trace read besides its tensors: constants, attributes, what is there and what is not.

A compiler would look at all of it at each call. Here it is written down once, in words that can be stored and
compared: `self.norm.eps` was 1e-05, `self` had no attribute `scale`. Each guard of Dynamo's becomes one fact that
asks the same. Looking a fact up evaluates nothing: it follows steps of a few kinds (`_torch.places`). What no
words stand for is said, and its program is not stored. Code is compared apart from this (`serve.code`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchloom._torch.places import GuardOn, NoPlaceError, Place, place_of, settled, value_at
from torchloom.serve.words import NotExactError, exact, type_words, words_for

_STEP = re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']+)'\]")
_OF_THE_CALL = frozenset(
    {"SHAPE_ENV", "GRAD_MODE", "DYNAMIC_INDICES", "DUAL_LEVEL", "FSDP_TRAINING_STATE"}
)
"""Guards on what each call asks for itself, or the proof of sizes holds."""
_LENGTHS = frozenset(
    {
        *("SEQUENCE_LENGTH", "LIST_LENGTH", "DICT_LENGTH", "TUPLE_ITERATOR_LEN"),
        *("EMPTY_NN_MODULE_HOOKS_DICT",),
    }
)
_KEYS = frozenset({"DICT_KEYS_MATCH", "DICT_KEYS", "DICT_CONST_KEYS", "MAPPING_KEYS_CHECK"})
_CONTAINS = frozenset({"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"})
_IDENTITY = frozenset({"ID_MATCH", "WEAKREF_ALIVE"})
_NAMES = (str, int, float, bool, type(None))


Facts = Mapping[str, Mapping[str, Any]]
"""What was found, by a name for people: `{"place": [["argument", "self"], ...], "was": "1e-05"}`, and with
"ask" what was asked of it, where that is not its value."""


class _Asker:
    """Answers what facts ask."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self._scope = scope

    def answer(self, place: Any, ask: Sequence[Any]) -> str:  # noqa: PLR0911 - one for each question
        value = value_at(place, self._scope)
        match list(ask):
            case ["value"]:
                return words_for(value)
            case ["type"]:
                return words_for(value) if isinstance(value, nn.Module) else type_words(type(value))
            case ["has", str(name)]:
                return f"with {name}" if hasattr(value, name) else f"without {name}"
            case ["has own", str(name)]:
                own = getattr(value, "__dict__", {})
                return f"with {name} of its own" if name in own else f"without {name} of its own"
            case ["contains", key]:
                return f"with {key!r}" if key in value else f"without {key!r}"
            case ["length"]:
                return f"of length {value.__length_hint__() if hasattr(value, '__length_hint__') else len(value)}"
            case ["order"]:
                return f"in the order {words_for(list(value))}"
            case ["keys"]:
                return f"with the keys {words_for(list(value.keys()))}"
            case ["same as", other]:
                same = value is value_at(other, self._scope)
                return "the same object" if same else "another object"
            case ["which of", [*places]]:
                objects = [value_at(each, self._scope) for each in places]
                which = next(i for i, each in enumerate(objects) if each is value)
                return f"{type_words(type(value))}, number {which}"
        raise ValueError(f"{ask!r} is no question")


def facts_of(
    guards: Iterable[GuardOn],
    scope: Mapping[str, Any],
    varying: Sequence[str],
    modules: Mapping[str, str] | None = None,
    scopes: Mapping[int, Place] | None = None,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return what each guard stood for, in words, and those that cannot be written down.

    Args:
        guards: of the trace.
        scope: the values of `L` and `G`.
        varying: expressions for what may differ from call to call.
        modules: what the trace called modules among the globals.
        scopes: places of globals that are no module's, by their `id`.
    """
    finder = _Finder(scope, varying, modules or {}, scopes or {})
    for guard in guards:
        finder.add(guard)
    return finder.finish()


class _Finder:
    def __init__(
        self,
        scope: Mapping[str, Any],
        varying: Sequence[str],
        modules: Mapping[str, str],
        scopes: Mapping[int, Place],
    ) -> None:
        self._scope, self._asker = scope, _Asker(scope)
        self._place_of = partial(place_of, modules=modules, scopes=scopes)
        self._skipped = tuple(varying)
        self._found: dict[str, dict[str, Any]] = {}
        self._unwritten: list[str] = []
        self._objects: dict[str, Any] = {}
        """Places of objects without a spelling that were compared by identity."""

    def add(self, guard: GuardOn) -> None:
        if not guard.source or guard.kind in _OF_THE_CALL or guard.source.startswith(self._skipped):
            return
        if guard.other is not None and guard.other.startswith(self._skipped):
            return
        try:
            place = self._place_of(guard.source)
            if place is not None:
                self._ask(guard, settled(place, self._scope))
        except Exception:  # noqa: BLE001 - no place, no spelling, and attributes may raise anything
            self._unwritten.append(readable(guard.source))

    def finish(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        places = list(self._objects.values())
        for source, place in self._objects.items():
            self._put(source, place, ["which of", places])
        return self._found, list(dict.fromkeys(self._unwritten))

    def _ask(self, guard: GuardOn, place: list[list[Any]]) -> None:
        kind, source, name = guard.kind, guard.source, guard.name
        if guard.other is not None:
            other = self._place_of(guard.other)
            if other is None:
                raise NoPlaceError(guard.other)
            other = settled(other, self._scope)
            self._put(f"{source} is {guard.other}", place, ["same as", other])
        elif kind == "HASATTR":
            self._put(f"hasattr({source}, {name!r})", place, ["has", name])
        elif kind == "NOT_PRESENT_IN_GENERIC_DICT":
            self._put(f"{name!r} in vars({source})", place, ["has own", name])
        elif kind in _CONTAINS and type(name) in _NAMES:
            self._put(f"{name!r} in {source}", place, ["contains", name])
        elif kind in _CONTAINS:
            exact(list(value_at(place, self._scope)))
            self._put(source, place, ["value"])
        elif kind in _LENGTHS:
            self._put(f"len({source})", place, ["length"])
        elif kind in _KEYS:
            exact(list(value_at(place, self._scope).keys()))
            self._put(f"keys of {source}", place, ["keys"])
        elif kind == "ORDER":
            exact(list(value_at(place, self._scope)))
            self._put(f"the set {source} (PYTHONHASHSEED)", place, ["order"])
        elif kind in ("TYPE_MATCH", "NN_MODULE"):
            self._put(f"type({source})", place, ["type"])
        elif kind == "TENSOR_MATCH":
            self._put(source, place, ["value"])
        else:
            self._value(kind, source, place)

    def _value(self, kind: str, source: str, place: list[list[Any]]) -> None:
        value = value_at(place, self._scope)
        try:
            if not isinstance(value, (Tensor, nn.Module)):
                exact(value)
        except NotExactError:
            if kind not in _IDENTITY:
                raise
            self._objects[source] = place
            return
        self._put(source, place, ["value"])

    def _put(self, name: str, place: list[list[Any]], ask: list[Any]) -> None:
        fact = {"place": place, "was": self._asker.answer(place, ask)}
        self._found[name] = fact if ask == ["value"] else {**fact, "ask": ask}


def changed_facts(facts: Facts, scope: Mapping[str, Any]) -> list[str]:
    """Say which facts no longer hold, one line each."""
    asker, lines = _Asker(scope), []
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
