"""Facts from guards: each guard of a trace becomes one fact that asks the same of the model.

Dynamo's guards compare live objects. A fact asks the same question in words that can be stored
(`model.facts`). A guard for which there are no words is listed, and its program is not stored.
"""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchloom._torch.full_capture import GuardOn
from torchloom.envs import environment
from torchloom.pieces.places import ENVIRON, NoPlaceError, Place, place_of, settled, value_at
from torchloom.serve.model.environment import variable_of
from torchloom.serve.model.facts import Asker, readable
from torchloom.serve.model.hooks import HOOKS, OF_MODULES
from torchloom.serve.model.spelling import NotExactError, exact, name_of

_OF_THE_CALL = frozenset(
    {"SHAPE_ENV", "GRAD_MODE", "DYNAMIC_INDICES", "DUAL_LEVEL", "FSDP_TRAINING_STATE"}
)
"""Guards on what each call asks for itself, or the proof of sizes holds."""
_LENGTHS = (
    *("SEQUENCE_LENGTH", "LIST_LENGTH", "DICT_LENGTH", "TUPLE_ITERATOR_LEN"),
    *("EMPTY_NN_MODULE_HOOKS_DICT",),
)
_OF_ONE: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(_LENGTHS, ("length", "len({0})")),
    "HASATTR": ("has", "hasattr({0}, {1!r})"),
    "NOT_PRESENT_IN_GENERIC_DICT": ("has own", "{1!r} in vars({0})"),
    "KEYS": ("keys", "keys of {0}"),
    "ORDER": ("order", "the set {0} (PYTHONHASHSEED)"),
    "OPERATOR": ("operator", "operator {0}"),
    "ENVIRON": ("environ", "{1} of the environment"),
    "ENVIRON_LIKE": ("environ like", "variables of the environment with {1}"),
    "MEMBERS": ("members", "enum {0}"),
    "ANNOTATIONS": ("annotations", "annotations of {0}"),
}
"""What guards ask of a value and, for some, a name, and what people call that."""
_OF_TWO: Mapping[str, tuple[str, str]] = {
    "INSTANCE": ("instance", "isinstance({0}, {1})"),
    "SUBCLASS": ("subclass", "issubclass({0}, {1})"),
}
_KEYS = frozenset({"DICT_KEYS_MATCH", "DICT_KEYS", "DICT_CONST_KEYS", "MAPPING_KEYS_CHECK"})
_CONTAINS = frozenset({"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"})
_IDENTITY = frozenset({"ID_MATCH", "WEAKREF_ALIVE"})
_NAMES = (str, int, float, bool, type(None))


def _is_of_dynamo(place: Place) -> bool:
    """Return whether something is Dynamo's own, which the version of torch in the key fixes; loads do not import it."""
    kind, name, *_ = place[0]
    return kind == "module" and re.match(r"torch\._dynamo\b", str(name)) is not None


def _is_of_torch(place: Place) -> bool:
    """Return whether something is what a module of torch's holds, such as a registry."""
    (kind, name, *_), *steps = place
    is_named = all(step[0] in ("attribute", "submodule") for step in steps)
    return kind == "module" and is_named and str(name).partition(".")[0] == "torch"


def _may_be_compared(place: Place, value: Any) -> bool:
    """Return whether something is an object or container of the model's: other values are one by chance."""
    (kind, *_), *steps = place
    if kind not in ("argument", "global") or not steps or steps[-1][-1] in (*HOOKS, *OF_MODULES):
        return False
    if isinstance(value, (nn.Module, list, dict, set)):
        return True
    return hasattr(value, "__dict__") and not isinstance(
        value, (Tensor, type, enum.Enum, types.ModuleType, types.FunctionType, types.MethodType)
    )


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
        self._scope, self._asker = scope, Asker(scope)
        self._place_of = partial(place_of, modules=modules, scopes=scopes)
        self._skipped = tuple(varying)
        self._found: dict[str, dict[str, Any]] = {}
        self._unwritten: list[str] = []
        self._objects: dict[str, Any] = {}
        """Places of objects without a spelling that were compared by identity."""
        self._tensors: dict[str, Any] = {}
        """Places of tensors that may share memory."""
        self._mutable: dict[str, Any] = {}
        """Places of the model's objects and containers, of which code may ask whether they are one."""
        self._others: list[str] = []
        """Of these, the ones that are no weights, whose memory is no part of the key."""

    def add(self, guard: GuardOn) -> None:
        if not guard.source or guard.kind in _OF_THE_CALL or guard.source.startswith(self._skipped):
            return
        if guard.other is not None and guard.other.startswith(self._skipped):
            return
        try:
            guard = self._of_environ(guard)
            place = self._place_of(guard.source)
            if place is None or (guard.kind in _KEYS and _is_of_torch(place)):
                return  # registries grow by imports; what a trace looked for in one has a guard of its own
            if not _is_of_dynamo(place):
                place = settled(place, self._scope)
                if _may_be_compared(place, value_at(place, self._scope)):
                    self._mutable[guard.source] = place
                self._ask(guard, place)
        except Exception:  # noqa: BLE001 - no place, no spelling, and attributes may raise anything
            self._unwritten.append(readable(guard.source))

    def _of_environ(self, guard: GuardOn) -> GuardOn:
        """Return a guard on a variable of the environment as one that asks for it by name."""
        variable = variable_of(guard.source)
        if variable is None:
            return guard
        place = self._place_of(variable[0])
        is_environ = place is not None and value_at(place, self._scope) is environment()
        return GuardOn("ENVIRON", ENVIRON, variable[1]) if is_environ else guard

    def finish(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        places = list(self._objects.values())
        for source, place in self._objects.items():
            self._put(source, place, ["which of", places])
        if len(self._mutable) > 1:
            places = list(self._mutable.values())
            self._put("what is one object", places[0], ["one object", places])
        for source in self._others if len(self._tensors) > 1 else ():
            ask = ["memory", list(self._tensors.values())]
            self._put(f"memory of {source}", self._tensors[source], ask)
        return self._found, list(dict.fromkeys(self._unwritten))

    def _ask(self, guard: GuardOn, place: list[list[Any]]) -> None:
        kind, source, name = guard.kind, guard.source, guard.name
        if guard.other is not None:
            other = self._place_of(guard.other)
            if other is None:
                raise NoPlaceError(guard.other)
            question, label = _OF_TWO.get(kind, ("same as", "{} is {}"))
            ask = [question, settled(other, self._scope)]
            self._put(label.format(source, guard.other), place, ask)
        elif kind in _OF_ONE:
            question, label = _OF_ONE[kind]
            ask = [question] if name is None else [question, name]
            self._put(label.format(source, name), place, ask)
        elif kind == "MEMORY":
            self._tensors[source] = place
            if name is not None:
                self._others.append(source)
        elif kind in _CONTAINS and type(name) in _NAMES:
            self._put(f"{name!r} in {source}", place, ["contains", name])
        elif kind in _CONTAINS and isinstance(name, type):  # of registries, which grow by imports
            self._put(f"{name_of(name)} in {source}", place, ["contains class", name_of(name)])
        elif kind in _CONTAINS:
            exact(list(value_at(place, self._scope)))
            self._put(source, place, ["value"])
        elif kind in _KEYS:
            exact(list(value_at(place, self._scope).keys()))
            self._put(f"keys of {source}", place, ["keys"])
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
