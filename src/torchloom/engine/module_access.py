"""The engine in the place of its model: attributes, modes and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from torchloom.engine.deepspeed_names import REFUSED
from torchloom.errors import EngineAttributeError
from torchloom.shard import gathered

if TYPE_CHECKING:
    from typing_extensions import Self


class ModuleAccess:
    """Part of `Engine`: it answers for the model where it has no attribute of its own."""

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute, e.g. `named_parameters`, `state_dict` or `generate`.

        Raises:
            EngineAttributeError: the model has none of that name; names of DeepSpeed's engine that torchloom
                refuses say why.
        """
        module = self.__dict__.get("module")
        if module is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(module, name)
        except AttributeError as error:
            if name in REFUSED:
                raise EngineAttributeError(
                    f"{name!r} of DeepSpeed's engine is not here: {REFUSED[name]}"
                ) from None
            raise EngineAttributeError(
                f"neither the engine nor its model {type(module).__name__} has an attribute {name!r}: set it "
                "on the model, or see the list of the engine's names in docs/migrating/deepspeed.md"
            ) from error

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, or with `mode=False` into evaluation mode; return the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode; return the engine."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the model's parameters; sharded ones hold this rank's shard."""
        return self.module.parameters()

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's whole weights and its buffers; all ranks must call.

        Args:
            destination: the dict to fill; default: a new one.
            prefix: put in front of each name.
            keep_vars: do not detach tensors from autograd.
            exclude_frozen_parameters: leave out parameters that need no gradient.
        """
        given: Any = {} if destination is None else {"destination": destination}
        state = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **given)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., object] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load whole weights into the model; all ranks must call.

        Args:
            checkpoint: a state dict, or a dict that has it under "module".
            strict: it must hold exactly this model's names.
            custom_load_fn: called as `fn(src=..., dst=...)` with whole weights instead; rank 0's results count.
            fetch_z3_params: accepted for DeepSpeed compatibility; no effect.
        """
        inner = checkpoint.get("module")
        weights = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is None:
            self.module.load_state_dict(weights, strict=strict)
            return
        with gathered(self.module, modifier_rank=0):
            custom_load_fn(src=weights, dst=self.module)
