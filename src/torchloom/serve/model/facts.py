"""Facts: what Dynamo guards of a model, as plain data that another process can compare.

A fact is a place, a question and its answer: `self.norm.eps` was 1e-05, `self` had no attribute `scale`. Dynamo would
check all of it at each call, by guards on live objects; facts are written once, stored with the program, and asked
again when it is loaded. Looking a fact up follows steps of a few kinds (`pieces.places`) and asks one of the questions
below; no stored expression is evaluated. A guard that is none of these is listed, and its program is not stored.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchloom._torch.full_capture import GuardOn
from torchloom._torch.operators import Operator, schemas_of, traced_functions
from torchloom.envs import environment
from torchloom.pieces.places import ENVIRON, NoPlaceError, Place, place_of, settled, value_at
from torchloom.serve.model.code import CodeReader, is_installed
from torchloom.serve.model.spelling import NotExactError, exact, name_of, type_words, words_for

Facts = Mapping[str, Mapping[str, Any]]
"""What was found, by a name for people: `{"place": [["argument", "self"], ...], "was": "1e-05"}`, and with
"ask" what was asked of it, where that is not its value."""

_OF_THE_CALL = frozenset(
    {"SHAPE_ENV", "GRAD_MODE", "DYNAMIC_INDICES", "DUAL_LEVEL", "FSDP_TRAINING_STATE"}
)
"""Guards on what each call asks for itself, or the proof of sizes holds."""
_OF_ONE: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            *("SEQUENCE_LENGTH", "LIST_LENGTH", "DICT_LENGTH", "TUPLE_ITERATOR_LEN"),
            "EMPTY_NN_MODULE_HOOKS_DICT",
        ),
        ("length", "len({0})"),
    ),
    **dict.fromkeys(("TYPE_MATCH", "NN_MODULE"), ("type", "type({0})")),
    **dict.fromkeys(
        ("DICT_KEYS_MATCH", "DICT_KEYS", "DICT_CONST_KEYS", "MAPPING_KEYS_CHECK"),
        ("keys", "keys of {0}"),
    ),
    "HASATTR": ("has", "hasattr({0}, {1!r})"),
    "NOT_PRESENT_IN_GENERIC_DICT": ("has own", "{1!r} in vars({0})"),
    "OPERATOR": ("operator", "operator {0}"),
    "ENVIRON": ("environ", "{1} of the environment"),
}
"""What guards ask of a value and, for some, a name, and what people call that."""
_CONTAINS = frozenset({"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"})
_IDENTITY = frozenset({"ID_MATCH", "WEAKREF_ALIVE"})
_NAMES = (str, int, float, bool, type(None))
_VARIABLE = re.compile(r"(.+)\._data\[(b'[^']*')\]")
_MODULE_STEP = re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']+)'\]")


class Asker:
    """Answers what facts ask.

    Args:
        scope: the values of `L` and `G`, where places begin.
        reader: of code, which several may share.
    """

    def __init__(self, scope: Mapping[str, Any], reader: CodeReader | None = None) -> None:
        self._scope = scope
        self.reader = reader or CodeReader()
        self._questions: Mapping[str, Callable[..., str]] = {
            "value": self._value,
            "type": self._type,
            "length": _length,
            "keys": lambda value: f"with the keys {exact(list(value.keys()))}",
            "has": lambda value, name: _with(name, there=hasattr(value, name)),
            "has own": lambda value, name: _with(
                name, there=name in getattr(value, "__dict__", ())
            ),
            "contains": lambda value, key: _with(key, there=key in value),
            "contains class": lambda value, name: _with(
                name, there=any(name_of(key) == name for key in value if isinstance(key, type))
            ),
            "environ": _setting,
            "operator": self._operator,
        }

    def answer(self, place: Any, ask: Sequence[Any]) -> str:
        """Return what is to be said of a place.

        Args:
            place: the steps to the value.
            ask: the question, and the name or the other place that it is about.

        Raises:
            ValueError: there is no such question.
        """
        value = value_at(place, self._scope)
        match list(ask):
            case ["same as", other]:
                is_same = value is value_at(other, self._scope)
                return "the same object" if is_same else "another object"
            case [str(question), *names] if question in self._questions:
                return self._questions[question](value, *names)
        raise ValueError(f"{ask!r} is no question")

    def _value(self, value: Any) -> str:
        return (
            self._type(value)
            if isinstance(value, nn.Module)
            else words_for(value) + self.reader.words(value)
        )

    def _type(self, value: Any) -> str:
        words = words_for(value) if isinstance(value, nn.Module) else type_words(type(value))
        return words + self.reader.words(type(value))

    def _operator(self, operator: Operator) -> str:
        """Return schemas, and the code that stands for an operator in a trace."""
        code = [f"{kind}{self.reader.words(each)}" for kind, each in traced_functions(operator)]
        return "; ".join([*schemas_of(operator), *code])


def facts_of(
    guards: Iterable[GuardOn],
    asker: Asker,
    scope: Mapping[str, Any],
    varying: Sequence[str],
    modules: Mapping[str, str] | None = None,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return what each guard stood for, in words, and those that cannot be written down.

    Args:
        guards: of the trace.
        asker: answers for `scope`.
        scope: the values of `L` and `G`.
        varying: expressions for what may differ from call to call.
        modules: what the trace called modules among the globals.
    """
    found: dict[str, dict[str, Any]] = {}
    unwritten: list[str] = []

    def place(source: str) -> list[list[Any]] | None:
        found = place_of(source, modules or {})
        return None if found is None else settled(found, scope)

    for guard in guards:
        if not guard.source or guard.kind in _OF_THE_CALL:
            continue
        if any(each.startswith(tuple(varying)) for each in (guard.source, guard.other) if each):
            continue
        try:
            guard = _of_environ(guard)
            where = place(guard.source)
            if where is None or _is_of_process(guard, where, scope):
                continue
            name, ask = _question(guard, where, scope, place)
            fact = {"place": where, "was": asker.answer(where, ask)}
        except Exception:  # noqa: BLE001 - no place, no spelling, and attributes may raise anything
            unwritten.append(readable(guard.source))
            continue
        found[name] = fact if ask == ["value"] else {**fact, "ask": ask}
    return found, list(dict.fromkeys(unwritten))


def _question(
    guard: GuardOn,
    where: Place,
    scope: Mapping[str, Any],
    place: Callable[[str], list[list[Any]] | None],
) -> tuple[str, list[Any]]:
    """Return what a guard asks, under a name for people."""
    kind, source, name = guard.kind, guard.source, guard.name
    if guard.other is not None:
        other = place(guard.other)
        if other is None:
            raise NoPlaceError(guard.other)
        return f"{source} is {guard.other}", ["same as", other]
    if kind in _OF_ONE:
        question, label = _OF_ONE[kind]
        return label.format(source, name), [question] if name is None else [question, name]
    if kind in _CONTAINS and type(name) in _NAMES:
        return f"{name!r} in {source}", ["contains", name]
    if kind in _CONTAINS and isinstance(name, type):
        return f"{name_of(name)} in {source}", ["contains class", name_of(name)]
    value = value_at(where, scope)
    try:
        if not isinstance(value, (Tensor, nn.Module)):
            exact(list(value) if kind in _CONTAINS else value)
    except NotExactError:
        if kind not in _IDENTITY:
            raise
        return f"type({source})", ["type"]
    return source, ["value"]


def _of_environ(guard: GuardOn) -> GuardOn:
    """Return a guard on a variable of the environment as one that asks for it by name."""
    variable = _VARIABLE.fullmatch(guard.source)
    if variable is None or os.name != "posix" or not variable[1].endswith("environ"):
        return guard
    return GuardOn("ENVIRON", ENVIRON, os.fsdecode(ast.literal_eval(variable[2])))


def _is_of_process(guard: GuardOn, place: Place, scope: Mapping[str, Any]) -> bool:
    """Return whether a guard is on Dynamo's own things, or on how many and which keys a registry of a library has.

    The version of torch stands for the first. Registries, dicts that are globals of an installed package, grow with each model
    that a process makes (transformers keeps one by class): what a trace looked for in one has a guard of its own.
    """
    (kind, name, *_), *steps = place
    if kind not in ("module", "global"):
        return False
    if kind == "module" and re.match(r"torch\._dynamo\b", str(name)):
        return True
    is_named = [step[0] in ("attribute", "submodule") for step in steps]
    num_names = is_named.index(False) if False in is_named else len(steps)
    if not isinstance(value_at(place[: num_names + 1], scope), dict):
        return False
    holder = vars(value_at(place[:num_names], scope)) if num_names else scope["G"]
    if not is_installed(str(holder.get("__file__"))):
        return False
    if num_names < len(steps):
        return steps[num_names][0] in ("applied", "item at", "dict item at")
    return _OF_ONE.get(guard.kind, ("",))[0] in ("keys", "length")


def _length(value: Any) -> str:
    return (
        f"of length {value.__length_hint__() if hasattr(value, '__length_hint__') else len(value)}"
    )


def _with(name: Any, *, there: bool) -> str:
    return f"{'with' if there else 'without'} {name!r}"


def _setting(_: Any, name: str) -> str:
    """Return what a variable is set to, in words that do not give it away."""
    value = environment().get(name)
    if value is None:
        return "not set"
    digest = hashlib.blake2b(value.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return f"set ({digest})"


def changed_facts(
    facts: Facts, scope: Mapping[str, Any], reader: CodeReader | None = None
) -> list[str]:
    """Say which facts no longer hold, one line each."""
    asker, lines = Asker(scope, reader), []
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
    return _MODULE_STEP.sub(r".\1", text)
