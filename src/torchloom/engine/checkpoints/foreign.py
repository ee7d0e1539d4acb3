"""State that others' code keeps where a checkpoint does not look: refused when it is saved, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchloom.errors import CheckpointError
from torchloom.shard.state import ORIGINAL


def kind_of(value: object) -> str | None:
    """Return the name of an optimizer's or schedule's class, None without one."""
    return None if value is None else type(value).__name__


def check_keeps_all(optimizer: Optimizer) -> None:
    """Refuse an optimizer with more state than `state` and `param_groups`, such as a wrapper.

    Raises:
        CheckpointError: it has; which is said.
    """
    kind = type(optimizer).__name__
    inner = [
        name
        for name, value in vars(optimizer).items()
        if isinstance(value, Optimizer) and value.state is not optimizer.state
    ]
    if inner:
        raise CheckpointError(
            f"{kind} holds another optimizer in {inner[0]!r}, whose states a checkpoint would lose: "
            "save without it, or let both share one `state`"
        )
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    found: Any = optimizer.state_dict()
    more = sorted(set(found) - {"state", "param_groups"}) if isinstance(found, Mapping) else ["?"]
    if more:
        raise CheckpointError(
            f"{kind}.state_dict() holds {', '.join(map(str, more[:3]))} beside `state` and "
            "`param_groups`, which a checkpoint would lose: keep it in `state` or `param_groups`"
        )


def check_modules(model: nn.Module) -> None:
    """Refuse modules that write values of their own into state dicts.

    Raises:
        CheckpointError: one does; module and key are named.
    """
    for path, module in model.named_modules():
        kind = getattr(type(module), ORIGINAL, type(module))
        if kind._save_to_state_dict is nn.Module._save_to_state_dict:
            continue
        found: dict[str, Any] = {}
        kind._save_to_state_dict(module, found, "", True)
        known = {*module._parameters, *module._buffers, "_extra_state"}
        more = sorted(found.keys() - known)
        if more:
            raise CheckpointError(
                f"the module {path or 'itself'} ({kind.__name__}) writes "
                f"{', '.join(more[:3])} into state dicts by _save_to_state_dict, which a checkpoint "
                "would lose: register it as a buffer, or define get_extra_state and set_extra_state"
            )
