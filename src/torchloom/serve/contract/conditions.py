"""What a contract asks of a call: conditions as Python, each with the sentence that refuses a call that breaks it.

The conditions become the text of an entry (`call.entry`), joined by `and`. Where a call does not pass, they are evaluated
one after the other, and the first that does not hold says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchloom.serve.contract.dims import Derived, Float, Size, code_of, name_in_code
from torchloom.serve.contract.specs import AnySpec, NumberSpec, RecordSpec, TensorSpec

Values = Mapping[str, Any]
UNLIKE = (AttributeError, KeyError, IndexError, TypeError, RuntimeError)
"""What conditions raise that ask something else than what they expect: no tensor, or a nested one."""
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range),
    *(torch.device, torch.dtype, torch.layout, torch.memory_format),
)


class Condition(NamedTuple):
    """One thing that is asked of each call."""

    text: str
    """As Python, over the variables of an entry."""
    refusal: str | Callable[[Values], str]
    """The sentence for a call of which it does not hold, or what makes it of the variables."""


def why_refused(
    conditions: Iterable[Condition], scope: dict[str, Any], values: dict[str, Any]
) -> str:
    """Return the sentence of the first condition that does not hold, nothing if all do.

    Args:
        conditions: in order.
        scope: what they refer to.
        values: the arguments, by the variables that hold them; gets what conditions name.
    """
    for each in conditions:
        try:
            holds = eval(
                each.text, scope, values
            )  # generated, of names, numbers and constants in `scope`
        except UNLIKE:
            holds = False
        if not holds:
            return each.refusal if isinstance(each.refusal, str) else each.refusal(values)
    return ""


def is_plain(value: Any) -> bool:
    """Return whether a value is a number or text, or holds nothing but such."""
    if type(value) is slice:
        return is_plain((value.start, value.stop, value.step))
    if type(value) is dict:
        return is_plain([*value.items()])
    return type(value) in _PLAIN or (
        type(value) in (list, tuple, set, frozenset) and all(map(is_plain, value))
    )


def same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal, types and signs of zeros included: 1 is neither 1.0 nor True.

    Example:
        >>> same([1, (2,)], [1, (2,)]), same([1], [True]), same(0.0, -0.0)
        (True, False, False)
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, (set, frozenset)):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)


def put(scope: dict[str, Any], stem: str, value: Any) -> str:
    """Add a value to the globals of conditions; return the name that it got.

    Args:
        scope: of the conditions.
        stem: how the name begins.
        value: what it stands for.
    """
    name = f"{stem}{len(scope)}"
    scope[name] = value
    return name


class SpecConditions:
    """The conditions of a contract on arguments.

    Args:
        scope: gets what the conditions refer to.
        without: paths of optional tensors that are None.
    """

    def __init__(self, scope: dict[str, Any], without: Collection[str]) -> None:
        self._scope, self._without = scope, without
        scope |= {"PLAIN": frozenset({Tensor, nn.Parameter, nn.Buffer}), "STRIDED": torch.strided}
        scope["same"] = same
        self.tensors: dict[str, tuple[str, TensorSpec]] = {}
        """The variable that holds each tensor, by path."""
        self.sizes: dict[str, str] = {}
        """The variable that holds each varying size."""
        self.found: list[Condition] = []

    def add(self, path: str, variable: str, spec: AnySpec) -> None:
        """Add the conditions on one argument.

        Args:
            path: to it, as people read it.
            variable: that holds it.
            spec: what the contract says of it.
        """
        if isinstance(spec, RecordSpec):
            self._record(path, variable, spec)
        elif isinstance(spec, NumberSpec):
            self._number(path, variable, spec)
        elif path in self._without:
            self._ask(f"{variable} is None", f"{path!r} has to be None")
        else:
            self._tensor(path, variable, spec)

    def add_value(self, name: str, variable: str, wanted: Any, why: str) -> None:
        """Ask that an argument has one value.

        Args:
            name: of the argument.
            variable: that holds it.
            wanted: its value.
            why: the end of the sentence.
        """
        if wanted is None or isinstance(wanted, bool):
            text = f"{variable} is {wanted}"
        elif type(wanted) in (int, str):
            known = put(self._scope, "fixed", wanted)
            text = f"type({variable}) is {type(wanted).__name__} and {variable} == {known}"
        elif is_plain(wanted):  # of floats, NaN and signs of zeros count
            text = f"same({variable}, {put(self._scope, 'fixed', copy.deepcopy(wanted))})"
        else:
            text = f"{variable} is {put(self._scope, 'fixed', wanted)}"
        self._ask(text, lambda given: f"{name!r} is {given[variable]!r}, {why}")

    def _ask(self, text: str, refusal: str | Callable[[Values], str]) -> None:
        self.found.append(Condition(text, refusal))

    def _record(self, path: str, variable: str, spec: RecordSpec) -> None:
        kind, parts = put(self._scope, "kind", spec.kind), spec.parts
        name = getattr(spec.kind, "__name__", str(spec.kind))
        self._ask(
            f"type({variable}) is {kind}",
            lambda given: (
                f"{path!r} is a {type(given[variable]).__name__}, the contract wants a {name}"
            ),
        )
        if spec.is_ordered:
            self._ask(
                f"len({variable}) == {len(parts)}",
                lambda given: (
                    f"{path!r} holds {len(given[variable])} values, the contract wants {len(parts)}"
                ),
            )
        if spec.kind is dict:
            self._ask(
                f"[*{variable}] == {put(self._scope, 'keys', [*parts])}",
                lambda given: (
                    f"{path!r} holds the keys {[*given[variable]]}, the contract wants {[*parts]}, in this order: "
                    "forward may go through them"
                ),
            )
        for key, each in parts.items():
            inner = name_in_code(f"{path}.{key}")
            self._ask(
                f"(({inner} := {variable}{spec.step(key)}), True)[1]",
                f"{path}.{key} is not there, the contract wants {each}",
            )
            self.add(f"{path}.{key}", inner, each)

    def _tensor(self, path: str, variable: str, spec: TensorSpec) -> None:
        self.tensors[path] = variable, spec
        shape, dtype = f"s_{variable}", put(self._scope, "dtype", spec.dtype)

        def said(words: str) -> Callable[[Values], str]:
            return lambda given: (
                f"{path!r} {words.format(given[variable])}, the contract wants {spec}"
            )

        self._ask(
            f"type({variable}) in PLAIN",
            lambda given: _no_plain_tensor(path, given[variable], spec),
        )
        self._ask(
            f"{variable}.layout is STRIDED",
            lambda given: _no_such_rank(path, given[variable], spec),
        )
        self._ask(
            f"len({shape} := {variable}.shape) == {len(spec.shape)}",
            lambda given: _no_such_rank(path, given[variable], spec),
        )
        self._ask(f"{variable}.dtype is {dtype}", said("is {0.dtype}"))
        self._ask(self._on(variable, spec.device), said("is on {0.device}"))
        for number, size in enumerate(spec.shape):
            self._size(
                f"size {number} of {path!r}",
                f"{shape}[{number}]",
                size,
                lambda given, number=number: given[variable].shape[number],
            )
        self._ask(
            f"{variable}.is_contiguous()",
            lambda given: (
                f"{path!r} is not contiguous (strides {given[variable].stride()} for sizes "
                f"{tuple(given[variable].shape)}): call .contiguous() on it first"
            ),
        )
        for kind in (
            ("neg", "conj") if spec.dtype.is_complex else ("neg",) * spec.dtype.is_floating_point
        ):
            self._ask(
                f"not {variable}.is_{kind}()",
                f"{path!r} is a view whose values are changed as they are read: call .resolve_{kind}() on it first",
            )

    def _on(self, variable: str, device: torch.device) -> str:
        if device.type == "cpu":
            return f"{variable}.is_cpu"
        if device.index is None:
            return f"{variable}.device.type == {device.type!r}"
        return f"{variable}.device == {put(self._scope, 'device', device)}"

    def _number(self, path: str, variable: str, spec: NumberSpec) -> None:
        kind = float if spec.size is None else int
        self._ask(
            f"type({variable}) is {kind.__name__}",
            lambda given: f"{path!r} is {given[variable]!r}, the contract wants {spec}",
        )
        if spec.size is not None:
            self._size(repr(path), variable, spec.size, lambda given: given[variable])
            return
        own = Float(path, spec.low, spec.high).variable
        self._ask(
            f"{spec.low!r} <= ({own} := {variable}) <= {spec.high!r}",
            lambda given: (
                f"{path!r} is {given[variable]!r}, the contract allows {spec.low} to {spec.high}"
            ),
        )

    def _size(self, what: str, text: str, size: Size, get: Callable[[Values], int]) -> None:
        """Ask for one size, which gets the name of its dim if it is the first of it."""
        if isinstance(size, int):
            self._ask(
                f"{text} == {size}",
                lambda given: f"{what} is {get(given)}, the contract fixes it to {size}",
            )
            return
        dim = size.dim
        variable = f"n_{dim.name}"
        if dim.name in self.sizes:
            self._ask(
                f"{text} == {code_of(size)}",
                lambda given: (
                    f"{what} ({size.text}) is {get(given)}, elsewhere in the call it is {size.of(given[variable])}"
                    if size.value_at(get(given)) is not None
                    else _not_allowed(what, get(given), size)
                ),
            )
            return
        self.sizes[dim.name] = variable
        exact = ""
        if isinstance(size, Derived):
            moved = f"{text} - {size.offset}"
            exact = f"({moved}) % {size.factor} == 0 and "
            text = f"({moved}) // {size.factor}"
        step = f" and {variable} % {dim.multiple_of} == 0" if dim.multiple_of > 1 else ""
        self._ask(
            f"{exact}{dim.min} <= ({variable} := {text}) <= {dim.max}{step}",
            lambda given: _not_allowed(what, get(given), size),
        )


def _not_allowed(what: str, value: int, size: Any) -> str:
    allowed = size.dim.range_text if size is size.dim else f"it for {size.dim}"
    return f"{what} ({size.text}) is {value}, the contract allows {allowed}"


def _no_plain_tensor(path: str, value: Any, spec: TensorSpec) -> str:
    if isinstance(value, Tensor):
        return (
            f"{path!r} is a {type(value).__name__}, and programs take plain tensors: pass "
            f"{path}.as_subclass(torch.Tensor)"
        )
    return f"{path!r} is {type(value).__name__}, the contract wants {spec}"


def _no_such_rank(path: str, value: Tensor, spec: TensorSpec) -> str:
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"{path!r} is a tensor of another layout ({kind}), the contract wants a dense one: {spec}"
    return f"{path!r} has {value.dim()} dimensions, the contract wants {len(spec.shape)}: {spec}"


def argument_at(args: Mapping[str, Any], path: str) -> Any:
    """Return what a path leads to; None where an optional part is not there."""
    value: Any = args
    for part in path.split("."):
        if value is None:
            return None
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, (list, tuple)) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = getattr(value, part, None)
    return value
