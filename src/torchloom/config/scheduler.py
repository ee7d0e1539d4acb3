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
from torchloom.config.keys import check_params
from torchloom.config.kinds import Kind, show
from torchloom.config.model import OptimizerConfig, SchedulerConfig
from torchloom.config.schema import SchedulerSection

_PATH = "scheduler.params"
_NUMBER = kinds.number()
_SIGNED = kinds.number(least=-1e300)
_RATIO = kinds.number(0.0, 1.0)
_COUNT = kinds.whole(1)
_LAST = kinds.whole(-1)
_RATES = kinds.number_or_numbers(_NUMBER)
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(
        ("gamma", "power", "eta_min", "base_momentum", "max_momentum", "base_lr", "max_lr"), _NUMBER
    ),
    **dict.fromkeys(("decay_lr_rate", "cycle_second_step_size", "decay_step_size"), _NUMBER),
    **dict.fromkeys(("lr_range_test_step_rate", "decay_mom_rate"), _SIGNED),
    **dict.fromkeys(("warmup_min_ratio", "cos_min_ratio", "factor", "pct_start"), _RATIO),
    **dict.fromkeys(("start_factor", "end_factor"), _RATIO),
    **dict.fromkeys(("warmup_num_steps", "total_num_steps", "lr_range_test_step_size"), _COUNT),
    **dict.fromkeys(("step_size", "total_iters", "T_max", "T_0", "T_mult", "total_steps"), _COUNT),
    **dict.fromkeys(("step_size_up", "step_size_down"), _COUNT),
    **dict.fromkeys(("last_batch_iteration", "last_epoch"), _LAST),
    **dict.fromkeys(("cycle_first_stair_count", "cycle_second_stair_count"), _LAST),
    **dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr"), _RATES),
    **dict.fromkeys(("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"), _RATES),
    **dict.fromkeys(("lr_range_test_staircase", "cycle_momentum", "three_phase"), kinds.flag),
    **dict.fromkeys(("cycle_first_step_size", "div_factor", "final_div_factor"), kinds.above(0)),
    "milestones": kinds.numbers(kinds.whole()),
    "warmup_type": kinds.word("log", "linear"),
    "mode": kinds.word("triangular", "triangular2", "exp_range"),
    "scale_mode": kinds.word("cycle", "iterations"),
    "anneal_strategy": kinds.word("cos", "linear"),
}
"""What each parameter takes; those of one name mean the same in each schedule."""


class Schedule(NamedTuple):
    """Parameters of one schedule: the kind of each, and those without a default."""

    table: Mapping[str, Kind]
    required: tuple[str, ...]


def _schedule(required: str, others: str = "") -> Schedule:
    names = f"{required} {others}".split()
    return Schedule({name: _KINDS[name] for name in names}, tuple(required.split()))


_WARMUP = "warmup_num_steps warmup_type last_batch_iteration"
_MOMENTUM = "cycle_momentum base_momentum max_momentum"
DEEPSPEED: Mapping[str, Schedule] = {
    "WarmupLR": _schedule("", f"warmup_min_lr warmup_max_lr {_WARMUP}"),
    "WarmupDecayLR": _schedule("total_num_steps", f"warmup_min_lr warmup_max_lr {_WARMUP}"),
    "WarmupCosineLR": _schedule("total_num_steps", f"warmup_min_ratio cos_min_ratio {_WARMUP}"),
    "LRRangeTest": _schedule(
        "",
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
        "last_batch_iteration",
    ),
    "OneCycle": _schedule(
        "cycle_min_lr cycle_max_lr",
        "decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
        "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
        "decay_mom_rate last_batch_iteration",
    ),
}
TORCH: Mapping[str, Schedule] = {
    "StepLR": _schedule("step_size", "gamma"),
    "MultiStepLR": _schedule("milestones", "gamma"),
    "ConstantLR": _schedule("", "factor total_iters"),
    "LinearLR": _schedule("", "start_factor end_factor total_iters"),
    "ExponentialLR": _schedule("gamma"),
    "PolynomialLR": _schedule("", "total_iters power"),
    "CosineAnnealingLR": _schedule("T_max", "eta_min"),
    "CosineAnnealingWarmRestarts": _schedule("T_0", "T_mult eta_min"),
    "CyclicLR": _schedule(
        "base_lr max_lr", f"step_size_up step_size_down mode gamma scale_mode {_MOMENTUM}"
    ),
    "OneCycleLR": _schedule(
        "max_lr total_steps",
        f"pct_start anneal_strategy div_factor final_div_factor three_phase {_MOMENTUM}",
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
    path = "scheduler.type"
    name = {each.lower(): each for each in (*SCHEDULES, *_INSTEAD)}.get(given.lower())
    if name in SCHEDULES:
        return name
    if name is not None:
        findings.error(path, f"{name} cannot be built from a configuration", _INSTEAD[name])
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
