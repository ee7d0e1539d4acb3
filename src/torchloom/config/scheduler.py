"""Make a schedule's name and keyword arguments from the `scheduler` section.

The Warmup family has DeepSpeed's names and meanings; every other name is a class of
torch.optim.lr_scheduler. The tables are literal, because a configuration is checked without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchloom.config import kinds
from torchloom.config.findings import Findings, nearest
from torchloom.config.frozen import frozen_map
from torchloom.config.kinds import Kind, show
from torchloom.config.model import OptimizerConfig, SchedulerConfig
from torchloom.config.params import check_params
from torchloom.config.schema import SchedulerSection

_PATH = "scheduler.params"
_NUMBER = kinds.number()
_SIGNED = kinds.number(least=-1e300)
_COUNT = kinds.whole(1)
_LAST = kinds.whole(-1)


class Schedule(NamedTuple):
    """Parameters of one schedule: the kind of each, and those without a default."""

    table: Mapping[str, Kind]
    required: tuple[str, ...] = ()


_WARMUP_STEPS: Mapping[str, Kind] = {
    "warmup_num_steps": kinds.whole(),
    "warmup_type": kinds.word("log", "linear"),
    "last_batch_iteration": _LAST,
}
_WARMUP_LR: Mapping[str, Kind] = {
    "warmup_min_lr": _NUMBER,
    "warmup_max_lr": _NUMBER,
    **_WARMUP_STEPS,
}
_MOMENTUM: Mapping[str, Kind] = {
    "cycle_momentum": kinds.flag,
    "base_momentum": _NUMBER,
    "max_momentum": _NUMBER,
}
WARMUP: Mapping[str, Schedule] = {
    "WarmupLR": Schedule(_WARMUP_LR),
    "WarmupDecayLR": Schedule({"total_num_steps": _COUNT, **_WARMUP_LR}, ("total_num_steps",)),
    "WarmupCosineLR": Schedule(
        {
            "total_num_steps": _COUNT,
            "warmup_min_ratio": kinds.number(0.0, 1.0),
            "cos_min_ratio": kinds.number(0.0, 1.0),
            **_WARMUP_STEPS,
        },
        ("total_num_steps",),
    ),
}
TORCH: Mapping[str, Schedule] = {
    "StepLR": Schedule({"step_size": _COUNT, "gamma": _NUMBER}, ("step_size",)),
    "MultiStepLR": Schedule(
        {"milestones": kinds.numbers(kinds.whole()), "gamma": _NUMBER}, ("milestones",)
    ),
    "ConstantLR": Schedule({"factor": kinds.number(0.0, 1.0), "total_iters": kinds.whole()}),
    "LinearLR": Schedule(
        {
            "start_factor": kinds.number(0.0, 1.0),
            "end_factor": kinds.number(0.0, 1.0),
            "total_iters": kinds.whole(),
        }
    ),
    "ExponentialLR": Schedule({"gamma": _NUMBER}, ("gamma",)),
    "PolynomialLR": Schedule({"total_iters": _COUNT, "power": _NUMBER}),
    "CosineAnnealingLR": Schedule({"T_max": _COUNT, "eta_min": _NUMBER}, ("T_max",)),
    "CosineAnnealingWarmRestarts": Schedule(
        {"T_0": _COUNT, "T_mult": _COUNT, "eta_min": _NUMBER}, ("T_0",)
    ),
    "CyclicLR": Schedule(
        {
            "base_lr": _NUMBER,
            "max_lr": _NUMBER,
            "step_size_up": _COUNT,
            "step_size_down": _COUNT,
            "mode": kinds.word("triangular", "triangular2", "exp_range"),
            "gamma": _NUMBER,
            "scale_mode": kinds.word("cycle", "iterations"),
            **_MOMENTUM,
        },
        ("base_lr", "max_lr"),
    ),
    "OneCycleLR": Schedule(
        {
            "max_lr": _NUMBER,
            "total_steps": _COUNT,
            "pct_start": kinds.number(0.0, 1.0),
            "anneal_strategy": kinds.word("cos", "linear"),
            "div_factor": kinds.above(0),
            "final_div_factor": kinds.above(0),
            "three_phase": kinds.flag,
            **_MOMENTUM,
        },
        ("max_lr", "total_steps"),
    ),
}
SCHEDULES: Mapping[str, Schedule] = {**WARMUP, **TORCH}

_INSTEAD = {
    "OneCycle": "use OneCycleLR",
    "LRRangeTest": "use CyclicLR, or LinearLR for one ramp",
    "ReduceLROnPlateau": "it needs a metric at each step: step it in the training loop",
    "LambdaLR": "it needs a function: pass a schedule object as lr_scheduler",
    "MultiplicativeLR": "it needs a function: pass a schedule object as lr_scheduler",
    "SequentialLR": "it holds other schedules: pass a schedule object as lr_scheduler",
    "ChainedScheduler": "it holds other schedules: pass a schedule object as lr_scheduler",
}
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3},
    "WarmupDecayLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3},
    "WarmupCosineLR": {"warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4},
}


def resolve_scheduler(
    section: SchedulerSection | None, optimizer: OptimizerConfig | None, findings: Findings
) -> SchedulerConfig | None:
    """Return the schedule to build, or None when there is none in the configuration.

    Args:
        section: the section `scheduler`.
        optimizer: the resolved optimizer, whose lr is the default of `warmup_max_lr`: "auto".
        findings: collects errors, notes and hints.
    """
    if section is None or findings.has_error_at("scheduler.type"):
        return None
    name = _name(section.type, findings)
    if name is None:
        return None
    schedule = SCHEDULES[name]
    lr = optimizer.params["lr"] if optimizer else None
    auto = {"warmup_min_lr": 0.0} | ({} if lr is None else {"warmup_max_lr": lr})
    table = {"last_epoch": _LAST, **schedule.table} if name in TORCH else schedule.table
    params = check_params(section.params, table, _PATH, findings, auto=auto)
    for missing in schedule.required:
        if missing not in params and not findings.has_error_at(f"{_PATH}.{missing}"):
            findings.error(f"{_PATH}.{missing}", f"not given; {name} needs it", _missing(missing))
    for position in ("last_epoch", "last_batch_iteration"):
        if params.pop(position, -1) != -1:
            findings.warn(f"{_PATH}.{position}", "no effect: a checkpoint restores the position")
    if name in WARMUP:
        _fill_warmup(name, params, lr, findings)
    _check_lengths(params, findings)
    return SchedulerConfig(name=name, params=frozen_map(params))


def _missing(parameter: str) -> str:
    if parameter == "total_num_steps":
        return 'write the optimizer steps of the run, or "auto" where the caller fills them in'
    return "write it"


def _name(given: str, findings: Findings) -> str | None:
    for name in SCHEDULES:
        if given.lower() == name.lower():
            return name
    path = "scheduler.type"
    for name, instead in _INSTEAD.items():
        if given.lower() == name.lower():
            findings.error(path, f"{name} cannot be built from a configuration", instead)
            return None
    close = nearest(given, SCHEDULES)
    ending = f"did you mean {close}?" if close else f"known: {', '.join(SCHEDULES)}"
    findings.error(path, f"{show(given)} is not a schedule" if given else "not given", ending)
    return None


def _fill_warmup(name: str, params: dict[str, object], lr: object, findings: Findings) -> None:
    """Fill in DeepSpeed's defaults, and warn when one of them overrides the optimizer's rate."""
    path = f"{_PATH}.warmup_max_lr"
    is_open = "warmup_max_lr" in _DEFAULTS[name] and "warmup_max_lr" not in params
    if is_open and lr not in (None, 1e-3) and not findings.has_error_at(path):
        findings.warn(
            path,
            f"not given: 0.001, as in DeepSpeed, which overrules optimizer.params.lr {lr}; "
            "write the rate that is meant",
        )
    for key, value in _DEFAULTS[name].items():
        params.setdefault(key, value)
    params.setdefault("warmup_num_steps", 1000)
    params.setdefault("warmup_type", "log")


def _check_lengths(params: dict[str, object], findings: Findings) -> None:
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps")
    if isinstance(total, int) and isinstance(warmup, int) and warmup > total:
        findings.warn(
            f"{_PATH}.total_num_steps",
            f"{total} is shorter than warmup_num_steps {warmup}: the warm-up never ends",
        )
