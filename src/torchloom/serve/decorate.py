"""`@support_torch_compile`: a model class whose instances compile once, at their first call.

    @support_torch_compile(dynamic_arg_dims={"ids": 0, "positions": {-1}})
    class Decoder(nn.Module):
        def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor: ...

The first call is the largest: its sizes are the upper ends, unless a contract or `Dim`s say otherwise.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch import nn

from torchloom.errors import ServeError
from torchloom.serve.builder.build import build
from torchloom.serve.call.eager import is_eager, why_eager, why_enforced
from torchloom.serve.call.program import Program
from torchloom.serve.call.warm_up import peak_of
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.infer import Dims, contract_of_call, named_dims

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=type[nn.Module])
_SLOT = "_torchloom_served"


@dataclass
class Served:
    """What became of a decorated model."""

    program: Program | None = None
    """None before the first call that is compiled, and where none is."""
    why_never: str = ""
    """Why it is never compiled; empty if it may be."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def why_eager(self) -> str:
        """Why a call would run as it is now; empty if it would not."""
        if self.program is not None:
            return self.program.why_eager
        return self.why_never or why_eager() or why_enforced()


class _States(dict[type, Served]):
    """What became of one model, by decorated class; copies and pickles of the model begin anew."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.of = _nobody if model is None else weakref.ref(model)
        """The model: a shallow copy holds these, too, and has other weights sooner or later."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _States:
        return _States()

    def __reduce__(self) -> tuple[type[_States], tuple[()]]:
        return _States, ()


def _nobody() -> None:
    return None


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up did."""

    program: Program
    num_programs: int
    seconds: float
    peak_bytes: int
    """Most bytes that a call at the largest sizes holds, beyond what was there before it."""


@dataclass(frozen=True)
class _Plan:
    """What the decorator was given."""

    original: Callable[..., Any]
    compiled: Callable[..., Any]
    """What programs are made of: the same, behind the invariants of sizes."""
    dims: Dims
    unbacked: Dims
    contract: Contract | None
    enable_if: Callable[[Any], bool] | None
    enforce_eager: bool
    options: Mapping[str, Any]


@overload
def support_torch_compile(cls: Model, /) -> Model: ...


@overload
def support_torch_compile(
    *,
    dynamic_arg_dims: Mapping[str, Any] | None = ...,
    mark_unbacked_dims: Mapping[str, Any] | None = ...,
    enable_if: Callable[[Any], bool] | None = ...,
    shape_invariants: Callable[..., None] | None = ...,
    contract: Contract | None = ...,
    enforce_eager: bool = ...,
    **options: Any,
) -> Callable[[Model], Model]: ...


def support_torch_compile(
    cls: Model | None = None,
    /,
    *,
    dynamic_arg_dims: Mapping[str, Any] | None = None,
    mark_unbacked_dims: Mapping[str, Any] | None = None,
    enable_if: Callable[[Any], bool] | None = None,
    shape_invariants: Callable[..., None] | None = None,
    contract: Contract | None = None,
    enforce_eager: bool = False,
    **options: Any,
) -> Model | Callable[[Model], Model]:
    """Let instances of a model class run as a compiled program for all sizes.

    Args:
        cls: the class, where the decorator is used without parentheses.
        dynamic_arg_dims: which sizes of which arguments vary: {"ids": 0}, {"positions": {-1}},
            {"ids": {0: Dim("tokens", 1, 8192)}}. Left out, the first size of each argument that is
            annotated as a tensor, or a dict or dataclass of tensors.
        mark_unbacked_dims: sizes of which nothing may be assumed, in the same form.
        enable_if: is asked with each instance; False leaves it as it is.
        shape_invariants: a function of the forward's arguments, by the same names, whose calls of `torch._check` tell
            how sizes relate; it is traced before the forward.
        contract: says all of this about sizes instead.
        enforce_eager: leave all instances as they are.
        options: of `build`.

    Raises:
        ServeError: the class has no `forward`, its own or inherited, names in the dims are no arguments of it, nothing
            varies, or `shape_invariants` takes other arguments.

    Example:
        >>> @support_torch_compile(backend="eager")
        ... class Double(nn.Module):
        ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
        ...         return x * 2
        >>> model = Double().eval()
        >>> with torch.no_grad():
        ...     first, second = model(torch.ones(8, 2)), model(torch.ones(3, 2))
        >>> served(model).program.origin
        'built'
    """

    def decorate(cls: Model) -> Model:
        original = getattr(cls, "forward", nn.Module.forward)
        if original is nn.Module.forward:
            raise ServeError(f"{cls.__qualname__} has no forward: decorate a class that has")
        if above := getattr(original, "_torchloom_plan", None):  # inherited from a decorated class
            original = above.original
        plan = _Plan(
            original,
            _behind(shape_invariants, original) if shape_invariants else original,
            named_dims(original, dynamic_arg_dims) if contract is None else {},
            named_dims(original, mark_unbacked_dims) if mark_unbacked_dims else {},
            contract,
            enable_if,
            enforce_eager,
            options,
        )
        cls.forward = _dispatcher(cls, plan)  # type: ignore[method-assign]
        return cls

    return decorate if cls is None else decorate(cls)


def _behind(invariants: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that asks invariants first.

    Raises:
        ServeError: they take other arguments.
    """
    _, *names = inspect.signature(original).parameters
    try:
        inspect.signature(invariants).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ServeError(
            f"shape_invariants takes other arguments than {original.__qualname__}({', '.join(names)}), and is called with "
            f"all of them by name: {error}"
        ) from None

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        invariants(*args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def ignore_torch_compile(cls: Model) -> Model:
    """Leave instances of a class as they are though a base class is decorated.

    A class below it that is decorated itself is compiled again.
    """
    cls._torchloom_ignored = cls  # type: ignore[attr-defined]
    return cls


def served(model: nn.Module) -> Served:
    """Return what became of a decorated model.

    Raises:
        ServeError: its class is not decorated.
    """
    return _state(model, _owner(model))


def warm_up(model: nn.Module, **given: Any) -> WarmUp:
    """Compile a decorated model for its whole contract, and record its CUDA graphs, before the first call.

    Args:
        model: the model.
        given: see `Program.warm_up`.

    Raises:
        ServeError: it has no contract yet, or runs as it is.
    """
    owner = _owner(model)
    plan = _plan_of(owner)
    state = _state(model, owner)
    if state.why_eager:
        raise ServeError(f"{type(model).__qualname__} is not compiled: {state.why_eager}")
    if plan.contract is None and state.program is None:
        raise ServeError(
            f"{type(model).__qualname__} has no contract: give one to the decorator, or call the model "
            "once at its largest sizes"
        )
    started = time.perf_counter()
    program = state.program or _start(model, plan, state, (), {})
    program.warm_up(**given)
    seconds = time.perf_counter() - started
    peak_bytes = peak_of(program.target, program.contract, program)
    return WarmUp(program, len(program.variants), seconds, peak_bytes)


def freeze(model: nn.Module) -> None:
    """Say that a decorated model must not compile from now on: it has been compiled for all sizes of its contract.

    One that runs as it is now, under `torchloom.serve.eager()` for one, stays so.

    Raises:
        ServeError: it has not been compiled yet.
    """
    state = served(model)
    if state.program is not None:
        return
    state.why_never = state.why_eager
    if not state.why_never:
        raise ServeError(
            f"{type(model).__qualname__} has not been compiled: call it, or warm_up(model), before freeze"
        )


def _dispatcher(owner: type[nn.Module], plan: _Plan) -> Callable[..., Any]:
    @functools.wraps(plan.original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of what is compiled around it
            return plan.original(self, *args, **kwargs)
        states = self.__dict__.get(_SLOT)
        state = states.get(owner) if states and states.of() is self else None
        program = None if state is None else state.program
        if program is None:
            if is_eager():
                return plan.original(self, *args, **kwargs)
            state = state or _state(self, owner)
            if state.why_eager:
                return plan.original(self, *args, **kwargs)
            program = _start(self, plan, state, args, kwargs)
        return program(*args, **kwargs)

    forward._torchloom_plan = plan  # type: ignore[attr-defined]
    return forward


def _start(
    model: nn.Module, plan: _Plan, state: Served, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Program:
    """Build the program at the first call."""
    with state.lock:
        if state.program is not None:  # another thread was first
            return state.program
        bound = plan.compiled.__get__(model)
        contract, unbacked = plan.contract, ()
        if contract is None:
            contract = contract_of_call(
                bound, plan.dims | plan.unbacked, args, kwargs, model.training
            )
        if plan.unbacked:
            unbacked = contract.names_at(plan.unbacked)
        state.program = build(bound, contract, unbacked=unbacked, **plan.options)
        return state.program


def _state(model: nn.Module, owner: type[nn.Module]) -> Served:
    states = model.__dict__.get(_SLOT)
    if states is None or states.of() is not model:
        states = model.__dict__[_SLOT] = _States(model)
    if owner not in states:
        states[owner] = Served(why_never=_why_never(model, owner, _plan_of(owner)))
        if states[owner].why_eager:
            log.info("%s runs as it is: %s", type(model).__qualname__, states[owner].why_eager)
    return states[owner]


def _why_never(model: nn.Module, owner: type[nn.Module], plan: _Plan) -> str:
    """Return the reason to leave a model as it is for good, or nothing."""
    if plan.enforce_eager:
        return "enforce_eager=True"
    if getattr(model, "_is_replica", False):
        return "a replica that nn.DataParallel makes for one call"
    ignored = getattr(type(model), "_torchloom_ignored", None)
    if ignored is not None and not (issubclass(owner, ignored) and owner is not ignored):
        return f"@ignore_torch_compile on {ignored.__name__}"
    if plan.enable_if is not None and not plan.enable_if(model):
        return "enable_if returned False"
    return ""


def _owner(model: nn.Module) -> type[nn.Module]:
    for cls in type(model).__mro__:
        if hasattr(cls.__dict__.get("forward"), "_torchloom_plan"):
            return cls
    raise ServeError(
        f"{type(model).__qualname__} is not decorated: put @torchloom.support_torch_compile on it"
    )


def _plan_of(owner: type[nn.Module]) -> _Plan:
    return owner.__dict__["forward"]._torchloom_plan
