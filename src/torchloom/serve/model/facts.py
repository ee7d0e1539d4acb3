"""Facts: what Dynamo guards of a model, as questions and answers that another process can compare.

A fact is an expression (`model.expressions`) and what it stood for, in words: `self.norm.eps` was 1e-05,
`hasattr(self, 'scale')` was False. Dynamo would check all of it at each call, by guards on live objects; facts are written
once, stored with the program, and asked again when it is loaded. A guard that is no such question is listed, and its
program is not stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchloom._torch.full_capture import GuardOn
from torchloom._torch.operators import Operator, schemas_of, traced_functions
from torchloom.serve.model.code import CodeReader, is_installed
from torchloom.serve.model.expressions import NAMES, Words, evaluate, portable
from torchloom.serve.model.spelling import NotExactError, exact, name_of, type_words, words_for

Facts = Mapping[str, str]
"""Expressions, and what they stood for."""

_OF_THE_CALL = frozenset(
    {"SHAPE_ENV", "GRAD_MODE", "DYNAMIC_INDICES", "DUAL_LEVEL", "FSDP_TRAINING_STATE"}
)
"""Guards on what each call asks for itself, or the proof of sizes holds."""
_LENGTHS = frozenset(
    {
        *("SEQUENCE_LENGTH", "LIST_LENGTH", "DICT_LENGTH", "TUPLE_ITERATOR_LEN"),
        "EMPTY_NN_MODULE_HOOKS_DICT",
    }
)
_KEYS = frozenset({"DICT_KEYS_MATCH", "DICT_KEYS", "DICT_CONST_KEYS", "MAPPING_KEYS_CHECK"})
_QUESTIONS: Mapping[str, str] = {
    **dict.fromkeys(_LENGTHS, "len({0})"),
    **dict.fromkeys(_KEYS, "list({0}.keys())"),
    **dict.fromkeys(("TYPE_MATCH", "NN_MODULE"), "kind({0})"),
    "HASATTR": "hasattr({0}, {1!r})",
    "NOT_PRESENT_IN_GENERIC_DICT": "{1!r} in {0}.__dict__",
    "OPERATOR": "operator({0})",
}
"""What guards ask of a value and, for some, a name."""
_CONTAINS = frozenset({"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"})
_IDENTITY = frozenset({"ID_MATCH", "WEAKREF_ALIVE"})
_PLAIN = (str, int, float, bool, type(None))
_NAMED = re.compile(r"(?:module\('[\w.]+'\)|G\['\w+'\])(?:\.\w+)*")
"""A global, or what names lead to from a module."""
_STEPS = (
    (re.compile(r"\b[LG]\['(\w+)'\]|\bmodule\('([\w.]+)'\)"), r"\1\2"),
    (re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']+)'\]"), r".\1"),
)
"""What users write in another way."""


class Asker:
    """Answers what facts ask.

    Args:
        scope: the values of `L` and `G`, and of what else expressions name.
        reader: of code, which several may share.
    """

    def __init__(self, scope: Mapping[str, Any], reader: CodeReader | None = None) -> None:
        self.reader = reader or CodeReader()
        own = {"kind": self._kind, "operator": self._operator, "has_class": _has_class}
        self._names = {**NAMES, **scope, **own}

    def value(self, expression: str) -> Any:
        """Return what an expression stands for."""
        return evaluate(expression, self._names)

    def answer(self, expression: str) -> str:
        """Return what is to be said of it."""
        value = self.value(expression)
        if isinstance(value, Words):
            return value
        if isinstance(value, nn.Module):
            return self._kind(value)
        return words_for(value) + self.reader.words(value)

    def _kind(self, value: Any) -> Words:
        words = words_for(value) if isinstance(value, nn.Module) else type_words(type(value))
        return Words(words + self.reader.words(type(value)))

    def _operator(self, operator: Operator) -> Words:
        """Return schemas, and the code that stands for an operator in a trace."""
        code = [f"{kind}{self.reader.words(each)}" for kind, each in traced_functions(operator)]
        return Words("; ".join([*schemas_of(operator), *code]))


def _has_class(value: Iterable[Any], name: str) -> bool:
    return any(name_of(key) == name for key in value if isinstance(key, type))


def facts_of(
    guards: Iterable[GuardOn],
    asker: Asker,
    varying: Sequence[str],
    modules: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Return what each guard stood for, in words, and those that cannot be written down.

    Args:
        guards: of the trace.
        asker: answers.
        varying: expressions for what may differ from call to call.
        modules: what the trace called modules among the globals.
    """
    found: dict[str, str] = {}
    unwritten: list[str] = []
    for guard in guards:
        if not guard.source or guard.kind in _OF_THE_CALL:
            continue
        named = (guard.source, guard.other or "")
        if any(each.startswith(tuple(varying)) for each in named if each):
            continue
        try:
            first, other = (portable(each, modules or {}, asker.value) for each in named)
            if first is None or _is_of_process(guard, first, asker):
                continue
            if guard.other and other is None:
                raise NotExactError(guard.other)
            question = f"{first} is {other}" if other else _question(guard, first, asker)
            found[question] = asker.answer(question)
        except Exception:  # noqa: BLE001 - no expression, no spelling, and attributes may raise anything
            unwritten.append(readable(guard.source))
    return found, list(dict.fromkeys(unwritten))


def _question(guard: GuardOn, source: str, asker: Asker) -> str:
    """Return what a guard asks, as an expression with an exact answer.

    Raises:
        NotExactError: there is none.
    """
    kind, name, question = guard.kind, guard.name, source
    if kind in _QUESTIONS:
        question = _QUESTIONS[kind].format(source, name)
    elif kind in _CONTAINS and type(name) in _PLAIN:
        question = f"{name!r} in {source}"
    elif kind in _CONTAINS and isinstance(name, type):
        question = f"has_class({source}, {name_of(name)!r})"
    elif kind in _CONTAINS:
        question = f"list({source})"
    value = asker.value(question)
    try:
        if not isinstance(value, (Tensor, nn.Module, Words)):
            exact(value)
    except NotExactError:
        if kind not in _IDENTITY:
            raise
        return f"kind({source})"
    return question


def _is_of_process(guard: GuardOn, source: str, asker: Asker) -> bool:
    """Return whether a guard is on Dynamo's own things, or on how many and which keys a registry of a library has.

    The version of torch stands for the first. Registries, dicts that are globals of an installed package, grow with each model
    that a process makes (transformers keeps one by class): what a trace looked for in one has a guard of its own.
    """
    if re.search(r"module\('torch\._dynamo\b", source):
        return True
    named = _NAMED.search(source)
    if named is None or not isinstance(asker.value(named[0]), dict):
        return False
    module = named[0].rpartition(".")[0]
    holder = vars(asker.value(module)) if module else asker.value("G")
    if not is_installed(str(holder.get("__file__"))):
        return False
    before, after = source[: named.start()], source[named.end() :]
    if not before and not after:
        return guard.kind in _LENGTHS | _KEYS
    is_made = before.endswith(("keys(", "list(", "dict(", "type("))
    return is_made or after.startswith(("[list(keys(", ", list(keys("))  # keys that are no texts


def changed_facts(
    facts: Facts, scope: Mapping[str, Any], reader: CodeReader | None = None
) -> list[str]:
    """Say which facts no longer hold, one line each."""
    asker, lines = Asker(scope, reader), []
    for question, was in facts.items():
        try:
            now = asker.answer(question)
        except Exception as error:  # noqa: BLE001 - attributes may raise anything
            now = f"gone ({type(error).__name__})"
        if now != was:
            lines.append(f"{readable(question)} was {was}, is {now}")
    return lines


def readable(source: str) -> str:
    """Return a source as a user would write it.

    Example:
        >>> readable("L['self']._modules['layers']._modules['0'].eps")
        'self.layers.0.eps'
    """
    for pattern, words in _STEPS:
        source = pattern.sub(words, source)
    return source
