"""Make `ZeroConfig` and `OffloadConfig` from their keys; bucket sizes are hints."""

from __future__ import annotations

from typing import Literal, cast

from torchloom.config.findings import Findings
from torchloom.config.keys import Written
from torchloom.config.model import (
    MIB,
    DType,
    LeafConfig,
    OffloadConfig,
    PrecisionConfig,
    ZeroConfig,
)
from torchloom.config.schema import ConfigSchema
from torchloom.config.schema_sections import ZeroSection

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
        leaf_module=LeafConfig(
            classes=section.leaf_module.classes,
            names=section.leaf_module.names,
            name_suffixes=section.leaf_module.name_suffixes,
        ),
    )


def _bucket(section: ZeroSection, name: str, item_bytes: int, findings: Findings) -> int | None:
    """Return a bucket size in bytes from the elements asked for; None where none are."""
    elements: int | None = getattr(section, name)
    if elements is None:
        return None
    num_bytes = elements * item_bytes
    why = f"elements of {item_bytes} bytes, {num_bytes / MIB:.4g} MiB; over gloo 64 MiB at most"
    findings.hint(f"zero_optimization.{name}", asked=elements, used=elements, why=why)
    return num_bytes


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


def resolve_offload(
    schema: ConfigSchema, world_size: int | None, written: Written, findings: Findings
) -> OffloadConfig:
    """Return what is kept in host memory, and what is freed early.

    Args:
        schema: the validated document.
        world_size: data-parallel ranks; None if not known.
        written: the older switches of offloads are noted here.
        findings: collects errors, notes and hints.
    """
    section, stage = schema.compile, schema.zero_optimization.stage
    opt_states, parameters = section.offload_opt_states, section.offload_parameters
    path = "compile.offload_parameters"
    states_wait = _waits(schema, "offload_optimizer", "cpu_offload", written, findings)
    if states_wait and not opt_states:
        opt_states = True
        findings.info(
            "zero_optimization.offload_optimizer",
            "optimizer states are kept in host memory and streamed through the step, which runs on the "
            "device; compile.offload_opt_states does the same",
        )
    shards_wait = _waits(schema, "offload_param", "cpu_offload_param", written, findings)
    if shards_wait and not parameters and stage < 2:
        findings.warn(
            "zero_optimization.offload_param",
            f"no effect: stage {stage} keeps whole parameters, which are read in place; stage 3 keeps "
            "shards in host memory",
        )
    elif shards_wait and not parameters:
        parameters, path = True, "zero_optimization.offload_param"
        findings.info(
            "zero_optimization.offload_param",
            "this rank's shards are kept in host memory until they are gathered; "
            "compile.offload_parameters does the same",
        )
    if parameters:
        _check_parameters(schema, world_size, path, findings)
    return OffloadConfig(
        opt_states=opt_states, parameters=parameters, double_buffer=section.double_buffer
    )


def _waits(schema: ConfigSchema, name: str, old: str, written: Written, findings: Findings) -> bool:
    """Return whether a section of `zero_optimization`, or the switch it replaced, asks for host memory."""
    zero = schema.zero_optimization
    device = getattr(zero, name).device
    here, older = f"zero_optimization.{name}", f"zero_optimization.{old}"
    if device == "nvme":
        fix = 'write "cpu" or "none"'
        findings.error(f"{here}.device", '"nvme": offloading to NVMe is not supported', fix)
    if not getattr(zero, old):
        return device == "cpu"
    if name in zero.given:
        findings.warn(older, f"a deprecated name; {name} is given, too, and counts")
        return device == "cpu"
    written.renamed[here] = written.path(older)
    findings.warn(older, f'a deprecated name; write {name}: {{"device": "cpu"}}')
    return True


def _check_parameters(
    schema: ConfigSchema, world_size: int | None, path: str, findings: Findings
) -> None:
    """Tell what keeps parameters from waiting on the host.

    Args:
        schema: the validated document.
        world_size: data-parallel ranks; None if not known.
        path: of the key that asks for it.
        findings: collects errors, notes and hints.
    """
    stage = schema.zero_optimization.stage
    if stage < 2:
        findings.error(
            path,
            f"zero_optimization.stage {stage} keeps whole parameters, which are read in place",
            "set zero_optimization.stage to 3, or remove it",
        )
    elif schema.compile.symmetric_memory:
        findings.error(
            path,
            "compile.symmetric_memory keeps parameters in memory that ranks share",
            "remove one of the two",
        )
    elif world_size == 1:
        findings.warn(path, "one rank shards nothing, so parameters stay on the device")
