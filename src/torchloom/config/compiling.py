"""From the `compile` section to one `CompileOptions`; DeepSpeed's pass names become torchloom's."""

from __future__ import annotations

from collections.abc import Mapping

from torchloom.config import kinds
from torchloom.config.findings import Findings
from torchloom.config.frozen import frozen_map
from torchloom.config.kinds import Kind, show
from torchloom.config.model import CompileOptions
from torchloom.config.offload import OPT_STATE_PASSES
from torchloom.config.params import check_params
from torchloom.config.schema_compile import CompileSection

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
RENAMED = {
    **{mark: f"zero{stage}" for mark, stage in _STAGE_MARKS.items()},
    **{f"zero{stage}_compile": f"zero{stage}" for stage in (1, 2, 3)},
}
_STAGE_OF = {f"zero{stage}": stage for stage in (1, 2, 3)}
_PHASES = ("offload_activation_floor",)
_REFUSED = {
    "autosp": "sequence parallelism is not supported; remove it and use ZeRO stage 3",
    "autotp": "tensor parallelism is not supported; remove it and use ZeRO stage 3",
}


def resolve_compile(section: CompileSection, stage: int, findings: Findings) -> CompileOptions:
    """Return what `engine.compile()` is to do."""
    return CompileOptions(
        enabled=section.enabled,
        deepcompile=section.deepcompile,
        backend=section.backend,
        kwargs=_kwargs(section.kwargs, findings),
        passes=_passes(section, stage, findings),
        disable_passes=tuple(RENAMED.get(name, name) for name in section.disable_passes),
        strict=section.strict,
        dump_graphs=section.dump_graphs,
        debug_log=section.debug_log,
    )


def _kwargs(given: Mapping[str, object], findings: Findings) -> Mapping[str, object]:
    path = "compile.kwargs"
    if "backend" in given:
        findings.error(
            f"{path}.backend", "the backend is given elsewhere", "write compile.backend instead"
        )
    rest = {name: value for name, value in given.items() if name != "backend"}
    return frozen_map(check_params(rest, _KWARGS, path, findings))


def _passes(section: CompileSection, stage: int, findings: Findings) -> tuple[str, ...] | None:
    names, path = section.passes, _PASSES
    scheduled = _first_step(section.schedule, findings)
    if names is None:
        names, path = scheduled, f"{_SCHEDULE}[0][1]"
    elif scheduled is not None:
        findings.error(_SCHEDULE, f"{_PASSES} is given too", "keep one of the two")
    if names is None:
        return None
    known = _translated(names, path, findings)
    for name in known:
        _check_stage(name, stage, path, findings)
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


def _translated(names: tuple[str, ...], path: str, findings: Findings) -> tuple[str, ...]:
    kept = []
    for name in names:
        ours = RENAMED.get(name, name)
        if name in _REFUSED:
            what, _, fix = _REFUSED[name].partition("; ")
            findings.error(path, f"{name}: {what}", fix)
        elif name in OPT_STATE_PASSES:
            findings.info(path, f"{name}: the optimizer step streams its states, without a pass")
        elif name in _PHASES:
            findings.info(path, f"{name} is a phase of another pass and is left out")
        elif ours in kept:
            findings.error(path, f"{ours} is listed twice", "list each pass once")
        else:
            kept.append(ours)
    return tuple(kept)


def _first_step(schedule: tuple[object, ...] | None, findings: Findings) -> tuple[str, ...] | None:
    """Return the passes of step 0; later steps would plan again, which this release does not."""
    found = None
    for index, entry in enumerate(schedule or ()):
        path = f"{_SCHEDULE}[{index}]"
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            findings.error(path, f"{show(entry)} is not an entry", "write [step, [names]]")
            continue
        step, names = entry
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            findings.error(f"{path}[0]", f"{show(step)} is not a step", "write 0")
        elif step > 0:
            findings.error(
                f"{path}[0]",
                f"{step}: planning again at a later step is not in this release",
                "keep the entry of step 0 alone",
            )
        elif found is not None:
            findings.error(f"{path}[0]", "step 0 is given twice", "merge the two entries")
        else:
            found = _entry_names(names, f"{path}[1]", findings)
    return found


def _entry_names(names: object, path: str, findings: Findings) -> tuple[str, ...]:
    """Return the names of one entry, each alone or paired with a memory budget."""
    if not isinstance(names, list | tuple):
        findings.error(path, f"{show(names)} is not a list of names", 'write ["name", ...]')
        return ()
    found = []
    for index, item in enumerate(names):
        if isinstance(item, list | tuple) and len(item) == 2:
            findings.warn(f"{path}[{index}][1]", "a pass's own memory budget has no effect")
            item = item[0]
        if isinstance(item, str) and item:
            found.append(item)
        else:
            findings.error(f"{path}[{index}]", f"{show(item)} is not a name", "write a string")
    return tuple(found)
