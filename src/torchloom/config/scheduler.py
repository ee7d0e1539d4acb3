"""Make a schedule's name and keyword arguments from the `scheduler` section.

Five schedules have DeepSpeed's names and meanings; every other name is a class of
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
_RATES = kinds.number_or_numbers(_NUMBER)


class Schedule(NamedTuple):
    """Parameters of one schedule: the kind of each, and those without a default."""

    table: Mapping[str, Kind]
    required: tuple[str, ...] = ()


_WARMUP_STEPS: Mapping[str, Kind] = {
    "warmup_num_steps": _COUNT,
    "warmup_type": kinds.word("log", "linear"),
    "last_batch_iteration": _LAST,
}
_WARMUP_LR: Mapping[str, Kind] = {
    "warmup_min_lr": _RATES,
    "warmup_max_lr": _RATES,
    **_WARMUP_STEPS,
}
_MOMENTUM: Mapping[str, Kind] = {
    "cycle_momentum": kinds.flag,
    "base_momentum": _NUMBER,
    "max_momentum": _NUMBER,
}
DEEPSPEED: Mapping[str, Schedule] = {
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
    "LRRangeTest": Schedule(
        {
            "lr_range_test_min_lr": _RATES,
            "lr_range_test_step_size": _COUNT,
            "lr_range_test_step_rate": _SIGNED,
            "lr_range_test_staircase": kinds.flag,
            "last_batch_iteration": _LAST,
        }
    ),
    "OneCycle": Schedule(
        {
            "cycle_min_lr": _RATES,
            "cycle_max_lr": _RATES,
            "decay_lr_rate": _NUMBER,
            "cycle_first_step_size": kinds.above(0),
            "cycle_second_step_size": _NUMBER,
            "cycle_first_stair_count": _LAST,
            "cycle_second_stair_count": _LAST,
            "decay_step_size": _NUMBER,
            "cycle_momentum": kinds.flag,
            "cycle_min_mom": _RATES,
            "cycle_max_mom": _RATES,
            "decay_mom_rate": _SIGNED,
            "last_batch_iteration": _LAST,
        },
        ("cycle_min_lr", "cycle_max_lr"),
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
SCHEDULES: Mapping[str, Schedule] = {**DEEPSPEED, **TORCH}

_INSTEAD = {
    "ReduceLROnPlateau": "it needs a metric at each step: step it in the training loop",
    "LambdaLR": "it needs a function: pass a schedule object as lr_scheduler",
    "MultiplicativeLR": "it needs a function: pass a schedule object as lr_scheduler",
    "SequentialLR": "it holds other schedules: pass a schedule object as lr_scheduler",
    "ChainedScheduler": "it holds other schedules: pass a schedule object as lr_scheduler",
}
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "WarmupLR": {"warmup_min_lr": 0.0},
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
    if params.pop("last_epoch", -1) != -1:
        findings.error(
            f"{_PATH}.last_epoch",
            "torch goes on from a position only with a resumed optimizer",
            "remove it; a checkpoint restores the position",
        )
    if name in _DEFAULTS:
        _fill_warmup(name, params, section.params, lr, findings)
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


def _fill_warmup(
    name: str,
    params: dict[str, object],
    given: Mapping[str, object],
    lr: object,
    findings: Findings,
) -> None:
    """Fill in DeepSpeed's defaults, and warn when one of them overrides the optimizer's rate."""
    path, defaults = f"{_PATH}.warmup_max_lr", dict(_DEFAULTS[name])
    if "warmup_max_lr" in given:  # null, too, is the optimizer's rate
        defaults.pop("warmup_max_lr", None)
    if "warmup_max_lr" in defaults and lr not in (None, 1e-3):
        findings.warn(
            path,
            f"not given: 0.001, as in DeepSpeed, which overrules optimizer.params.lr {lr}; "
            "write the rate that is meant",
        )
    for key, value in defaults.items():
        params.setdefault(key, value)
    params.setdefault("warmup_num_steps", 1000)
    params.setdefault("warmup_type", "log")


def _check_lengths(params: dict[str, object], findings: Findings) -> None:
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps")
    if isinstance(total, int) and isinstance(warmup, int) and warmup > total:
        findings.warn(
            f"{_PATH}.total_num_steps",
            f"{total} is shorter than warmup_num_steps {warmup}: the rate falls at once to its lowest when the "
            "warmup ends",
        )
