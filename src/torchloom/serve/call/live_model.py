"""Notices what changed in a model that lives on after it was compiled: each call asks, by comparisons of identity.

Facts say where a trace looked (`model.facts`). What leads there is kept: attributes of modules, configs and classes, entries
of dicts and lists, lengths. One generated condition asks for all of it, at about 30 ns each:

    holder['eps'] is value and holder['layers'] is value2 and 'forward' not in holder2 and len(holder3) == 4

A value that is another object now need not differ in what the trace read: `Program` then compares the facts, and keeps the
new values where all of them hold. Tensors are left to `weight_checks`, but for names of one object, such as tied weights: a
graph takes these as one input, and would use the old tensor for both if one name were set anew. Of hooks a call compares one
number, the one that torch gives to the next hook of the process; where it has grown, all hooks of the model are compared.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchloom._torch.modes import num_function_modes
from torchloom._torch.untraced import leave_alone
from torchloom.pieces.places import Place
from torchloom.serve.contract.conditions import put
from torchloom.serve.model.facts import Facts
from torchloom.serve.model.target import Target

_GLOBAL_HOOKS = tuple(
    f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward")
)
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
)
_OF_MODULES = ("_parameters", "_buffers", "_modules")
"""Attributes of each module that hold its tensors and parts."""
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
"""What places lead into and facts have digests of when a program is loaded."""
_SIZED = (dict, list, set)
_ABSENT = object()

_STORES = frozenset({"STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF"})
_WRITERS = frozenset(
    {"object_setattr_ignore_descriptor", "update", "clear", "extend", "pop", "insert"}
)


class LiveModel:
    """What programs expect of their model.

    Args:
        target: the model.
        facts: of the programs.
    """

    def __init__(self, target: Target, facts: Iterable[Facts]) -> None:
        self._target, self._facts = target, list(facts)
        self._looks = _looks_of(target)
        self.next_hook = next_hook()
        """The number of the next hook in this process when the model's hooks were last looked at."""
        self.num_modes = num_function_modes()
        """Of torch's function modes: default devices, which change nothing as long as the device is the same."""
        self.compare_anew()

    def compare_anew(self) -> None:
        """Take what there is now for what programs expect."""
        found = _ReadValues(self._target)
        for each in self._facts:
            for fact in each.values():
                found.add(fact["place"], *fact.get("ask", ["value"]))
        self._conditions, self._scope = list(found.conditions), found.scope
        self._ask_for(self._conditions)

    def drop_changed(self) -> None:
        """Compare no longer what is another object now: the program itself puts it there."""
        self._ask_for([each for each in self._conditions if _is_true(self._made([each]))])

    def still_holds(self) -> bool:
        """Return whether nothing is another object, or gone."""
        return _is_true(self.holds)

    def differences(self) -> list[str]:
        """Say which tensors look otherwise, and where other hooks are, one line each."""
        lines, now = [], _looks_of(self._target)
        for name in dict.fromkeys([*self._looks, *now]):
            before, after = self._looks.get(name), now.get(name)
            if before == after:
                continue
            if tuple in (type(before), type(after)):
                lines.append(f"{name} are other hooks than when it was compiled")
            elif before is not None:
                lines.append(f"{name} was {before}, is {after or 'gone'}")
        return lines

    def _ask_for(self, conditions: list[str]) -> None:
        self._conditions = conditions
        self.holds = self._made(conditions)
        """Asked by each call; raises where something is gone."""

    def _made(self, conditions: Sequence[str]) -> Callable[[], bool]:
        text = f"def hold():\n    return {' and '.join(conditions) or 'True'}"
        exec(compile(text, "<torchloom values>", "exec"), self._scope)
        hold: Callable[[], bool] = self._scope["hold"]
        leave_alone(hold, "programs of torchloom.serve are compiled already")
        return hold


def next_hook() -> int:
    """Return the number of the next hook that anybody registers in this process."""
    return RemovableHandle.next_id


def writes_state(run: Any) -> bool:
    """Return whether a program writes to attributes, containers or globals."""
    code = getattr(getattr(run, "run", run), "__code__", None)
    if code is None:
        return True
    names = {each.opname for each in dis.get_instructions(code)}
    return bool(names & _STORES) or not _WRITERS.isdisjoint(code.co_names)


def _is_true(hold: Callable[[], bool]) -> bool:
    try:
        return hold()
    except (LookupError, AttributeError):
        return False


def _looks_of(target: Target) -> dict[str, Any]:
    """Return what tensors look like, and the numbers of hooks; gradients are asked for where they matter."""
    tensors = {
        name: text.replace(", requires grad", "") for name, text in target.structure().items()
    }
    hooks = {name: tuple(getattr(nn.modules.module, name)) for name in _GLOBAL_HOOKS}
    for path, module in target.module.named_modules() if target.module else ():
        for name in _HOOKS:
            hooks[f"{path}.{name}".lstrip(".")] = tuple(getattr(module, name, ()))
    return tensors | {place: keys for place, keys in hooks.items() if keys}


class _ReadValues:
    """Conditions on what is read, once for each place."""

    def __init__(self, target: Target) -> None:
        own = target.function.__code__.co_varnames[:1] if target.owner is not None else ()
        self._arguments: Mapping[str, Any] = dict.fromkeys(own, target.owner)
        self._globals = target.function.__globals__
        self.scope: dict[str, Any] = {"get": dict.get}
        self._names: dict[int, str] = {}
        """What conditions call objects."""
        self.conditions: dict[str, None] = {}
        self._seen: set[int] = set()
        self._members: dict[type, Mapping[str, Any]] = {}
        """What classes hold; each `__dict__` of a class is a new object."""
        model = target.call
        if isinstance(model, nn.Module) and self._entry(vars(model), "forward") is _ABSENT:
            self._keep(f"{self._name(type(model))}.forward", type(model).forward)

    def add(self, place: Place, question: str, name: Any = None, *_: Any) -> None:
        """Keep what lies on the way to a place, and what is asked of it."""
        try:
            value = self._reached(place)
            if question == "same as" and isinstance(value, Tensor):
                self.conditions[f"{self._spelled(place)} is {self._spelled(name)}"] = None
            elif question == "same as":
                self._reached(name)
        except Exception:  # noqa: BLE001 - attributes may raise anything, and other steps are none of these
            return
        if question in ("has", "has own", "contains"):
            self._member(value, name, is_own=question == "has own")
        elif question == "keys" and isinstance(value, dict):
            self.conditions[f"[*{self._name(value)}] == {self._name([*value])}"] = None
        elif question in ("length", "value") and isinstance(value, _SIZED):
            self._contents(value, is_all=question == "value")

    def _reached(self, place: Place) -> Any:
        """Return what is at a place, and keep what lies on the way.

        Raises:
            ValueError: it is not compared here: code, hooks, or what belongs to a call.
        """
        (kind, root, *_), *steps = place
        if any(step[1] in _HOOKS for step in steps):
            raise ValueError(place)
        if kind == "global" and root in self._globals:
            value = self._entry(self._globals, root)
        elif kind == "argument" and root in self._arguments:
            value = self._arguments[root]
        else:
            raise ValueError(place)
        for step in steps:
            if isinstance(value, _CODE) and not (isinstance(value, type) and step[1] == "__dict__"):
                raise ValueError(place)
            value = self._step(value, *step)
        return value

    def _spelled(self, place: Place) -> str:
        """Return a place as Python, from what holds the value on."""
        *way, (kind, key) = place
        holder = self._name(self._reached(way))
        return f"{holder}.{key}" if kind == "attribute" else f"{holder}[{key!r}]"

    def _name(self, value: Any) -> str:
        """Return what conditions call an object, which lives as long as they do."""
        if id(value) not in self._names:
            self._names[id(value)] = put(self.scope, "value", value)
        return self._names[id(value)]

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
        if name in _OF_MODULES and isinstance(value, nn.Module):
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

    def _member(self, value: Any, name: Any, *, is_own: bool) -> None:
        """Keep that there is something by a name, or nothing."""
        own = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(value, _CODE) or not isinstance(own, dict):
            return
        self._entry(own, name)
        for kind in _OF_MODULES if isinstance(value, nn.Module) and not is_own else ():
            self._entry(own[kind], name)

    def _contents(self, value: Any, *, is_all: bool) -> None:
        """Keep a container's length, and all that it holds."""
        self.conditions[f"len({self._name(value)}) == {len(value)}"] = None
        if not is_all or isinstance(value, set) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        take = self._entry if isinstance(value, dict) else self._item
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            if isinstance(each := take(value, key), _SIZED):
                self._contents(each, is_all=True)
