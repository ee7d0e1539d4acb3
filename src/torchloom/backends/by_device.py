"""A backend that chooses another one by the device on which a graph runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchloom.backends.forwarding import Forwarding
from torchloom.backends.graphs import devices_of, name_of
from torchloom.backends.records import CompilerFn
from torchloom.backends.registry import lookup_backend
from torchloom.errors import BackendError


@dataclass(frozen=True)
class _ByDevice(Forwarding):
    choices: tuple[tuple[str, str | CompilerFn], ...]
    default: str | CompilerFn | None

    @property
    def compiler_name(self) -> str:
        inside = [f"{device}={name_of(backend)}" for device, backend in self.choices]
        return f"by_device({', '.join(inside)})"

    def inner(self) -> tuple[str | CompilerFn, ...]:
        chosen = tuple(backend for _, backend in self.choices)
        return chosen if self.default is None else (*chosen, self.default)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        chosen = self._choose(devices_of(gm, example_inputs))
        return lookup_backend(chosen)(gm, example_inputs, **options)

    def _choose(self, devices: set[str]) -> str | CompilerFn:
        # A graph with tensors on an accelerator runs there; those on the CPU are its scalars.
        accelerators = sorted(devices - {"cpu"})
        if len(accelerators) > 1:
            raise BackendError(
                f"{self.compiler_name}: one graph has tensors on {', '.join(accelerators)}; "
                "move the model to one kind of device"
            )
        device = accelerators[0] if accelerators else "cpu"
        chosen = dict(self.choices).get(device, self.default)
        if chosen is None:
            raise BackendError(
                f"{self.compiler_name}: a graph runs on {device}, for which no backend was given: "
                f"pass {device}=... or default=..."
            )
        return chosen


def by_device(
    *, default: str | CompilerFn | None = None, **backends: str | CompilerFn
) -> CompilerFn:
    """Return a backend that compiles each graph with the backend of its device.

    Args:
        default: the backend for all other devices; without it they are an error.
        backends: device type -> registered name or callable, e.g. `cpu="inductor"`.

    Raises:
        BackendError: no backend is given, or one is unknown.

    Example:
        >>> chosen = by_device(cpu="inductor", cuda="cudagraphs")
        >>> torch.compile(fn, backend=chosen)  # doctest: +SKIP
    """
    if not backends and default is None:
        raise BackendError("by_device() got no backend: pass e.g. cpu='inductor'")
    choices: Mapping[str, str | CompilerFn] = dict(sorted(backends.items()))
    for backend in (*choices.values(), *(() if default is None else (default,))):
        lookup_backend(backend)
    return _ByDevice(tuple(choices.items()), default)
