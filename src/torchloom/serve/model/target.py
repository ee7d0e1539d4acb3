"""The target: the module, bound method or function that is served, and how it is called."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.errors import ServeError
from torchloom.pieces.shell import plain_function
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.spelling import words_for


class Target:
    """A callable that is served.

    Args:
        call: a module, a bound method or a function.

    Raises:
        ServeError: it is none of these.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        try:
            self.function, self.owner = plain_function(call)
        except (RuntimeError, AttributeError) as error:
            raise ServeError(
                f"{call!r} cannot be served: give a module, a bound method or a plain function"
            ) from error
        # Decorated functions often take (*args, **kwargs): the names are those of what they wrap.
        own = inspect.signature(self.function, follow_wrapped=False).parameters
        parameters = list(inspect.signature(self.function).parameters.values())
        self.parameters = parameters if self.owner is None else parameters[1:]
        """What calls may pass."""
        is_hooked = isinstance(call, nn.Module) and self.function is not type(call).forward
        if is_hooked:
            self.parameters = list(inspect.signature(call.forward).parameters.values())
        may = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._places = tuple(p.name for p in self.parameters if p.kind in may)
        self.by_position = self._places if is_hooked else ()
        """Of these, what is handed on by position: hooks of a module see it so."""
        self.by_keyword = frozenset(
            p.name for p in self.parameters if p.name not in own and p.name not in self.by_position
        )
        """Of these, what the function itself takes by keyword only."""
        self._several = next((p.name for p in own.values() if p.kind is p.VAR_POSITIONAL), "")
        self.rest = next((p.name for p in own.values() if p.kind is p.VAR_KEYWORD), None)
        """The name under which it holds further keyword arguments."""

    @property
    def module(self) -> nn.Module | None:
        """The module that is served, or whose method it is."""
        return self.owner if isinstance(self.owner, nn.Module) else None

    @property
    def name(self) -> str:
        """What it is called, for people and keys."""
        kind = self.function if self.owner is None else type(self.owner)
        return f"{kind.__module__}.{kind.__qualname__}"

    def divided(self, args: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a call with these arguments passes by position, and by keyword.

        Args:
            args: by name; further positional ones behind a name with a star.
        """
        more = next((value for name, value in args.items() if name.startswith("*")), ())
        names: list[str] = []
        for name in self._places if more else self.by_position:
            if name not in args:
                break
            names.append(name)
        return (*(args[name] for name in names), *more), {
            name: value
            for name, value in args.items()
            if name not in names and not name.startswith("*")
        }

    def sources_of(self, args: Mapping[str, Any]) -> tuple[str, ...]:
        """Return how the expressions of a trace call the arguments of a call."""
        return tuple(chain.from_iterable(self.sources_by_name(args).values()))

    def sources_by_name(self, args: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return how the expressions of a trace call each argument of a call."""
        places, rest = self.divided(args)
        found = {
            name: [f"L['{self._several}'][{place}]"]
            for place, name in enumerate(self.by_position[: len(places)])
        }
        for name in rest:
            more = [f"L['{self.rest}']['{name}']"] if self.rest else []
            found[name] = [f"L['{name}']", *more]
        return found

    def scope(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the names that facts about a call refer to."""
        signature = inspect.signature(self.function, follow_wrapped=False)
        first = () if self.owner is None else (self.owner,)
        places, rest = self.divided(args)
        bound = signature.bind(*first, *places, **rest)
        bound.apply_defaults()
        cells = dict(
            zip(
                self.function.__code__.co_freevars,
                (cell.cell_contents for cell in self.function.__closure__ or ()),
                strict=True,
            )
        )
        return {
            "L": {**bound.arguments, **cells},
            "G": self.function.__globals__,
            "model": self.call,
        }

    def parameters_for(self, contract: Contract) -> list[inspect.Parameter]:
        """Return what calls may pass, with names of a contract that are further keywords."""
        known = {parameter.name for parameter in self.parameters}
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in (*contract.args, *contract.fixed)
            if name not in known
        ]
        return sorted([*self.parameters, *more], key=lambda parameter: parameter.kind)

    def structure(self) -> dict[str, str]:
        """Return what each parameter and buffer looks like, and which of them share memory."""
        if self.module is None:
            return {}
        tensors = [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]
        first: dict[int, str] = {}
        found = {}
        for name, tensor in tensors:
            same = first.setdefault(id(tensor), name)
            found[name] = words_for(tensor) if same == name else f"the same as {same}"
        by_name = dict(tensors)
        for name, words in _within({name: by_name[name] for name in first.values()}):
            found[name] += words
        return found

    def structure_digest(self) -> str:
        """Return a hash of `structure`."""
        return hashlib.sha256(json.dumps(self.structure(), sort_keys=True).encode()).hexdigest()

    def device_types(self, contract: Contract | None) -> set[str]:
        """Return the kinds of devices that its parameters, buffers and a contract's arguments are on."""
        kinds = {spec.device.type for _, spec in contract.tensors()} if contract else set()
        if self.module is None:
            return kinds
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return kinds | {tensor.device.type for tensor in tensors}


def _within(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Say which tensors begin in the memory of another one: compilers order reads and writes by it."""
    spans = []
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            ends = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * by for size, by in ends)
            size = (last + 1) * tensor.itemsize
            spans.append((str(tensor.device), tensor.data_ptr(), -size, name))
    whole = ("", 0, 0, "")
    for span in sorted(spans):
        device, start, size, name = span
        if device == whole[0] and start < whole[1] - whole[2]:
            yield name, f", in the memory of {whole[3]}, {start - whole[1]} bytes on"
        if device != whole[0] or start - size > whole[1] - whole[2]:
            whole = span


@contextmanager
def gradient_mode_of(contract: Contract) -> Iterator[None]:
    """Set the gradient mode of a contract."""
    if contract.grad == "inference":
        with torch.inference_mode():
            yield
    else:
        with torch.set_grad_enabled(contract.grad == "grad"):
            yield
