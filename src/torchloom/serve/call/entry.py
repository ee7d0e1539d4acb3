"""The function that a call goes through: a few comparisons, then the program for its sizes.

It is generated from the contract. For `Contract({"x": (Dim("batch", 1, 64), 16)})`:

    def entry(x):
        try:
            given_passes = (
                type(x) in PLAIN and len(s_x := x.shape) == 2 and x.dtype is dtype1 and x.is_cpu
                and 1 <= (n_batch := s_x[0]) <= 64 and s_x[1] == 16 and x.is_contiguous()
                and not is_grad_enabled() and not STATE.is_stale
            )
        except (AttributeError, KeyError, IndexError, TypeError, RuntimeError):
            given_passes = False
        if given_passes:
            try:
                return table2[n_batch - 1](MODEL, x)
            except FAILURES as _error:
                return FAILED(_error, {'x': x})
        return SLOW({'x': x})

Whatever does not pass goes to `SLOW`, which finds out why, in words. `FAILED` finds out whether a program failed as
the model is another one now.
"""

from __future__ import annotations

import builtins
import copy
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchloom._torch.modes import (
    forward,
    is_jit_tracing,
    num_dispatch_modes,
    num_function_modes,
    transform_level,
)
from torchloom._torch.untraced import leave_alone
from torchloom.serve.call.arguments import Asked, conditions
from torchloom.serve.call.tied_names import names_for
from torchloom.serve.call.weight_checks import OtherTensorsError
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Derived, Float, Size, code_of, name_in_code
from torchloom.serve.contract.plain_values import apart, is_plain, is_plainly_laid, same
from torchloom.serve.contract.specs import AnySpec, NumberSpec, RecordSpec, TensorSpec
from torchloom.serve.model.spelling import type_words
from torchloom.serve.model.target import Target

Run = Callable[..., Any]
Row = tuple[Box, Run, Sequence[str]]
_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_SINGLE = (int, str)
_UNLIKE = (AttributeError, KeyError, IndexError, TypeError, RuntimeError)
"""What conditions raise that ask something else than what they expect: no tensor, or a nested one."""
_FAILURES = (OtherTensorsError, AttributeError, KeyError, IndexError, TypeError)
"""What programs raise that fetch weights from a model which is another one now."""
_NAMES = frozenset(
    {
        *(
            "PLAIN",
            "STRIDED",
            "STATE",
            "SLOW",
            "FAILED",
            "FAILURES",
            "MODEL",
            "GLOBALS",
            "DTYPE",
            "HANDLE",
            "FORWARD",
            "Tensor",
            "math",
            "torch",
            "inf",
            "nan",
        ),
        *("apart", "same", "type_words", "is_plainly_laid", "is_inference", "is_grad_enabled"),
        *("is_autocast", "default_dtype", "function_modes", "dispatch_modes", "transform_level"),
        "is_jit_tracing",
        *("_torchloom_entry",),
    }
)
_MADE = re.compile(
    r"(?:s_|n_|f_|given_).*|(?:kind|keys|dtype|device|fixed|run|table|default)\d+|_error"
)
"""Names of helpers and variables in an entry."""
_MOST_TABLE = 1 << 16
"""Sizes that are looked up in a list; beyond, they are compared."""


class Otherwise(NamedTuple):
    """What calls go to that no program answers."""

    slow: Callable[[dict[str, Any]], Any]
    """Takes the arguments by name, of a call that does not pass."""
    failed: Callable[[Exception, dict[str, Any]], Any]
    """Takes an error that a program raised, and the arguments by name."""


def make_entry(
    target: Target,
    contract: Contract,
    variants: Sequence[Row],
    without: frozenset[str],
    state: Any,
    otherwise: Otherwise,
    *,
    writes: bool = False,
    asked: Asked = (),
) -> Run:
    """Return the function for calls.

    Args:
        target: what is served.
        contract: what calls have to look like.
        variants: programs, the sizes that they are for, and what is asked of sizes at each call; the first
            that covers a call runs.
        without: paths of optional tensors that are None in these programs.
        state: has `ties`, conditions on names for one object, `is_stale`, which sends every call to `otherwise.slow`, and `next_hook`, which does if it is
            not the number of the next hook, or unless there are `num_modes` of torch's function modes.
        otherwise: what calls go to that no program answers.
        writes: whether programs write to tensors: no argument may then be passed twice.
        asked: what programs rely on of arguments beside their tensors.
    """
    return _Writer(target, contract, without, writes, asked).write(variants, state, otherwise)


class _Writer:
    """Writes the source of an entry."""

    def __init__(
        self,
        target: Target,
        contract: Contract,
        without: frozenset[str],
        writes: bool,
        asked: Asked,
    ) -> None:
        self._target = target
        self._contract = contract
        self._without = without
        self._scope: dict[str, Any] = {}
        self._writes = writes
        self._asked = asked
        self._tensors: dict[str, TensorSpec] = {}
        self._parameters = target.parameters_for(contract)
        self._given = {p.name: _given(p.name) for p in self._parameters}
        """What each parameter is called in conditions, so that it hides nothing that these use."""
        self._conditions: list[str] = []
        self._sizes: dict[str, str] = {}
        """The variable that holds each varying size."""

    def write(
        self,
        variants: Sequence[Row],
        state: Any,
        otherwise: Otherwise,
    ) -> Run:
        """Return the compiled function."""
        self._scope |= {
            "PLAIN": _PLAIN,
            "STRIDED": torch.strided,
            "STATE": state,
            "MODEL": self._target.owner,
        }
        self._scope |= {"SLOW": otherwise.slow, "FAILED": otherwise.failed, "FAILURES": _FAILURES}
        for name, spec in self._contract.args.items():
            self._spec(name, self._given[name], spec)
        if self._writes and len(self._tensors) > 1:
            self._scope["apart"] = apart
            self._conditions.append(f"apart({', '.join(self._tensors)})")
        self._scope |= {"same": same, "type_words": type_words, "Tensor": torch.Tensor}
        self._scope |= {"is_plainly_laid": is_plainly_laid, "inf": math.inf, "nan": math.nan}
        self._conditions += dict.fromkeys(conditions(self._asked, self._tensors, self._given))
        self._rest()
        self._mode()
        self._scope |= names_for(self._target)
        self._conditions += state.ties
        is_plain_named = all(name == given for name, given in self._given.items())
        signature = self._signature() if is_plain_named else ", ".join(self._given.values())
        lines = [f"def entry({signature}):"]
        # What is not there, a weight that was deleted for one, is for `slow` to name.
        lines += [
            "    try:",
            f"        given_passes = {' and '.join(self._conditions) or 'True'}",
            f"    except ({', '.join(each.__name__ for each in _UNLIKE)}):",
            "        given_passes = False",
            "    if given_passes:",
        ]
        lines.append("        try:")
        lines += [f"            {line}" for line in self._dispatch(variants)]
        lines += [
            "        except FAILURES as _error:",
            f"            return FAILED(_error, {self._by_name()})",
            f"    return SLOW({self._by_name()})",
        ]
        if not is_plain_named:
            lines[0] = lines[0].replace("entry", "_torchloom_entry", 1)
            lines.append(f"def entry({self._signature()}):")
            lines.append(f"    return _torchloom_entry({', '.join(self._given)})")
        exec(compile("\n".join(lines), "<torchloom entry>", "exec"), self._scope)
        entry = self._scope["entry"]
        leave_alone(entry, "programs of torchloom.serve are compiled already")
        entry.source = "\n".join(lines)
        return entry

    def _spec(self, path: str, value: str, spec: AnySpec) -> None:
        if isinstance(spec, RecordSpec):
            is_dict = spec.kind is dict
            kind = self._name("kind", spec.kind)
            self._conditions.append(f"type({value}) is {kind}")
            if spec.is_ordered:
                self._conditions.append(f"len({value}) == {len(spec.parts)}")
            if is_dict:
                self._conditions.append(f"[*{value}] == {self._name('keys', [*spec.parts])}")
            for key, each in spec.parts.items():
                part = f"{value}[{key!r}]" if is_dict else f"{value}.{key}"
                part = f"{value}[{key}]" if spec.is_ordered else part
                name = name_in_code(f"{path}.{key}")
                self._conditions.append(f"(({name} := {part}), True)[1]")
                self._spec(f"{path}.{key}", name, each)
        elif isinstance(spec, NumberSpec):
            self._number(path, value, spec)
        elif path in self._without:
            self._conditions.append(f"{value} is None")
        else:
            self._tensor(value, spec)

    def _tensor(self, value: str, spec: TensorSpec) -> None:
        self._tensors[value] = spec
        shape = f"s_{value}"
        on = f"{value}.is_cpu" if spec.device.type == "cpu" else self._on(value, spec.device)
        self._conditions += [
            f"type({value}) in PLAIN",
            f"{value}.layout is STRIDED",
            f"len({shape} := {value}.shape) == {len(spec.shape)}",
            f"{value}.dtype is {self._name('dtype', spec.dtype)}",
            on,
        ]
        self._conditions += [
            self._size(f"{shape}[{number}]", size) for number, size in enumerate(spec.shape)
        ]
        self._conditions.append(f"{value}.is_contiguous()")
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            self._conditions.append(f"not {value}.is_neg()")
        if spec.dtype.is_complex:
            self._conditions.append(f"not {value}.is_conj()")

    def _number(self, path: str, value: str, spec: NumberSpec) -> None:
        if spec.size is not None:
            self._conditions += [f"type({value}) is int", self._size(value, spec.size)]
            return
        variable = Float(path, spec.low, spec.high).variable
        self._conditions += [
            f"type({value}) is float",
            f"{spec.low!r} <= ({variable} := {value}) <= {spec.high!r}",
        ]

    def _size(self, given: str, size: Size) -> str:
        """Return the condition on one size, which names the dim if it is the first of it."""
        if isinstance(size, int):
            return f"{given} == {size}"
        dim = size.dim
        if dim.name in self._sizes:
            return f"{given} == {code_of(size)}"
        variable = self._sizes[dim.name] = f"n_{dim.name}"
        exact = ""
        if isinstance(size, Derived):
            moved = f"{given} - {size.offset}"
            exact = f"({moved}) % {size.factor} == 0 and "
            given = f"({moved}) // {size.factor}"
        step = f" and {variable} % {dim.multiple_of} == 0" if dim.multiple_of > 1 else ""
        return f"{exact}{dim.min} <= ({variable} := {given}) <= {dim.max}{step}"

    def _on(self, value: str, device: torch.device) -> str:
        if device.index is None:
            return f"{value}.device.type == {device.type!r}"
        return f"{value}.device == {self._name('device', device)}"

    def _rest(self) -> None:
        """Check arguments that are no tensors: they are what they were in the trace."""
        for parameter in self._parameters:
            name = parameter.name
            if name in self._contract.args:
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                self._conditions.append(f"not {self._given[name]}")
                continue
            wanted = self._contract.fixed.get(name, parameter.default)
            if wanted is parameter.empty:
                continue
            self._conditions.append(self._equals(self._given[name], wanted))

    def _equals(self, name: str, wanted: Any) -> str:
        if wanted is None or isinstance(wanted, bool):
            return f"{name} is {wanted}"
        if type(wanted) in _SINGLE:
            known = self._name("fixed", wanted)
            return f"type({name}) is {type(wanted).__name__} and {name} == {known}"
        if is_plain(wanted):  # of floats, NaN and signs of zeros count
            return f"same({name}, {self._name('fixed', copy.deepcopy(wanted))})"
        return f"{name} is {self._name('fixed', wanted)}"

    def _mode(self) -> None:
        contract = self._contract
        if contract.grad == "inference":
            self._scope["is_inference"] = torch.is_inference_mode_enabled
            self._conditions.append("is_inference()")
        else:
            self._scope["is_grad_enabled"] = torch.is_grad_enabled
            self._conditions.append(
                "is_grad_enabled()" if contract.grad == "grad" else "not is_grad_enabled()"
            )
        self._scope["is_autocast"] = torch.is_autocast_enabled
        kinds = self._target.device_types(contract)
        self._conditions += [f"not is_autocast({kind!r})" for kind in sorted(kinds)]
        if self._target.module is not None:
            self._conditions.append(f"MODEL.training is {contract.training}")
        self._scope |= {
            "default_dtype": torch.get_default_dtype,
            "DTYPE": torch.get_default_dtype(),
            "HANDLE": RemovableHandle,
        }
        self._scope |= {
            "function_modes": num_function_modes,
            "dispatch_modes": num_dispatch_modes,
            "transform_level": transform_level,
            "is_jit_tracing": is_jit_tracing,
            "FORWARD": forward,
        }
        self._conditions += [
            "function_modes() == STATE.num_modes",
            "not dispatch_modes()",
            "transform_level() is None",
            "FORWARD._current_level < 0",
        ]
        self._conditions.insert(0, "not is_jit_tracing()")  # comparisons of sizes are tensors then
        self._conditions.append("default_dtype() is DTYPE")
        self._conditions.append("HANDLE.next_id == STATE.next_hook")
        self._conditions.append("not STATE.is_stale")

    def _dispatch(self, variants: Sequence[Row]) -> list[str]:
        """Return the lines that pick and run a program."""
        call = self._call()
        varying = [dim for dim in self._contract.dims.values() if dim.min < dim.max]
        checked = any(checks for *_, checks in variants)
        if len(varying) == 1 and len(varying[0].sizes) <= _MOST_TABLE and not checked:
            dim = varying[0]
            fixed = {each.name: each.min for each in self._contract.dims.values()}
            table = [
                next((run for box, run, _ in variants if {**fixed, dim.name: size} in box), None)
                for size in dim.sizes
            ]
            if None not in table:
                if len(set(map(id, table))) == 1:
                    return [f"return {self._name('run', table[0])}({call})"]
                at = f"{self._sizes[dim.name]} - {dim.min}" if dim.min else self._sizes[dim.name]
                at = f"({at}) // {dim.multiple_of}" if dim.multiple_of > 1 else at
                return [f"return {self._name('table', table)}[{at}]({call})"]
        self._scope |= {"math": math, "torch": torch}
        lines = []
        for box, run, checks in variants:
            tests = [
                f"{self._sizes[d.name]} == {d.min}"
                if d.min == d.max
                else f"{d.min} <= {self._sizes[d.name]} <= {d.max}"
                for d in box.dims
                if d != self._contract.dims[d.name]
            ]
            tests += [f"({check})" for check in checks]
            target = f"return {self._name('run', run)}({call})"
            lines += [f"if {' and '.join(tests)}:", f"    {target}"] if tests else [target]
            if not tests:
                break
        return lines

    def _call(self) -> str:
        parts = [] if self._target.owner is None else ["MODEL"]
        for parameter in self._parameters:
            name = parameter.name
            given = self._given[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                parts.append(f"*{given}")
            elif parameter.kind is parameter.VAR_KEYWORD:
                parts.append(f"**{given}")
            elif parameter.kind is parameter.KEYWORD_ONLY or name in self._target.by_keyword:
                parts.append(f"{name}={given}")
            else:
                parts.append(given)
        return ", ".join(parts)

    def _signature(self) -> str:
        parts: list[str] = []
        was_keyword = False
        kinds = [parameter.kind for parameter in self._parameters]
        for place, parameter in enumerate(self._parameters):
            name, kind = parameter.name, parameter.kind
            if kind is parameter.KEYWORD_ONLY and not was_keyword:
                if inspect.Parameter.VAR_POSITIONAL not in kinds:
                    parts.append("*")
                was_keyword = True
            star = "*" if kind is parameter.VAR_POSITIONAL else ""
            star = "**" if kind is parameter.VAR_KEYWORD else star
            default = self._default(parameter)
            parts.append(f"{star}{name}{default}")
            is_last = place + 1 == len(kinds) or kinds[place + 1] is not parameter.POSITIONAL_ONLY
            if kind is parameter.POSITIONAL_ONLY and is_last:
                parts.append("/")
        return ", ".join(parts)

    def _default(self, parameter: inspect.Parameter) -> str:
        if parameter.name in self._contract.fixed and parameter.kind is not parameter.VAR_KEYWORD:
            # What is fixed need not be passed.
            return f"={self._name('fixed', self._contract.fixed[parameter.name])}"
        if parameter.default is parameter.empty:
            return ""
        return f"={self._name('default', parameter.default)}"

    def _by_name(self) -> str:
        parts = []
        for parameter in self._parameters:
            name, given = parameter.name, self._given[parameter.name]
            if parameter.kind is parameter.VAR_KEYWORD:
                parts.append(f"**{given}")
            elif parameter.kind is parameter.VAR_POSITIONAL:
                parts.append(f"{'*' + name!r}: {given}")
            else:
                parts.append(f"{name!r}: {given}")
        return f"{{{', '.join(parts)}}}"

    def _name(self, stem: str, value: Any) -> str:
        name = f"{stem}{len(self._scope)}"
        self._scope[name] = value
        return name


def _given(name: str) -> str:
    """Return what a parameter is called where its own name may be one that the conditions use."""
    is_ours = name in _NAMES or "__" in name or hasattr(builtins, name) or _MADE.fullmatch(name)
    return f"given_{name}" if is_ours else name
