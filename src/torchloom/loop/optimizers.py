"""Make the optimizer that steps what this rank owns of a model, or take the caller's; write down what ranks compare of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.config import Config, OptimizerConfig, thawed_map
from torchloom.errors import ConfigError, EngineError
from torchloom.loop.elementwise import needs_closure
from torchloom.loop.optimizer_list import OptimizerList
from torchloom.loop.owned_params import OwnedParams
from torchloom.loop.ownership import ownership_of
from torchloom.shard import ParamSpec
from torchloom.shard.optimizer_states import cut_held

_CLASSES = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
_OF_MUON = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "weight_decay")
_OF_ADAMW = ("betas", "eps", "weight_decay", "fused")

Groups = Sequence[nn.Parameter] | Sequence[dict[str, Any]]
OptimizerFactory = Callable[[Groups], Optimizer]


def make_optimizer(
    config: OptimizerConfig | None,
    optimizer: Optimizer | Sequence[Optimizer] | OptimizerFactory | None,
    model_parameters: Iterable[Any] | None,
    local: OwnedParams,
) -> Optimizer | None:
    """Build the optimizer of a run, or let a caller's own step this rank's leaves.

    Args:
        config: which optimizer to build when the caller brings none.
        optimizer: a torch optimizer over the model's parameters, fresh; several, which step together; or a
            function from parameters to one.
        model_parameters: parameters or parameter groups to optimize; default: all trainable ones.
        local: the leaves.

    Raises:
        EngineError: the optimizer holds foreign parameters, has stepped already, needs a closure, or
            computes numbers of all parameters together while ranks divide these.
        ConfigError: the optimizer does not take the configured arguments.
    """
    if isinstance(optimizer, Sequence):
        optimizer = OptimizerList([_over_leaves(each, local) for each in optimizer])
    if isinstance(optimizer, Optimizer):
        made: Optimizer | None = _over_leaves(optimizer, local)
    else:
        params = _params(model_parameters, local)
        if optimizer is not None:
            made = _from_factory(optimizer, params)
        else:
            made = None if config is None else _configured(config, params, local)
    if made is not None:
        _check_without_closure(made)
        local.ownership = ownership_of(made)
    return made


def _check_without_closure(optimizer: Optimizer) -> None:
    if needs_closure(optimizer):
        raise EngineError(
            f"{type(optimizer).__name__} evaluates the loss anew in a closure, and engine.step() "
            "has none to give it: use an optimizer whose step() needs no closure, such as AdamW, "
            "or torchloom.shard_model(model, stage=0) and a loop of your own"
        )


def _over_leaves(optimizer: Optimizer, local: OwnedParams) -> Optimizer:
    if optimizer.state:
        raise EngineError(
            "the optimizer has stepped before torchloom.initialize: its states belong to "
            "whole parameters. Hand over a fresh optimizer, and load states with "
            "engine.load_checkpoint"
        )
    local.keep_known(optimizer.param_groups)
    return optimizer


def _configured(config: OptimizerConfig, groups: Groups, local: OwnedParams) -> Optimizer:
    params = thawed_map(config.params)
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    try:
        if config.name == "muon":
            return _muon(params, groups, {id(each.param): each.spec for each in local})
        return _CLASSES[config.name](groups, **params)
    except TypeError as error:
        raise ConfigError(f"optimizer.params: {config.name}: {error}") from error


class MuonWithAuxAdam(OptimizerList):
    """What `"optimizer": {"type": "Muon"}` makes, by the name of DeepSpeed's class; its groups say `use_muon`, as there."""


def _muon(params: Mapping[str, Any], groups: Groups, specs: Mapping[int, ParamSpec]) -> Optimizer:
    """Return Muon over matrices, and AdamW over the rest and all that embeds: DeepSpeed's rule, by names.

    A parameter's attribute `use_muon` takes the rule's place.

    Raises:
        ConfigError: it asks for Muon of what is no matrix.
    """

    def is_muon(param: nn.Parameter) -> bool:
        spec = specs[id(param)]
        asked = getattr(param, "use_muon", None)
        is_matrix, name = len(spec.shape) == 2, spec.name.lower()
        if asked and not is_matrix:
            raise ConfigError(
                f"{spec.name!r} has use_muon = True and the shape {tuple(spec.shape)}, and torch.optim.Muon steps matrices "
                "alone: set it to False, or pass an optimizer of your own that takes such shapes"
            )
        by_name = is_matrix and "embed" not in name and "lm_head" not in name
        return by_name if asked is None else bool(asked)

    given = [each if isinstance(each, dict) else {"params": [each]} for each in groups]
    if given and not isinstance(groups[0], dict):
        given = [{"params": list(groups)}]
    made: list[Optimizer] = []
    for kind, lr, names, chosen in (
        (torch.optim.Muon, "muon_lr", _OF_MUON, is_muon),
        (torch.optim.AdamW, "adam_lr", _OF_ADAMW, lambda param: not is_muon(param)),
    ):
        found = [{**each, "params": [*filter(chosen, each["params"])]} for each in given]
        found = [{**each, "use_muon": kind is torch.optim.Muon} for each in found if each["params"]]
        options = {name: params[name] for name in names if name in params}
        if found:
            made.append(kind(found, lr=params.get(lr, params["lr"]), **options))  # type: ignore[arg-type]
    return MuonWithAuxAdam(made)


def complete_momentum(optimizer: Optimizer) -> None:
    """Give zero momentum to parameters of a fused SGD that have a gradient for the first time.

    A fused SGD fails if some parameters of a group have momentum and others have none (torch 2.11-2.13).
    Without dampening, one step from zero momentum gives the gradient, which is what SGD starts with.
    """
    for each in optimizer.linked() if isinstance(optimizer, OptimizerList) else ():
        complete_momentum(each)
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]) or group["dampening"]:
            continue
        present = [param for param in group["params"] if param.grad is not None]
        fresh = [p for p in present if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if len(fresh) < len(present):
            for param in fresh:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _from_factory(factory: OptimizerFactory, params: Groups) -> Optimizer:
    """Call a function on parameters that answer as whole ones, so that it can group them by shape."""
    if not callable(factory):
        raise ConfigError(
            f"optimizer= is a {type(factory).__name__}: pass a torch optimizer over the model's "
            "parameters, or a function from parameters to one"
        )
    made = factory(params)
    if isinstance(made, Optimizer):
        cut_held(made)  # some make states when they are made
    return made


def _params(model_parameters: Iterable[Any] | None, local: OwnedParams) -> Groups:
    """Return the parameters, or the groups, to optimize: those that the caller names, or all."""
    if model_parameters is None:
        return [each.param for each in local]
    entries = list(model_parameters)
    has_groups = bool(entries) and isinstance(entries[0], dict)
    groups = [{**each} for each in entries] if has_groups else [{"params": entries}]
    for group in groups:
        group["params"] = list(group["params"])
    local.keep_known(groups)
    return groups if has_groups else groups[0]["params"]


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
