"""The batch triple: values that are not given are derived from the others.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size

The world size is that of the data-parallel group. If it is not known, three given values determine the
number of ranks; otherwise one rank is assumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torchloom.config.findings import Findings
from torchloom.config.keys import Written
from torchloom.config.model import BatchConfig
from torchloom.config.schema import ConfigSchema

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUM = "gradient_accumulation_steps"


class Triple(NamedTuple):
    """The three values as given; None is not given."""

    train: int | None
    micro: int | None
    accum: int | None


def resolve_batch(
    schema: ConfigSchema, world_size: int | None, written: Written, findings: Findings
) -> BatchConfig:
    """Return the resolved triple; contradictions become errors.

    Args:
        schema: the validated document.
        world_size: data-parallel ranks; None if not known.
        written: which values the user gave as "auto" or null.
        findings: collects errors, notes and hints.
    """
    given = Triple(
        schema.train_batch_size,
        schema.train_micro_batch_size_per_gpu,
        schema.gradient_accumulation_steps,
    )
    if findings.has_error_at(TRAIN, MICRO, ACCUM):
        return BatchConfig()
    if ACCUM in written.null and {TRAIN, MICRO} <= written.auto:
        findings.error(
            ACCUM,
            'null, while both batch sizes are "auto" and nobody gave their values',
            f'write 1, or pass auto={{"{MICRO}": ...}} to load_config',
        )
        return BatchConfig()
    solved = _solve(given, _ranks(given, world_size, findings), written, findings)
    return replace(solved, is_managed=schema.managed_gradient_accumulation)


def _ranks(given: Triple, world_size: int | None, findings: Findings) -> int:
    """Return the world size to resolve for."""
    if world_size is not None:
        return world_size
    train, micro, accum = given
    if train and micro and accum and train % (micro * accum) == 0:
        ranks = train // (micro * accum)
        if ranks > 1:
            findings.warn(
                TRAIN,
                f"{train} fits {MICRO} {micro} x {ACCUM} {accum} on {ranks} ranks only; "
                f"start {ranks}, or drop one of the three values",
            )
        return ranks
    return 1


def _solve(given: Triple, ranks: int, written: Written, findings: Findings) -> BatchConfig:
    train, micro, accum = given
    if train is None:
        if micro is None:
            _say_assumed(accum, written, findings)
        micro, accum = micro or 1, accum or 1
        train = micro * accum * ranks
    elif micro is None:
        accum = accum or 1
        micro = train // (accum * ranks)
    elif accum is None:
        accum = train // (micro * ranks)
    solved = BatchConfig(train_batch_size=train, micro_batch_size=micro, accumulation_steps=accum)
    if train != micro * accum * ranks:
        findings.error(TRAIN, _contradiction(given, ranks), _correction(given, ranks))
        return BatchConfig()
    for name, value in zip((TRAIN, MICRO, ACCUM), (train, micro, accum), strict=True):
        if name in written.auto and not _is_assumed(name, given):
            findings.info(name, f'"auto" became {value}, which follows from the others')
    return solved


def _say_assumed(accum: int | None, written: Written, findings: Findings) -> None:
    if MICRO in written.auto:
        findings.warn(MICRO, '"auto" has no value: 1; nobody resolved any batch size')
    elif accum is None:
        findings.info(MICRO, f"no batch size is given: {MICRO} 1, {ACCUM} 1")
    else:
        findings.info(MICRO, "not given: 1")


def _is_assumed(name: str, given: Triple) -> bool:
    return name == MICRO and given.train is None


def _contradiction(given: Triple, ranks: int) -> str:
    parts = [f"{n} {v} x " for n, v in ((MICRO, given.micro), (ACCUM, given.accum)) if v]
    product = f" = {_per_step(given, ranks)}" if parts else ""
    multiple = "" if len(parts) == 2 else "a multiple of "
    return f"{given.train} is not {multiple}{''.join(parts)}world size {ranks}{product}"


def _per_step(given: Triple, ranks: int) -> int:
    return (given.micro or 1) * (given.accum or 1) * ranks


def _correction(given: Triple, ranks: int) -> str:
    """Return what to set: each value of the triple as it follows from the others, and the world size that fits."""
    train, micro, accum = given
    known, train = _per_step(given, ranks), train or 0
    if micro and accum:
        fix = f"set one of {TRAIN}={known}, {_exact(MICRO, train, accum * ranks)}, {_exact(ACCUM, train, micro * ranks)}"
        fits = train // (micro * accum) if train % (micro * accum) == 0 else None
        return fix if fits is None else f"{fix}; as written it fits a world size of {fits}"
    below = train // known * known
    sizes = f"{below} or {below + known}" if below else str(known)
    return f"set {TRAIN} to {sizes}, or drop it"


def _exact(name: str, train: int, rest: int) -> str:
    if train % rest == 0:
        return f"{name}={train // rest}"
    return f"{name} (no whole number fits: {train} / {rest})"
