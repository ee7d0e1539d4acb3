"""Make one `ZeroConfig` from `zero_optimization`; bucket sizes are hints."""

from __future__ import annotations

from typing import Literal, cast

from torchloom.config.findings import Findings
from torchloom.config.model import MIB, DType, PrecisionConfig, ZeroConfig
from torchloom.config.schema_zero import ZeroSection

# Not measured: an assumption that larger messages gain little and hold memory longer.
MAX_BUCKET_BYTES = 64 * MIB
_ITEM_BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


def resolve_zero(
    section: ZeroSection, precision: PrecisionConfig, world_size: int | None, findings: Findings
) -> ZeroConfig:
    """Return how training state is sharded; what torchloom does not support becomes an error.

    Args:
        section: the section `zero_optimization`.
        precision: the resolved types, which give bucket sizes in bytes.
        world_size: data-parallel ranks; None if not known.
        findings: collects errors, notes and hints.
    """
    _check_stage(section, findings)
    _check_shard_size(section, world_size, findings)
    compute = _ITEM_BYTES[precision.dtype]
    reduction = _ITEM_BYTES[precision.reduce_dtype]
    return ZeroConfig(
        stage=cast("Literal[0, 1, 2, 3]", section.stage),
        param_persistence_threshold=section.stage3_param_persistence_threshold,
        gather_bucket_bytes=_bucket(section, "allgather_bucket_size", compute, findings),
        reduce_bucket_bytes=_bucket(section, "reduce_bucket_size", reduction, findings),
        prefetch_bytes=_bucket(section, "stage3_prefetch_bucket_size", compute, findings),
        shard_size=section.shard_size,
        gather_16bit_weights_on_model_save=section.stage3_gather_16bit_weights_on_model_save,
    )


def _bucket(section: ZeroSection, name: str, item_bytes: int, findings: Findings) -> int | None:
    """Return a bucket size in bytes from the elements asked for; None where none are."""
    elements: int | None = getattr(section, name)
    if elements is None:
        return None
    asked = elements * item_bytes
    used = min(asked, MAX_BUCKET_BYTES)
    size = f"elements of {item_bytes} bytes, {used / MIB:.4g} MiB"
    why = size if used == asked else f"{size}, the most that torchloom merges"
    path = f"zero_optimization.{name}"
    findings.hint(path, asked=elements, used=used // item_bytes, why=why)
    return used


def _check_stage(section: ZeroSection, findings: Findings) -> None:
    given = section.given
    if given and "stage" not in given and not findings.has_error_at("zero_optimization.stage"):
        findings.warn(
            "zero_optimization.stage", "not given: 0, nothing is divided; write 1, 2 or 3"
        )


def _check_shard_size(section: ZeroSection, world_size: int | None, findings: Findings) -> None:
    size, path = section.shard_size, "zero_optimization.shard_size"
    if size is None:
        return
    if section.stage == 0:
        findings.error(path, f"{size}, but stage 0 divides nothing", "set stage or remove it")
    elif world_size is not None and world_size % size:
        divisors = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        findings.error(
            path,
            f"{size} ranks per shard group do not divide a world size of {world_size}",
            f"use one of {', '.join(divisors)}",
        )
