"""Functions by value, for processes that are no forks.

`pickle` sends a function by its name, so it sends neither a closure nor a lambda. `dumps` sends the code of
such a function with what its closure holds, and likewise a class that a function made. What is defined at the
top of a test's module goes by its name: the other side loads that module from its file first (`load_module`).
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import io
import marshal
import pickle
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch

_TESTS = Path(__file__).parents[1]
_OF_CLASSES = {"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl"}
"""Attributes that a class gets anew where it is made."""


def dumps(value: Any) -> bytes:
    """Return a value as bytes, tensors and closures included.

    Raises:
        TypeError: it holds something that cannot leave its process.
    """
    modules: dict[str, str] = {}

    class Pickler(_Pickler):
        found = modules

    body = io.BytesIO()
    module = types.SimpleNamespace(Pickler=Pickler, dump=pickle.dump, __name__="carry")
    try:
        torch.save(value, body, pickle_module=module)
    except (
        pickle.PicklingError,
        TypeError,
        AttributeError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise TypeError(
            f"this rank's function holds what cannot be sent to another process ({error}): take plain values "
            "into its closure, or give it ranks of its own with support.ranks.run_ranks"
        ) from error
    return pickle.dumps((modules, body.getvalue()))


def loads(data: bytes) -> Any:
    """Return what `dumps` was given."""
    modules, body = pickle.loads(data)
    for name, path in modules.items():
        load_module(name, path)
    return torch.load(io.BytesIO(body), weights_only=False)


def load_module(name: str, path: str) -> types.ModuleType:
    """Load a test's module under the name that it has in the process that runs the tests, once.

    Its `assert` statements tell their values, as they do there.
    """
    if name in sys.modules:
        return sys.modules[name]
    from _pytest.assertion.rewrite import rewrite_asserts

    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path, None)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(tree, path, "exec", dont_inherit=True), vars(module))
    return module


class _Pickler(pickle.Pickler):
    """Takes functions and classes of functions apart; the rest is `pickle`'s own."""

    found: dict[str, str]
    """Modules of tests that are named, and their files."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            self._note(obj.__module__)
            return NotImplemented if _has_name(obj) else _take_function(obj)
        if isinstance(obj, type):
            self._note(obj.__module__)
            return _take_class(obj) if "<locals>" in obj.__qualname__ else NotImplemented
        if isinstance(obj, types.ModuleType):
            self._note(obj.__name__)
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.CellType):
            full = (obj.cell_contents,) if _is_full(obj) else ()
            return _make_cell, (), full, None, None, _fill_cell
        return NotImplemented

    def _note(self, name: str) -> None:
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and _TESTS in Path(path).parents and not name.startswith("support"):
            self.found[name] = path


def _has_name(obj: Any) -> bool:
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  empty cells raise
    except ValueError:
        return False
    return True


def _make_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, full: tuple[Any, ...]) -> None:
    (cell.cell_contents,) = full


def _take_function(fn: types.FunctionType) -> Any:
    state = (fn.__defaults__, fn.__kwdefaults__, fn.__dict__, fn.__qualname__, fn.__annotations__)
    made = (marshal.dumps(fn.__code__), fn.__module__, fn.__name__, fn.__closure__)
    return _make_function, made, state, None, None, _finish_function


def _make_function(code: bytes, module: str, name: str, closure: Any) -> types.FunctionType:
    names = vars(sys.modules.get(module) or importlib.import_module(module))
    if "@pytest_ar" not in names:  # what asserts call once pytest has rewritten them
        names["@pytest_ar"] = importlib.import_module("_pytest.assertion.rewrite")
        names["@py_builtins"] = builtins
    return types.FunctionType(marshal.loads(code), names, name, None, closure)


def _finish_function(fn: types.FunctionType, state: Any) -> None:
    fn.__defaults__, fn.__kwdefaults__, attributes, fn.__qualname__, fn.__annotations__ = state
    fn.__dict__.update(attributes)


def _take_class(cls: type) -> Any:
    body = {name: value for name, value in vars(cls).items() if name not in _OF_CLASSES}
    if "__slots__" in body or type(cls) is not type:
        raise TypeError(f"{cls.__qualname__} has slots or a metaclass")
    made = (cls.__name__, cls.__qualname__, cls.__module__, cls.__bases__)
    return _make_class, made, body, None, None, _finish_class


def _make_class(name: str, qualname: str, module: str, bases: tuple[type, ...]) -> type:
    return type(name, bases, {"__qualname__": qualname, "__module__": module})


def _finish_class(cls: type, body: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in body.items():
            setattr(cls, name, value)
