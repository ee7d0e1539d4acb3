"""From the offload keys of `compile` and `zero_optimization` to one `OffloadConfig`."""

from __future__ import annotations

from collections.abc import Iterator

from torchloom.config.findings import Findings
from torchloom.config.model import OffloadConfig
from torchloom.config.schema import ConfigSchema

OPT_STATE_PASSES = (
    "offload_adam_states",
    "offload_adam_states_for_init",
    "offload_adam_states_sync",
    "offload_opt_states",
    "move_opt_states",
    "move_opt_states_sync",
)
"""DeepSpeed's names of passes for what the optimizer step does here, outside of any graph."""


def resolve_offload(
    schema: ConfigSchema, world_size: int | None, findings: Findings
) -> OffloadConfig:
    """Return what waits in host memory, and what frees device memory early."""
    section, zero = schema.compile, schema.zero_optimization
    listed = set(_names(section.passes)) | set(_names(section.schedule))
    opt_states = section.offload_opt_states or bool(listed & set(OPT_STATE_PASSES))
    parameters = section.offload_parameters or "offload_parameters" in listed
    if zero.offload_optimizer.device == "cpu" and not opt_states:
        opt_states = True
        findings.info(
            "zero_optimization.offload_optimizer",
            "optimizer states wait on the host and stream through the step, which runs on the "
            "device: compile.offload_opt_states says the same",
        )
    if zero.offload_param.device == "cpu" and not parameters:
        parameters = True
        findings.info(
            "zero_optimization.offload_param",
            "this rank's pieces wait on the host until they are gathered: "
            "compile.offload_parameters says the same",
        )
    if parameters:
        _check_parameters(zero.stage, world_size, findings)
    return OffloadConfig(
        activations=section.offload_activation or "offload_activation" in listed,
        activation_min_bytes=section.offload_activation_threshold,
        pin_memory=section.offload_activation_pin_memory,
        opt_states=opt_states,
        parameters=parameters,
        double_buffer=section.double_buffer,
        free_activations=section.free_activation or "free_activation" in listed,
        free_min_bytes=section.free_activation_threshold,
    )


def _check_parameters(stage: int, world_size: int | None, findings: Findings) -> None:
    if stage < 2:
        findings.error(
            "compile.offload_parameters",
            f"zero_optimization.stage {stage} keeps whole parameters, which are read in place",
            "set zero_optimization.stage to 3, or remove it",
        )
    elif world_size == 1:
        findings.warn(
            "compile.offload_parameters",
            "a single rank shards nothing, so parameters stay on the device",
        )


def _names(listed: object) -> Iterator[str]:
    """Yield every string of nested lists: names of passes, in whatever form they are listed."""
    if isinstance(listed, str):
        yield listed
    elif isinstance(listed, list | tuple):
        for item in listed:
            yield from _names(item)
