"""Calls of modules that run compiled."""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchloom._torch.dynamo import guards_requires_grad

_TORCH_LIMIT = 8
"""The default of `torch._dynamo.config.recompile_limit`; another value was chosen by the user."""
_NUM_ENTRIES = 64


def compile_in_place(
    module: torch.nn.Module,
    backend: Any,
    *,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call,
    **kwargs: Any,
) -> None:
    """Let calls of `module` run compiled, as `Module.compile` does.

    `Module.compile` hands `_call_impl` to Dynamo, which up to torch 2.13 skips frames of torch.nn: a root such as
    nn.Sequential is then not captured at all (pytorch/pytorch#150915). One frame of our own is always captured.

    Args:
        module: as it is; a later change of its hooks is not noticed.
        backend: a name or a callable.
        around: wraps what calls the module.
        kwargs: for torch.compile.
    """
    call = around(compiled_call(module, backend, **{**_more_entries(), **kwargs}))
    module._compiled_call_impl = compiling_again(module, call)


def _more_entries() -> dict[str, Any]:
    """Return a higher limit of entries than torch's default for one call of `torch.compile`, which 2.11 does not take.

    Sizes, training, evaluation and gradients each need entries of their own, and a rank that passes the limit
    runs other collectives than ranks that do not.
    """
    limit = torch._dynamo.config.recompile_limit
    takes_one = "recompile_limit" in inspect.signature(torch.compile).parameters
    return {"recompile_limit": _NUM_ENTRIES} if takes_one and limit == _TORCH_LIMIT else {}


def compiled_call(
    module: torch.nn.Module, backend: Any, *, is_forward_alone: bool = False, **kwargs: Any
) -> Callable[..., Any]:
    """Return what calls `module` compiled; see `compile_in_place`.

    Args:
        module: as it is; a later change of its hooks is not noticed.
        backend: a name or a callable.
        is_forward_alone: leave the module's own hooks to the caller.
        kwargs: for torch.compile.
    """
    _ignore_logging()
    # A class may define a __call__ of its own; nn.Module's only chooses what to run.
    call = module.forward if is_forward_alone else module._call_impl
    if type(module).__call__ is not torch.nn.Module.__call__ and not is_forward_alone:
        call = functools.partial(type(module).__call__, module)

    def enter(*args: Any, **kwds: Any) -> Any:
        return call(*args, **kwds)

    # Dynamo keeps compiled entries, and counts them against its limit, by code object: a copy per
    # module keeps modules apart.
    code = enter.__code__
    code = code.replace(
        co_name=type(module).__name__, co_consts=(*code.co_consts, *_forward_place(module))
    )
    own = types.FunctionType(code, globals(), code.co_name, None, enter.__closure__)
    if callable(backend):
        own.backend = backend  # type: ignore[attr-defined]
        backend = _Backend(backend)
    weakref.finalize(own, _forget_entries, code).atexit = False  # type: ignore[misc]
    return torch.compile(own, backend=backend, **kwargs)


class _Backend:
    """What Dynamo is given in the place of a backend, which ends with the function that it compiles.

    Dynamo keeps every backend for good: in `cached_backends`, and in entries of the code of classes
    whose forward breaks, also once their guards have found that the module is gone.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = weakref.ref(backend)
        self.compiler_name = getattr(backend, "compiler_name", type(backend).__name__)
        self.__name__ = self.compiler_name  # by which records call it

    def __call__(self, *args: Any, **options: Any) -> Any:
        backend = self._backend()
        if backend is None:
            raise RuntimeError(f"what {self.compiler_name} compiled for has been deleted")
        return backend(*args, **options)


def _forget_entries(code: types.CodeType) -> None:
    """Drop Dynamo's entries of a function that is gone.

    They would live on: they hold the key of a weak dict, `orig_code_map`, whose value is the code.
    """
    from torch._C._dynamo.eval_frame import reset_code

    reset_code(code)


def _forward_place(module: torch.nn.Module) -> tuple[tuple[str, str, int, tuple[str, ...]], ...]:
    """Return a constant by which records name the module's forward in place of our function."""
    from torchloom._torch import introspect  # which needs Dynamo

    forward = getattr(type(module).forward, "__code__", None)
    if forward is None:
        return ()
    names = forward.co_varnames[1 : forward.co_argcount]
    return ((introspect.FORWARD_PLACE, forward.co_filename, forward.co_firstlineno, names),)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Say whether torch.compile or Module.compile has been applied to a module."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def _ignore_logging() -> None:
    """Let Dynamo skip the once-only warnings that transformers adds to loggers.

    A log call would otherwise break the graph, e.g. in GPT-2's attention mask.
    """
    warn_once = getattr(logging.Logger, "warning_once", None)
    if warn_once is not None:
        torch._dynamo.config.ignore_logging_functions.add(warn_once)


def compiled_in_place(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return what calls of a module run, None where they run eagerly."""
    return module._compiled_call_impl


def call_in_place(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let calls of a module run what `compiled_in_place` returned; None: eagerly again."""
    module._compiled_call_impl = call


def runs_forward_alone(module: torch.nn.Module) -> bool:
    """Return whether calling a module is calling its forward: no hook runs, nor a `__call__` of its class."""
    shared = torch.nn.modules.module
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
        shared._global_forward_pre_hooks,
        shared._global_forward_hooks,
        shared._global_backward_pre_hooks,
        shared._global_backward_hooks,
    )
    return not any(hooks) and type(module).__call__ is torch.nn.Module.__call__


def traced_function(
    module: torch.nn.Module,
) -> tuple[types.FunctionType, object | None]:
    """Return the Python function that Dynamo traces for a call of a module, and what it is bound to."""
    from torch._dynamo.convert_frame import get_traced_fn

    return get_traced_fn(module)


def compiling_again(model: torch.nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a compiled model, with all of Dynamo's entries dropped where `requires_grad` has changed.

    A torch without guards on that goes on without gradients for what is unfrozen (pytorch/pytorch#139476);
    where it has them, that is `call` itself.
    """
    if guards_requires_grad():
        return call
    params, compiled_for = list(model.parameters()), list[bool]()

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled_for
        now = [param.requires_grad for param in params]
        if compiled_for and now != compiled_for:
            torch._dynamo.reset()  # parts behind graph breaks have entries of their own
        compiled_for = now
        return call(*args, **kwargs)

    return run
