"""Make a torch optimizer's name and keyword arguments from the `optimizer` section.

DeepSpeed's "Adam" means AdamW unless `adam_w_mode` is false, and the default weight decay of its Adam
family is 0. torchloom does the same and adds a note. "Muon" is torch.optim.Muon for matrices and AdamW for the rest, with
DeepSpeed's names of arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torchloom.config import kinds
from torchloom.config.findings import Findings, nearest
from torchloom.config.frozen import frozen_map
from torchloom.config.keys import check_params
from torchloom.config.kinds import Kind, show
from torchloom.config.model import OptimizerConfig
from torchloom.config.schema import OptimizerSection

Name = Literal["adamw", "adam", "sgd", "muon"]

_PATH = "optimizer.params"
DEEPSPEED_ONLY = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none")
_NUMBERS = "lr muon_lr adam_lr weight_decay eps momentum dampening"
_FLAGS = "maximize foreach fused differentiable amsgrad capturable nesterov"
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(_NUMBERS.split(), kinds.number()),
    **dict.fromkeys((*_FLAGS.split(), *DEEPSPEED_ONLY), kinds.flag),
    "betas": kinds.numbers(kinds.number(0.0, 1.0 - 2.0**-53), 2),
    "ns_steps": kinds.whole(1),
    "ns_method": kinds.word("gram", "standard"),
    "adjust_lr_fn": kinds.word("original", "match_rms_adamw"),
}
"""What each parameter takes; those of one name mean the same in each optimizer."""
_SHARED = "lr weight_decay maximize foreach fused differentiable"
_ADAM = f"{_SHARED} betas eps amsgrad capturable {' '.join(DEEPSPEED_ONLY)}"
_PARAMETERS: Mapping[Name, str] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": f"{_SHARED} momentum dampening nesterov",
    "muon": "lr muon_lr adam_lr weight_decay momentum nesterov ns_steps ns_method adjust_lr_fn betas eps",
}
TABLES: Mapping[Name, Mapping[str, Kind]] = {
    name: {each: _KINDS[each] for each in names.split()} for name, names in _PARAMETERS.items()
}
_SHOWN = '"AdamW", "Adam", "SGD" or "Muon"'
_AUTO = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum": None}


def resolve_optimizer(
    section: OptimizerSection | None, findings: Findings
) -> OptimizerConfig | None:
    """Return the optimizer to build, or None when the caller brings one."""
    if section is None or findings.has_error_at("optimizer.type"):
        return None
    name = _name(section.type, findings)
    if name is None:
        return None
    given = _without_clipping(section.params, findings)
    params = check_params(given, TABLES[name], _PATH, findings, auto=_AUTO)
    if name in ("adamw", "adam"):
        name = _adam(name, params, findings)
    if name == "sgd":
        _check_sgd(params, findings)
    if name == "muon":
        _muon(params, findings)
    _fill(name, params, findings)
    return OptimizerConfig(name=name, params=frozen_map(params))


def _name(given: str, findings: Findings) -> Name | None:
    for name in TABLES:
        if given.lower() == name:
            return name
    if not given:
        findings.error("optimizer.type", "not given", f"write {_SHOWN}")
        return None
    close = nearest(given, ("AdamW", "Adam", "SGD", "Muon"))
    findings.error(
        "optimizer.type",
        f"{show(given)} is not built here",
        f"use {_SHOWN}; nearest: {close or 'AdamW'}",
    )
    return None


def _without_clipping(given: Mapping[str, object], findings: Findings) -> dict[str, object]:
    """Refuse `max_grad_norm`, which belongs at the top level as `gradient_clipping`."""
    if "max_grad_norm" in given:
        value = show(given["max_grad_norm"])
        findings.error(
            f"{_PATH}.max_grad_norm",
            "clipping is not a parameter of the optimizer",
            f"write gradient_clipping: {value} at the top level",
        )
    return {name: value for name, value in given.items() if name != "max_grad_norm"}


def _adam(name: Name, params: dict[str, object], findings: Findings) -> Name:
    """Translate DeepSpeed's own parameters and return which Adam is meant."""
    asked = {key: params.pop(key) for key in DEEPSPEED_ONLY if key in params}
    if asked.get("bias_correction") is False:
        findings.error(
            f"{_PATH}.bias_correction", "false: torch's Adam always corrects", "remove it"
        )
    if name == "adam" and asked.get("adam_w_mode", True):
        findings.info(
            "optimizer.type",
            '"Adam" is AdamW, as in DeepSpeed; for plain Adam set params.adam_w_mode to false',
        )
        name = "adamw"
    if "weight_decay" not in params:
        is_of_torch = name == "adamw" and bool(asked.get("torch_adam"))
        params["weight_decay"] = 0.01 if is_of_torch else 0.0
        if name == "adamw" and not is_of_torch:
            text = "not given: 0.0, as in DeepSpeed (torch.optim.AdamW: 0.01)"
            findings.info(f"{_PATH}.weight_decay", text)
    return name


def _muon(params: dict[str, object], findings: Findings) -> None:
    """Take DeepSpeed's defaults, and what chooses between its two ways to the same update."""
    if params.pop("ns_method", None) == "gram":
        findings.info(
            f"{_PATH}.ns_method",
            '"gram" is not built here: torch.optim.Muon iterates the standard way, to the same update but for rounding',
        )
    for key, value in (("weight_decay", 0.0), ("betas", (0.9, 0.95)), ("eps", 1e-10)):
        if key not in params:
            params[key] = value
            findings.info(f"{_PATH}.{key}", f"not given: {value}, as in DeepSpeed's Muon")


def _check_sgd(params: dict[str, object], findings: Findings) -> None:
    if params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        findings.error(
            f"{_PATH}.nesterov",
            "true needs a momentum and no dampening",
            "set momentum above 0 and remove dampening, or set nesterov to false",
        )


def _fill(name: Name, params: dict[str, object], findings: Findings) -> None:
    """Fill in defaults, and choose torch's fused kernel."""
    if "lr" not in params and not findings.has_error_at(f"{_PATH}.lr"):
        findings.info(f"{_PATH}.lr", "not given: 0.001")
    params.setdefault("lr", 1e-3)
    if name != "sgd":
        params.setdefault("betas", (0.9, 0.999))
        params.setdefault("eps", 1e-8)
    if params.get("fused"):
        clash = [other for other in ("foreach", "differentiable") if params.get(other)]
        if clash:
            findings.error(
                f"{_PATH}.fused", f"true excludes {' and '.join(clash)}", "keep one of them"
            )
    others = ("foreach", "differentiable", "fused")
    # On CPU foreach is 7x slower than fused; CUDA's fused kernels are the fastest as well. With
    # dampening, fused SGD cannot step a parameter whose first gradient comes later than others'.
    if not any(params.get(o) is not None for o in others) and not params.get("dampening"):
        params["fused"] = True
