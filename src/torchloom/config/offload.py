"""Make one `OffloadConfig` from the offload keys of `compile` and `zero_optimization`."""

from __future__ import annotations

from torchloom.config.findings import Findings
from torchloom.config.keys import Written
from torchloom.config.model import OffloadConfig
from torchloom.config.schema import ConfigSchema


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
