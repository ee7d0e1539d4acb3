"""Load and check a configuration: read, clean, validate, resolve, then report everything at once.

    source -> plain dict -> schema's keys only -> validated schema -> frozen Config

Each step adds to the same findings and continues with defaults where a value is wrong, so one run of
the check shows every problem.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torchloom.config import source as reading
from torchloom.config.batch import resolve_batch
from torchloom.config.compiling import resolve_compile, resolve_extra_passes, resolve_pass_options
from torchloom.config.fields import record_of
from torchloom.config.findings import Findings, Hint, Note, Problem, nearest
from torchloom.config.frozen import frozen_map
from torchloom.config.keys import Reader, Written, known_paths, without_dotted
from torchloom.config.kinds import show
from torchloom.config.model import CheckpointConfig, Config, TimeoutsConfig
from torchloom.config.monitors import resolve_monitors
from torchloom.config.optimizer import resolve_optimizer
from torchloom.config.precision import resolve_non_finite, resolve_precision
from torchloom.config.scheduler import resolve_scheduler
from torchloom.config.schema import ConfigSchema, TimeoutsSection
from torchloom.config.zero import resolve_offload, resolve_zero
from torchloom.errors import ConfigError

_MARGIN_S = 60.0
"""The process group times out later than torchloom's own limits, because torchloom's errors say more."""
_FREE_FORM = ("optimizer.params.", "scheduler.params.", "compile.kwargs.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What a check found; `config` is None when there are errors."""

    name: str
    config: Config | None
    """As far as it is known: paths that are `open` have a default in it."""
    errors: tuple[Problem, ...]
    notes: tuple[Note, ...]
    hints: tuple[Hint, ...]
    open: tuple[str, ...] = ()
    """Paths that are "auto", and that the caller fills in, as a Trainer does: `auto=` of `load_config`."""


def load_config(
    source: reading.Source,
    *,
    world_size: int | None = None,
    auto: Mapping[str, object] | None = None,
    replaced: Collection[str] = (),
) -> Config:
    """Read a DeepSpeed-shaped configuration and return it validated and resolved.

    Args:
        source: a dict (it is not changed), the path of a JSON file, base64 of JSON text, or None for
            the defaults.
        world_size: ranks of the data-parallel group; None when it is not known yet.
        auto: values for keys written as "auto", by dotted path.
        replaced: sections that do not count, because the caller brings what they describe: "optimizer",
            "scheduler".

    Raises:
        ConfigError: the source cannot be read, something in it is wrong, or an "auto" has no value; the
            message has all errors, one per line, each with its path and what to do.

    Example:
        >>> load_config({"train_micro_batch_size_per_gpu": 4}, world_size=8).batch.train_batch_size
        32
    """
    checked = check_config(source, world_size=world_size, auto=auto, replaced=replaced)
    unfilled = [
        Problem(
            path=path,
            what='"auto" has no value: nobody resolved it',
            fix=f"write a value, or pass auto={{{show(path)}: ...}}",
        )
        for path in checked.open
    ]
    errors = [*checked.errors, *unfilled]
    if checked.config is None or errors:
        count = len(errors)
        lines = "".join(f"\n  {error}" for error in errors)
        raise ConfigError(
            f"{count} {'error' if count == 1 else 'errors'} in {checked.name}:{lines}"
        )
    return checked.config


def check_config(
    source: reading.Source,
    *,
    world_size: int | None = None,
    auto: Mapping[str, object] | None = None,
    replaced: Collection[str] = (),
) -> Checked:
    """Check a configuration and return what was found, instead of raising.

    Args:
        source: as for `load_config`.
        world_size: as for `load_config`.
        auto: as for `load_config`.
        replaced: as for `load_config`.

    Raises:
        ConfigError: the source cannot be read, or `world_size` is not a positive number.

    Example:
        >>> [error.path for error in check_config({"fp16": {"hysteresis": 0}}).errors]
        ['fp16.hysteresis']
    """
    if world_size is not None and world_size < 1:
        raise ConfigError(f"world_size is {world_size}: pass the number of ranks, at least 1")
    findings, written = Findings(), Written()
    document = reading.read(source, findings)
    values = dict(auto or {})
    counted = {name: value for name, value in document.tree.items() if name not in replaced}
    for name in document.tree.keys() & set(replaced):
        findings.info(name, f"not used: the {name} that the caller gives takes its place")
    counted = without_dotted(counted, findings)
    schema = Reader(values, findings, written).section(ConfigSchema, counted)
    _tell_unknown_values(values, findings)
    config = _resolve(schema, world_size, written, findings)
    notes = tuple(replace(note, path=written.path(note.path)) for note in findings.notes)
    hints = tuple(replace(hint, path=written.path(hint.path)) for hint in findings.hints)
    errors = tuple(replace(error, path=written.path(error.path)) for error in findings.errors)
    kept = replace(config, notes=notes, hints=hints, source=frozen_map(document.tree))
    return Checked(
        name=document.name,
        config=None if errors else kept,
        errors=errors,
        notes=notes,
        hints=hints,
        open=tuple(written.path(path) for path in findings.open),
    )


def _resolve(
    schema: ConfigSchema, world_size: int | None, written: Written, findings: Findings
) -> Config:
    precision = resolve_precision(schema, written, findings)
    optimizer = resolve_optimizer(schema.optimizer, findings)
    zero = resolve_zero(schema.zero_optimization, precision, world_size, findings)
    compiling = resolve_compile(schema.compile, schema.zero_optimization.stage, written, findings)
    offload = resolve_offload(schema, world_size, written, findings)
    return Config(
        batch=resolve_batch(schema, world_size, written, findings),
        zero=zero,
        precision=precision,
        gradient_clipping=_clipping(schema, written, findings),
        non_finite=resolve_non_finite(schema, precision, findings),
        optimizer=optimizer,
        scheduler=resolve_scheduler(schema.scheduler, optimizer, findings),
        offload=offload,
        compile=replace(
            compiling,
            pass_options=resolve_pass_options(schema.compile, zero),
            extra_passes=resolve_extra_passes(schema.compile, offload),
        ),
        timeouts=_timeouts(schema.timeouts),
        checkpoint=record_of(CheckpointConfig, schema.checkpoint),
        monitors=resolve_monitors(schema.tensorboard, schema.wandb, schema.csv_monitor),
        steps_per_print=schema.steps_per_print,
        wall_clock_breakdown=schema.wall_clock_breakdown,
        dataloader_drop_last=schema.dataloader_drop_last,
        seed=schema.seed,
    )


def _timeouts(section: TimeoutsSection) -> TimeoutsConfig:
    longest = max(section.step_s, section.compile_s, section.agree_s)
    group = section.process_group_s or longest + _MARGIN_S
    return record_of(TimeoutsConfig, section, process_group_s=group)


def _clipping(schema: ConfigSchema, written: Written, findings: Findings) -> float:
    if "gradient_clipping" in written.auto:
        findings.info("gradient_clipping", '"auto" became 1.0, what most trainers pass')
        return 1.0
    return schema.gradient_clipping


def _tell_unknown_values(values: Mapping[str, object], findings: Findings) -> None:
    for path in values:
        if path not in known_paths() and not path.startswith(_FREE_FORM):
            close = nearest(path, known_paths())
            ending = f": did you mean {close}?" if close else ""
            findings.warn(path, f'a value for "auto" is given for an unknown key{ending}')
