"""Notices what changed in a model that lives on after it was compiled: each call asks, by comparisons of identity.

Facts say where a trace looked (`model.facts`). What leads there is kept: attributes of modules, configs and classes, entries
of dicts and lists, lengths. One generated condition asks for all of it, at about 30 ns each:

    (value1.eps) is value2 and (value1._modules['norm']) is value3 and ('forward' in value4) is value5 and len(value6) == 4

A value that is another object now need not differ in what the trace read: `Program` then compares the facts, and keeps the
new values where all of them hold. Tensors are left to `weight_checks`, but for names of one object, such as tied weights: a
graph takes these as one input, and would use the old tensor for both if one name were set anew. Of hooks a call compares one
number, the one that torch gives to the next hook of the process; where it has grown, all hooks of the model are compared.
"""

from __future__ import annotations

import ast
import dis
import re
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchloom._torch.modes import num_function_modes
from torchloom._torch.untraced import leave_alone
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
_OF_HOOKS = re.compile(rf"\b(?:{'|'.join(_HOOKS)})\b")
_OF_MODULES = ("_parameters", "_buffers", "_modules")
"""Attributes of each module that hold its tensors and parts."""
_FIXED = (".__dict__", *(f".{name}" for name in _OF_MODULES))
"""How places end that nobody sets."""
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
"""What places lead into and facts have digests of when a program is loaded."""
_SIZED = (dict, list, set)
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
        for question in dict.fromkeys(chain.from_iterable(self._facts)):
            found.add(question)
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
    """Conditions on what is read, once for each step that leads to it."""

    def __init__(self, target: Target) -> None:
        own = target.function.__code__.co_varnames[:1] if target.owner is not None else ()
        roots = {"L": dict.fromkeys(own, target.owner), "G": target.function.__globals__}
        self.scope: dict[str, Any] = {**roots}
        self.conditions: dict[str, None] = {}
        self._names = {id(value): name for name, value in roots.items()}
        """What conditions call objects."""
        self._known: dict[str, Any] = {}
        """What expressions stand for."""
        self._seen: set[int] = set()
        if isinstance(target.call, nn.Module) and "forward" not in vars(target.call):
            self._keep(f"'forward' in {self._name(vars(target.call))}")
            self._keep(f"{self._name(type(target.call))}.forward")

    def add(self, question: str) -> None:
        """Keep what lies on the way to what a fact asks of, and its answer."""
        if _OF_HOOKS.search(question):
            return
        # Attributes may raise anything, and what is not compared here neither does harm.
        with suppress(Exception):
            self._ask(ast.parse(question, mode="eval").body)

    def _ask(self, question: ast.expr) -> None:
        match question:
            case ast.Call(ast.Name("kind"), [asked]):
                self._reached(asked)
            case ast.Call(ast.Name("len"), [asked]):
                self._contents(self._reached(asked), is_all=False)
            case ast.Call(ast.Name("list"), [ast.Call(ast.Attribute(asked, "keys"))]):
                value = self._reached(asked)
                self.conditions[f"[*{self._name(value)}] == {self._name([*value])}"] = None
            case ast.Call(ast.Name("hasattr"), [asked, ast.Constant(name)]):
                own = vars(value := self._reached(asked))
                parts = [own[kind] for kind in _OF_MODULES] if isinstance(value, nn.Module) else []
                for each in (own, *parts):
                    self._keep(f"{name!r} in {self._name(each)}")
            case ast.Compare(ast.Constant(name), [ast.In()], [asked]):
                if isinstance(value := self._reached(asked), (dict, types.MappingProxyType)):
                    self._keep(f"{name!r} in {self._name(value)}")
            case ast.Compare(one, [ast.Is()], [other]):
                if isinstance(self._reached(one), Tensor):
                    self._keep(f"({self._spelled(one)} is {self._spelled(other)})")
                self._reached(other)
            case _:
                self._contents(self._reached(question), is_all=True)

    def _reached(self, place: ast.expr) -> Any:
        """Return what is at a place, and keep what lies on the way."""
        return self._keep(self._spelled(place))

    def _spelled(self, place: ast.expr) -> str:
        """Return a place as Python, from what holds the value on.

        Raises:
            ValueError: it is not compared here.
        """
        match place:
            case ast.Name("L" | "G" as root):
                return root
            case ast.Attribute(base, name):
                return f"{self._holder(base, name)}.{name}"
            case ast.Subscript(base, ast.Constant(key)):
                return f"{self._holder(base)}[{key!r}]"
            case ast.Call(ast.Attribute(_, "__getitem__"), [base, ast.Constant(key)]):
                return f"{self._holder(base)}[{key!r}]"
            case ast.Call(ast.Name("type"), [base]):
                return f"{self._holder(base)}.__class__"
            case ast.Call(ast.Name("dict"), [base]):  # of a class
                return self._spelled(base)
        raise ValueError(ast.unparse(place))

    def _holder(self, place: ast.expr, name: str = "") -> str:
        """Return what conditions call the object at a place, of which a part is read.

        Raises:
            ValueError: it is code, and facts have digests of that when a program is loaded.
        """
        value = self._reached(place)
        if isinstance(value, _CODE) and not (isinstance(value, type) and name == "__dict__"):
            raise ValueError(ast.unparse(place))
        return self._name(value)

    def _name(self, value: Any) -> str:
        """Return what conditions call an object, which lives as long as they do."""
        if id(value) not in self._names:
            self._names[id(value)] = put(self.scope, "value", value)
        return self._names[id(value)]

    def _keep(self, text: str) -> Any:
        """Ask that an expression stands for the object that it does now, if it does so each time; return that."""
        if text not in self._known:
            value = self._known[text] = eval(text, self.scope)
            is_kept = not isinstance(value, Tensor) and not text.endswith(_FIXED)
            if is_kept and text != self._name(value) and value is eval(text, self.scope):
                self.conditions[f"({text}) is {self._name(value)}"] = None
        return self._known[text]

    def _contents(self, value: Any, *, is_all: bool) -> None:
        """Keep a container's length, and all that it holds."""
        if not isinstance(value, _SIZED):
            return
        self.conditions[f"len({self._name(value)}) == {len(value)}"] = None
        if not is_all or isinstance(value, set) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            self._contents(self._keep(f"{self._name(value)}[{key!r}]"), is_all=True)
