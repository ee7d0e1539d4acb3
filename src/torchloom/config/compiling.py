"""Make one `CompileOptions` from the `compile` section; DeepSpeed's pass names become torchloom's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchloom.config import kinds
from torchloom.config.budget import MemoryBudget, parse_budget
from torchloom.config.fields import record_of
from torchloom.config.findings import Findings
from torchloom.config.frozen import frozen_map
from torchloom.config.keys import Written, check_params
from torchloom.config.kinds import Kind, show
from torchloom.config.model import CompileOptions, OffloadConfig, PassName, ZeroConfig
from torchloom.config.schema_sections import CompileSection

_PASSES = "compile.passes"
_SCHEDULE = "compile.schedule"
_KWARGS: Mapping[str, Kind] = {
    "mode": kinds.text,
    "fullgraph": kinds.flag,
    "dynamic": kinds.flag,
    "options": kinds.mapping,
    "disable": kinds.flag,
}
_STAGE_MARKS = {"z1": 1, "z2": 2, "z3": 3}
RENAMED = {mark: f"zero{stage}" for mark, stage in _STAGE_MARKS.items()}
_STAGE_OF = {f"zero{stage}{end}": stage for stage in (1, 2, 3) for end in ("", "_compile")}
PHASES = (
    *("offload_adam_states_for_init", "offload_adam_states_sync", "offload_activation_floor"),
    "move_opt_states_sync",
)
"""Names that schedules may hold and that do nothing: DeepSpeed's phases, for which torchloom's one plan has no need."""
SIZES = {
    "gather_bucket_bytes": ("bucket", "gather_bytes"),
    "reduce_bucket_bytes": ("bucket", "reduce_bytes"),
    "prefetch_bytes": ("prefetch", "max_bytes"),
}
"""Sizes of transfers, with the pass and its option that each sets."""
_REFUSED = {
    "autosp": "sequence parallelism is not supported; remove it and use ZeRO stage 3",
    "autotp": "tensor parallelism is not supported; remove it and use ZeRO stage 3",
}


def resolve_compile(
    section: CompileSection, stage: int, written: Written, findings: Findings
) -> CompileOptions:
    """Return the options of `engine.compile()`.

    Args:
        section: the section `compile`.
        stage: the ZeRO stage, which passes may contradict.
        written: which values the user gave as "auto" or null.
        findings: collects errors, notes and hints.
    """
    budget = section.memory_budget
    if "compile.memory_budget" in written.auto:
        budget = parse_budget("auto")
    passes = _passes(section.passes, stage, findings)
    if passes is not None and section.schedule is not None:
        findings.error(_SCHEDULE, f"{_PASSES} is given too", "keep one of the two")
    return record_of(
        CompileOptions,
        section,
        kwargs=_kwargs(section.kwargs, findings),
        passes=passes,
        disable_passes=tuple(RENAMED.get(name, name) for name in section.disable_passes),
        schedule=_schedule(section.schedule, stage, findings),
        memory_budget=budget,
    )


def _kwargs(given: Mapping[str, object], findings: Findings) -> Mapping[str, object]:
    path = "compile.kwargs"
    if "backend" in given:
        findings.error(
            f"{path}.backend", "the backend is given elsewhere", "write compile.backend instead"
        )
    rest = {name: value for name, value in given.items() if name != "backend"}
    return frozen_map(check_params(rest, _KWARGS, path, findings))


def _passes(
    names: tuple[str, ...] | None, stage: int, findings: Findings
) -> tuple[str, ...] | None:
    if names is None:
        return None
    known = tuple(str(item) for item in _translated(names, _PASSES, stage, findings))
    return None if set(names) <= set(_STAGE_MARKS) else known


def _check_stage(name: str, stage: int, path: str, findings: Findings) -> None:
    asked = _STAGE_OF.get(name, stage)
    if asked == stage or findings.has_error_at("zero_optimization.stage", "zero_optimization"):
        return
    own = f"write zero{stage}" if stage else "remove it"
    findings.error(
        path,
        f"{name} contradicts zero_optimization.stage {stage}",
        f"{own}, or set zero_optimization.stage to {asked}",
    )


def _translated(
    items: Sequence[PassName], path: str, stage: int, findings: Findings
) -> tuple[PassName, ...]:
    """Return names as torchloom knows them; phases of DeepSpeed's passes are left out."""
    kept: dict[str, PassName] = {}
    for item in items:
        name, *budget = (item,) if isinstance(item, str) else item
        ours = RENAMED.get(name, name)
        if name in _REFUSED:
            what, _, fix = _REFUSED[name].partition("; ")
            findings.error(path, f"{name}: {what}", fix)
        elif name in PHASES:
            findings.info(path, f"{name} is a phase of another pass and is left out")
        elif ours in kept:
            findings.error(path, f"{ours} is listed twice", "list each pass once")
        else:
            _check_stage(ours, stage, path, findings)
            kept[ours] = (ours, budget[0]) if budget else ours
    return tuple(kept.values())


def _schedule(
    given: tuple[object, ...] | None, stage: int, findings: Findings
) -> tuple[tuple[int, tuple[PassName, ...]], ...] | None:
    if given is None:
        return None
    entries: dict[int, tuple[PassName, ...]] = {}
    for index, entry in enumerate(given):
        path = f"{_SCHEDULE}[{index}]"
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            findings.error(path, f"{show(entry)} is not an entry", "write [step, [names]]")
            continue
        step, last = findings.take(kinds.whole(), entry[0], f"{path}[0]"), max(entries, default=-1)
        items = _entry_names(entry[1], f"{path}[1]", findings)
        if not isinstance(step, int):
            continue
        if step <= last:
            findings.error(
                f"{path}[0]",
                f"step {step} comes behind step {last}",
                "list the entries in the order in which they take effect, each step once",
            )
        entries[step] = _translated(items, f"{path}[1]", stage, findings)
    return tuple(entries.items())


def _entry_names(names: object, path: str, findings: Findings) -> tuple[PassName, ...]:
    """Return the names of one entry, each alone or paired with a memory budget or with options."""
    found: list[PassName] = []
    for index, item in enumerate(findings.take(kinds.sequence, names, path) or ()):
        here = f"{path}[{index}]"
        name, more = item if isinstance(item, list | tuple) and len(item) == 2 else (item, None)
        name = findings.take(kinds.text, name, here)
        if name is not None and more is not None:
            more = findings.take(_budget_or_options, more, f"{here}[1]")
        if name is not None:
            found.append(name if more is None else (name, more))
    return tuple(found)


def _budget_or_options(value: object) -> MemoryBudget | Mapping[str, object]:
    return frozen_map(value) if isinstance(value, Mapping) else parse_budget(value)


def resolve_pass_options(section: CompileSection, zero: ZeroConfig) -> Mapping[str, Any]:
    """Return the options of passes that the settings give, by the name of the pass.

    Args:
        section: the `compile` section; a key declared with `option="pass.option"` sets that option.
        zero: its bucket sizes are in bytes.
    """
    found: dict[str, dict[str, object]] = {
        "overlap_copies": {"slots": 2 if section.double_buffer else 1},
    }
    for key, (name, option) in SIZES.items():
        if (size := getattr(zero, key)) is not None:
            found.setdefault(name, {})[option] = size
    for key in CompileSection.keys.values():
        if key.option:
            name, _, option = key.option.partition(".")
            found.setdefault(name, {})[option] = getattr(section, key.name)
    return frozen_map(found)


def resolve_extra_passes(section: CompileSection, offload: OffloadConfig) -> tuple[str, ...]:
    """Return the passes that settings ask for, beside those of the list or preset.

    Args:
        section: the `compile` section; a key declared with `adds="pass"` adds that pass.
        offload: what DeepSpeed's keys ask for as well.
    """
    asked = {
        key.adds for key in CompileSection.keys.values() if key.adds and getattr(section, key.name)
    }
    if offload.parameters:
        asked.add("offload_parameters")
    if offload.opt_states:
        asked.add("offload_opt_states")
    return tuple(sorted(asked))
