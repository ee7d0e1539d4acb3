"""A module that compiles itself at its first call and otherwise behaves as before.

The wrapper is a second object over the same attributes: an instance of a generated subclass of the
module's own class whose `__dict__` *is* the module's. Parameters, buffers, submodules, hooks and
user attributes are therefore the same objects under the same names, whichever of the two is used,
and the original's class is not touched.

    wrapped.__class__ -> generated(YourModel, CompiledModuleWrapper)
    wrapped.__dict__  -> module.__dict__
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from torchloom._torch.module_calls import compiled_call, is_compiled_module
from torchloom.compiler.backend_fn import CompileConfig, get_backend_fn
from torchloom.compiler.support import check_supported
from torchloom.config import thawed_map
from torchloom.errors import CompileError, ConfigError

_STATE = "_loom_compile"
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass
class _State:
    """The state of a wrapper, apart from the module's own attributes."""

    module: nn.Module
    config: CompileConfig
    backend: str | Callable[..., Any]
    kwargs: dict[str, Any]
    compiler_fn: Callable[..., Any] | None = None
    compiled: Callable[..., Any] | None = field(default=None, repr=False)
    calls: threading.local = field(default_factory=threading.local, repr=False)
    """Per thread, whether the next read of `forward` is that of a call, which gets the compiled one."""
    is_new: bool = True
    """Python calls `__init__` once after the wrapper is made; that call is ignored, as the module is initialized."""


class _Own:
    """An attribute of the wrapper that is hidden by a parameter, buffer or submodule of the same name."""

    def __init__(self, read: Callable[..., Any], *, is_property: bool = False) -> None:
        self._read, self._is_property = read, is_property
        self.__doc__ = read.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._read
        for table in ("_parameters", "_buffers", "_modules"):
            if self._name in instance.__dict__.get(table, ()):
                return instance.__dict__[table][self._name]
        return self._read(instance) if self._is_property else self._read.__get__(instance)


def _own_property(read: Callable[..., Any]) -> Any:
    return _Own(read, is_property=True)


class CompiledModuleWrapper:
    """Compiles a module at its first call.

    `wrapped = CompiledModuleWrapper(module, config)` is an instance of the module's own class with
    the same state-dict keys, attributes, hooks and submodules; it pickles and deep-copies into a
    wrapper that has not compiled yet. Only calls are compiled: `wrapped.forward(x)` is not.

    A module that has an attribute named like one of the wrapper's own keeps it; reach the wrapper's
    as `CompiledModuleWrapper.set_backend(wrapped, ...)`.

    Args:
        module: any module that is not compiled or wrapped yet.
        compile_config: with `enabled=False` nothing is compiled.

    Raises:
        CompileError: the module is compiled or wrapped already, or torch.compile does not work here.

    Example:
        >>> model = CompiledModuleWrapper(nn.Linear(4, 2), CompileConfig(enabled=True))
        >>> isinstance(model, nn.Linear), model.is_compiled, list(model.state_dict())
        (True, False, ['weight', 'bias'])
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapper; a call of a generated class returns a plain module instead."""
        base = cls.__dict__.get("_loom_base")
        if base is not None:  # user code that makes another module by type(self)(...)
            return base(*args, **kwargs)
        return _wrap(*args, **kwargs)

    @_Own
    def set_backend(self, backend: str | Callable[..., Any]) -> None:
        """Choose another backend before the first call; see `get_backend_fn`.

        Raises:
            CompileError: the module is compiled already.
            ConfigError: the backend cannot be found.
        """
        state = _open_state(self, "set_backend")
        state.backend = get_backend_fn(backend)

    @_Own
    def set_torch_compile_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Add keyword arguments of torch.compile before the first call.

        Raises:
            CompileError: the module is compiled already.
            ConfigError: `backend` is among them.
        """
        state = _open_state(self, "set_torch_compile_kwargs")
        if "backend" in kwargs:
            raise ConfigError("backend cannot be given as a torch.compile kwarg: use set_backend()")
        state.kwargs.update(kwargs)

    @_Own
    def set_compiler_fn(self, compiler_fn: Callable[[nn.Module], Callable[..., Any]]) -> None:
        """Compile with a function of the module instead of torch.compile.

        Backend and keyword arguments then have no effect.

        Raises:
            CompileError: the module is compiled already.
            ConfigError: `compiler_fn` is not callable.
        """
        state = _open_state(self, "set_compiler_fn")
        if not callable(compiler_fn):
            raise ConfigError(
                f"compiler_fn is a {type(compiler_fn).__name__}: pass a function of the module "
                "that returns what to call instead of it"
            )
        state.compiler_fn = compiler_fn

    @property
    def __torchloom_compiled__(self) -> Any:
        """The compiled function, for `torchloom.entries` and similar functions."""
        return _state_of(self).compiled

    @_own_property
    def is_compiled(self) -> bool:
        """Whether the first call has started the compiler."""
        return _state_of(self).compiled is not None

    @_own_property
    def backend(self) -> str | Callable[..., Any]:
        """The backend."""
        return _state_of(self).backend

    @_own_property
    def compiler_fn(self) -> Callable[[nn.Module], Callable[..., Any]] | None:
        """The function that compiles instead of torch.compile, from `set_compiler_fn`; or None."""
        return _state_of(self).compiler_fn

    @_own_property
    def torch_compile_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of torch.compile; a copy."""
        return dict(_state_of(self).kwargs)


def _wrap(module: nn.Module, compile_config: CompileConfig | None = None) -> Any:
    config = compile_config or CompileConfig(enabled=True)
    if not isinstance(module, nn.Module):
        raise CompileError(
            f"CompiledModuleWrapper takes a torch.nn.Module, not a {type(module).__name__}"
        )
    if isinstance(module, CompiledModuleWrapper):
        raise CompileError(
            f"this {type(module).__name__} is wrapped already: keep the one wrapper, and change its "
            "settings before its first call"
        )
    if is_compiled_module(module):
        raise CompileError(
            f"this {type(module).__name__} is compiled already: hand over the module as it was "
            "before torch.compile"
        )
    if config.enabled:
        check_supported()
    backend = get_backend_fn(config.backend)
    state = _State(module, config, backend, thawed_map(config.kwargs))
    wrapped = object.__new__(_generated(type(module)))
    object.__setattr__(wrapped, "__dict__", module.__dict__)
    object.__setattr__(wrapped, _STATE, state)
    return wrapped


def _generated(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _CLASSES:
        has_slots = any(
            "__slots__" in vars(each) and vars(each)["__slots__"] for each in base.mro()
        )
        if has_slots:
            raise CompileError(
                f"{base.__name__} keeps attributes in __slots__, which a wrapper cannot share: "
                "call module.compile() instead"
            )
        body = {
            "__slots__": (_STATE,),
            "_loom_base": base,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__init__": _init,
            "__call__": _call,
            "forward": _Forward(),
            "__copy__": _copy,
            "__deepcopy__": _deepcopy,
            "__reduce_ex__": _reduce,
        }
        _CLASSES[base] = type(base.__name__, (base, CompiledModuleWrapper), body)
    return _CLASSES[base]


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    state = _state_of(self)
    if state.is_new:
        state.is_new = False
        return
    type(state.module).__init__(self, *args, **kwargs)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    # A graph that is being traced takes the module in as it is: it is compiled once, with it.
    if torch.compiler.is_compiling():
        return self._loom_base.__call__(self, *args, **kwargs)
    state = _following(self)
    if not state.config.enabled:
        return state.module(*args, **kwargs)
    if state.compiled is None:
        state.compiled = _compile(state)
    if state.compiler_fn is not None or not _runs_hooks_around(state.module):
        return state.compiled(*args, **kwargs)
    # Dynamo does not guard on hooks: ones that are added after a compile would be ignored
    # (pytorch/pytorch#117758). They run outside of what is compiled, as those of torch.compile(module) do.
    state.calls.is_about_to_run = True
    try:
        return nn.Module._call_impl(self, *args, **kwargs)
    finally:
        state.calls.is_about_to_run = False


class _Forward:
    """The module's own forward; the first read inside of a call gets the compiled one."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return owner._loom_base.forward
        if not torch.compiler.is_compiling():
            state = _state_of(instance)
            if getattr(state.calls, "is_about_to_run", False):
                state.calls.is_about_to_run = False
                return state.compiled
        own = instance.__dict__.get("forward")
        if own is not None:
            return own
        # Dynamo of torch 2.11 follows no `__get__` and finds no class in an attribute of a class.
        if torch.compiler.is_compiling():
            return functools.partial(instance._loom_base.forward, instance)
        return owner._loom_base.forward.__get__(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__["forward"] = value

    def __delete__(self, instance: Any) -> None:
        try:
            del instance.__dict__["forward"]
        except KeyError:
            raise AttributeError("forward") from None


def _runs_hooks_around(module: nn.Module) -> bool:
    """Return whether hooks run outside of the compiled part: not where a class defines its own `__call__`."""
    return type(module).__call__ is nn.Module.__call__


def _compile(state: _State) -> Callable[..., Any]:
    if state.compiler_fn is None:
        is_forward_alone = _runs_hooks_around(state.module)
        return compiled_call(
            state.module, state.backend, is_forward_alone=is_forward_alone, **state.kwargs
        )
    compiled = state.compiler_fn(state.module)
    if not callable(compiled):
        raise CompileError(
            f"the compiler_fn of this {type(state.module).__name__} returned a "
            f"{type(compiled).__name__}: it must return what to call instead of the module"
        )
    return compiled


def _state_of(wrapped: Any) -> _State:
    return object.__getattribute__(wrapped, _STATE)


def _following(wrapped: Any) -> _State:
    """Return a wrapper's state.

    Raises:
        CompileError: the wrapper's class was changed, which its module does not follow.
    """
    if "_loom_base" not in vars(type(wrapped)):
        raise CompileError(
            f"the class of this {wrapped._loom_base.__name__} was changed after it was wrapped, as torch.nn.utils.parametrize "
            "does, and what runs is the module behind it: parametrize the module first, then wrap it"
        )
    return _state_of(wrapped)


def _open_state(wrapped: Any, what: str) -> _State:
    state = _state_of(wrapped)
    if state.compiled is not None:
        raise CompileError(
            f"{what}() after the first call: this {type(state.module).__name__} is compiled with "
            f"backend {state.backend!r} already; change settings before it is called"
        )
    return state


def _copy(self: Any) -> Any:
    state = _following(self)
    return _wrapped_again(copy.copy(state.module), *_settings(state))


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    state = _following(self)
    module = copy.deepcopy(state.module, memo)
    memo[id(self)] = _wrapped_again(module, *_settings(state))
    return memo[id(self)]


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    state = _following(self)
    return _wrapped_again, (state.module, *_settings(state))


def _settings(state: _State) -> tuple[CompileConfig, Callable[..., Any] | None]:
    config = replace(state.config, backend=state.backend, kwargs=dict(state.kwargs))
    return config, state.compiler_fn


def _wrapped_again(
    module: nn.Module, config: CompileConfig, compiler_fn: Callable[..., Any] | None
) -> Any:
    wrapped = CompiledModuleWrapper(module, config)
    _state_of(wrapped).compiler_fn = compiler_fn
    return wrapped
