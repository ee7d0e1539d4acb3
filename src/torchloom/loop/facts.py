"""Write config, optimizer and schedule as plain data, which ranks compare before they train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchloom.config import Config
from torchloom.loop.owned_params import OwnedParams


def config_facts(config: Config) -> dict[str, object]:
    """Return every setting that ranks must share, by its path, and the versions that they run."""
    return {"version of torch": torch.__version__, **_flat(config.shared_values(), "")}


def optimizer_facts(optimizer: Optimizer | None, local: OwnedParams) -> dict[str, object]:
    """Return an optimizer's kind and, for each group, its parameters and options."""
    if optimizer is None:
        return {"optimizer": None}
    names = {id(each.param): each.spec.name for each in local}
    facts: dict[str, object] = {"kind": _name(optimizer), "groups": len(optimizer.param_groups)}
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        facts[f"group {index} parameters"] = [names.get(id(p), "?") for p in group["params"]]
        facts |= _flat(options, f"group {index} ")
    return facts


def schedule_facts(schedule: Any) -> dict[str, object]:
    """Return a schedule's kind and the plain values of its state."""
    if schedule is None:
        return {"schedule": None}
    state = schedule.state_dict() if hasattr(schedule, "state_dict") else {}
    return {"kind": _name(schedule), **_flat(state, "")}


def _flat(values: Mapping[str, object], prefix: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat({str(k): v for k, v in value.items()}, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _plain(value)
    return found


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    return _name(value)  # functions and objects: ranks compare what they are, not where they lie


def _name(value: object) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{getattr(kind, '__qualname__', '?')}"
