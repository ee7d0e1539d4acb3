"""Values that traces read of a living model: each call compares them, by identity, with what was there.

Facts say where a trace looked (`model.facts`). What leads there is kept: attributes of modules, configs and classes, entries
of dicts and lists, lengths. One generated condition asks for all of it, at about 30 ns each:

    holder['eps'] is value and holder['layers'] is value2 and 'forward' not in holder2 and len(holder3) == 4

A value that is another object now need not differ in what the trace read: `Program` then compares the facts, and
keeps the new values where all of them hold. Tensors are left to `weight_checks`.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchloom._torch.untraced import leave_alone
from torchloom.pieces.places import Place
from torchloom.serve.contract.conditions import put
from torchloom.serve.model.facts import Facts
from torchloom.serve.model.hooks import HOOKS, OF_MODULES
from torchloom.serve.model.target import Target

_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
"""What places lead into and facts have digests of when a program is loaded."""
_SIZED = (dict, list, set)
_ABSENT = object()

_STORES = frozenset({"STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF"})
_WRITERS = frozenset(
    {"object_setattr_ignore_descriptor", "update", "clear", "extend", "pop", "insert"}
)


class ReadValues:
    """Compares what traces read of a model with what it is now.

    Args:
        facts: of programs.
        target: what is served.
    """

    def __init__(self, facts: Iterable[Facts], target: Target) -> None:
        found = _Values(target)
        if isinstance(target.call, nn.Module):
            found.add_forward(target.call)
        for each in facts:
            for fact in each.values():
                found.add(fact["place"], fact.get("ask", ["value"]))
        self._conditions, self._scope = list(found.conditions), found.scope
        self.hold = self._made(self._conditions)
        """Says whether nothing is another object; raises where something is gone."""

    def drop_changed(self) -> None:
        """Compare no longer what is another object now: the program itself puts it there."""
        self._conditions = [each for each in self._conditions if holds(self._made([each]))]
        self.hold = self._made(self._conditions)

    def _made(self, conditions: Sequence[str]) -> Callable[[], bool]:
        text = f"def hold():\n    return {' and '.join(conditions) or 'True'}"
        exec(compile(text, "<torchloom values>", "exec"), self._scope)
        hold: Callable[[], bool] = self._scope["hold"]
        leave_alone(hold, "programs of torchloom.serve are compiled already")
        return hold


def holds(hold: Callable[[], bool]) -> bool:
    """Return what a comparison says, False where something is gone."""
    try:
        return hold()
    except (LookupError, AttributeError):
        return False


def writes_state(run: Any) -> bool:
    """Return whether a program writes to attributes, containers or globals."""
    code = getattr(getattr(run, "run", run), "__code__", None)
    if code is None:
        return True
    names = {each.opname for each in dis.get_instructions(code)}
    return bool(names & _STORES) or not _WRITERS.isdisjoint(code.co_names)


class _Values:
    """What is read, once for each place."""

    def __init__(self, target: Target) -> None:
        own = target.function.__code__.co_varnames[:1] if target.owner is not None else ()
        self._roots: Mapping[str, Any] = dict.fromkeys(own, target.owner)
        self._globals = target.function.__globals__
        self.scope: dict[str, Any] = {"get": dict.get}
        self._names: dict[int, str] = {}
        """What conditions call objects."""
        self.conditions: dict[str, None] = {}
        self._seen: set[int] = set()
        self._members: dict[type, Mapping[str, Any]] = {}
        """What classes hold; each `__dict__` of a class is a new object."""

    def add(self, place: Place, ask: Sequence[Any]) -> None:
        """Keep what lies on the way to a place, and what is asked of it."""
        (kind, name, *_), *steps = place
        if any(step[1] in HOOKS for step in steps):
            return  # `model.hooks` notices these
        if kind == "global" and name in self._globals:
            value = self._entry(self._globals, name)
        elif kind == "argument" and name in self._roots:
            value = self._roots[name]
        else:
            return
        try:
            for step in steps:
                if isinstance(value, _CODE) and not (
                    isinstance(value, type) and step[1] == "__dict__"
                ):
                    return
                value = self._step(value, *step)
        except Exception:  # noqa: BLE001 - attributes may raise anything, and other steps are none of these
            return
        self._ask(value, *ask)

    def add_forward(self, model: nn.Module) -> None:
        """Keep what a call of the model itself runs."""
        if self._entry(vars(model), "forward") is _ABSENT:
            self._keep(f"{self._name(type(model))}.forward", type(model).forward)

    def _name(self, value: Any) -> str:
        """Return what conditions call an object, which lives as long as they do."""
        return self._names.setdefault(id(value), "") or self._named(value)

    def _named(self, value: Any) -> str:
        self._names[id(value)] = name = put(self.scope, "value", value)
        return name

    def _keep(self, expression: str, value: Any) -> None:
        """Ask that an expression stands for what it does now."""
        if not isinstance(value, Tensor):
            self.conditions[f"{expression} is {self._name(value)}"] = None

    def _step(self, value: Any, kind: str, key: Any) -> Any:
        if kind == "attribute":
            return self._attribute(value, key)
        if kind == "applied" and key == "type":
            self._keep(f"{self._name(value)}.__class__", type(value))
            return type(value)
        if kind == "applied" and key == "dict" and isinstance(value, types.MappingProxyType):
            return value
        if kind in ("item", "dict item") and isinstance(value, (dict, types.MappingProxyType)):
            return self._entry(value, key)
        if kind in ("item", "list item") and isinstance(value, list):
            return self._item(value, key)
        if kind == "item" and isinstance(value, tuple):
            return value[key]
        raise ValueError(kind)

    def _attribute(self, value: Any, name: str) -> Any:
        if not name.isidentifier():  # it becomes a part of code
            raise ValueError(name)
        if name == "__dict__" and isinstance(value, type):
            return self._members.setdefault(value, value.__dict__)
        own = getattr(value, "__dict__", None)
        if name == "__dict__":
            return own
        if name in OF_MODULES and isinstance(value, nn.Module):
            return vars(value)[name]
        if not isinstance(getattr(type(value), name, None), property) and isinstance(own, dict):
            found = self._entry(own, name)
            if found is not _ABSENT:
                return found
        found = getattr(value, name)
        if found is getattr(value, name) and not isinstance(found, _CODE):
            self._keep(f"{self._name(value)}.{name}", found)
        return found

    def _entry(self, holder: Mapping[Any, Any], key: Any) -> Any:
        is_dict = isinstance(holder, dict)
        value = dict.get(holder, key, _ABSENT) if is_dict else holder.get(key, _ABSENT)
        if value is _ABSENT:
            self.conditions[f"{key!r} not in {self._name(holder)}"] = None
        elif not is_dict or type(holder).__getitem__ is dict.__getitem__:
            self._keep(f"{self._name(holder)}[{key!r}]", value)
        else:
            self._keep(f"get({self._name(holder)}, {key!r})", value)
        return value

    def _item(self, holder: list[Any], key: int) -> Any:
        self._keep(f"{self._name(holder)}[{key}]", holder[key])
        return holder[key]

    def _ask(self, value: Any, question: str, name: Any = None, *_: Any) -> None:
        if question in ("has", "has own", "contains"):
            self._look(value, name, is_own=question == "has own")
        elif question == "keys" and isinstance(value, dict):
            self.conditions[f"[*{self._name(value)}] == {self._name([*value])}"] = None
        elif question in ("length", "value") and isinstance(value, _SIZED):
            self._contents(value, is_all=question == "value")

    def _look(self, value: Any, name: Any, *, is_own: bool) -> None:
        """Keep that there is something by a name, or nothing."""
        own = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(value, _CODE) or not isinstance(own, dict):
            return
        self._entry(own, name)
        for kind in OF_MODULES if isinstance(value, nn.Module) and not is_own else ():
            self._entry(own[kind], name)

    def _contents(self, value: Any, *, is_all: bool) -> None:
        """Keep a container's length, and all that it holds."""
        self.conditions[f"len({self._name(value)}) == {len(value)}"] = None
        if not is_all or isinstance(value, set) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        take = self._entry if isinstance(value, dict) else self._item
        for each in [
            take(value, key) for key in (value if isinstance(value, dict) else range(len(value)))
        ]:
            if isinstance(each, _SIZED):
                self._contents(each, is_all=True)
