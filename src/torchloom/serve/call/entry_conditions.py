"""The comparisons that take the place of guards, as Python: what a contract, a mode and a trace ask of each call."""

from __future__ import annotations

import copy
import math
from typing import Any

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
from torchloom.serve.call.arguments import Asked, conditions
from torchloom.serve.call.entry_names import put
from torchloom.serve.call.entry_signature import EntrySignature
from torchloom.serve.call.layouts import apart, is_plainly_laid
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Derived, Float, Size, code_of, name_in_code
from torchloom.serve.contract.plain_values import is_plain, same
from torchloom.serve.contract.specs import AnySpec, NumberSpec, RecordSpec, TensorSpec
from torchloom.serve.model.spelling import type_words
from torchloom.serve.model.target import Target

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_SINGLE = (int, str)


class Conditions:
    """What calls are asked, in order.

    Args:
        target: what is served.
        contract: what calls have to look like.
        signature: says what arguments are called.
        scope: gets what the conditions refer to.
        without: paths of optional tensors that are None.
    """

    def __init__(
        self,
        target: Target,
        contract: Contract,
        signature: EntrySignature,
        scope: dict[str, Any],
        without: frozenset[str],
    ) -> None:
        self._target, self._contract = target, contract
        self._given, self._parameters = signature.given, signature.parameters
        self._scope, self._without = scope, without
        self._tensors: dict[str, TensorSpec] = {}
        """By the variables that hold them."""
        self.sizes: dict[str, str] = {}
        """The variable that holds each varying size."""
        self._conditions: list[str] = []

    def write(self, writes: bool, asked: Asked) -> list[str]:
        """Return the conditions.

        Args:
            writes: whether programs write to tensors: no argument may then be passed twice.
            asked: what programs rely on of arguments beside their tensors.
        """
        self._scope |= {"PLAIN": _PLAIN, "STRIDED": torch.strided}
        for name, spec in self._contract.args.items():
            self._spec(name, self._given[name], spec)
        if writes and len(self._tensors) > 1:
            self._scope["apart"] = apart
            self._conditions.append(f"apart({', '.join(self._tensors)})")
        self._scope |= {"same": same, "type_words": type_words, "Tensor": torch.Tensor}
        self._scope |= {"is_plainly_laid": is_plainly_laid, "inf": math.inf, "nan": math.nan}
        self._conditions += dict.fromkeys(conditions(asked, self._tensors, self._given))
        self._rest()
        self._mode()
        return self._conditions

    def _spec(self, path: str, value: str, spec: AnySpec) -> None:
        if isinstance(spec, RecordSpec):
            is_dict = spec.kind is dict
            kind = put(self._scope, "kind", spec.kind)
            self._conditions.append(f"type({value}) is {kind}")
            if spec.is_ordered:
                self._conditions.append(f"len({value}) == {len(spec.parts)}")
            if is_dict:
                self._conditions.append(f"[*{value}] == {put(self._scope, 'keys', [*spec.parts])}")
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
            f"{value}.dtype is {put(self._scope, 'dtype', spec.dtype)}",
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
        if dim.name in self.sizes:
            return f"{given} == {code_of(size)}"
        variable = self.sizes[dim.name] = f"n_{dim.name}"
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
        return f"{value}.device == {put(self._scope, 'device', device)}"

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
            known = put(self._scope, "fixed", wanted)
            return f"type({name}) is {type(wanted).__name__} and {name} == {known}"
        if is_plain(wanted):  # of floats, NaN and signs of zeros count
            return f"same({name}, {put(self._scope, 'fixed', copy.deepcopy(wanted))})"
        return f"{name} is {put(self._scope, 'fixed', wanted)}"

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
        self._conditions.append("STATE.holds()")
