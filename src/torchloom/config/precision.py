"""Make `PrecisionConfig` and `NonFiniteConfig` from the fp16, bf16 and communication keys."""

from __future__ import annotations

from typing import Literal, cast

from torchloom.config.findings import Findings
from torchloom.config.keys import Written
from torchloom.config.model import (
    AutocastConfig,
    DType,
    LossScaleConfig,
    NonFiniteConfig,
    PrecisionConfig,
)
from torchloom.config.schema import ConfigSchema, Fp16Section

_HALF = {"fp16.enabled", "bf16.enabled"}


def resolve_precision(
    schema: ConfigSchema, written: Written, findings: Findings
) -> PrecisionConfig:
    """Return the types in which the run computes and communicates.

    Args:
        schema: the validated document.
        written: which values the user gave as "auto" or null.
        findings: collects errors, notes and hints.
    """
    dtype, wanted = _dtype(schema, written, findings), schema.data_types.param_dtype
    if wanted not in (None, dtype):
        findings.error(
            "data_types.param_dtype",
            f"{wanted}, but the run computes in {dtype}",
            f"set {wanted}.enabled to true or remove it" if wanted != "fp32" else "remove it",
        )
    master = _master(schema, findings)
    return PrecisionConfig(
        dtype=dtype,
        master=master,
        stochastic_rounding=schema.bf16.stochastic_rounding,
        reduce_dtype=cast("DType", schema.communication_data_type or master),
        loss_scale=_loss_scale(schema.fp16, findings),
        autocast=_autocast(schema, findings),
    )


def _master(schema: ConfigSchema, findings: Findings) -> Literal["fp32", "bf16"]:
    """Return the type of shards and states. DeepSpeed's rules: deepspeed/runtime/base_optimizer.py."""
    weights, states = "bf16_master_weights_and_grads", "bf16_optimizer_states"
    asked = {name for name in (weights, states) if getattr(schema.bf16, name)}
    for name in sorted(asked):
        path, rest = f"bf16.{name}", {weights, states} - asked
        if not schema.bf16.enabled:
            findings.error(path, "the run does not compute in bf16", "set bf16.enabled to true")
        elif rest:
            other = (
                "states take the type of the weights" if name == weights else "weights stay fp32"
            )
            findings.error(path, f"alone: {other}", f"set bf16.{rest.pop()} to true as well")
    if schema.bf16.stochastic_rounding and weights not in asked:
        path = "bf16.stochastic_rounding"
        findings.error(
            path, "weights are kept in fp32", f"set bf16.{weights} to true, or remove it"
        )
    return "bf16" if len(asked) == 2 else "fp32"


def _autocast(schema: ConfigSchema, findings: Findings) -> AutocastConfig | None:
    section = schema.torch_autocast
    if not section.enabled:
        return None
    for name in ("fp16", "bf16"):
        if getattr(schema, name).enabled:
            findings.error(
                "torch_autocast.enabled",
                f"{name}.enabled is true as well: weights and inputs would be {name} before autocast",
                "set one of them to false",
            )
    if section.dtype == "fp32":
        findings.error(
            "torch_autocast.dtype", "torch.autocast does not support fp32", "write bf16 or fp16"
        )
    return AutocastConfig(
        dtype="fp16" if section.dtype == "fp16" else "bf16",
        modules=section.lower_precision_safe_modules,
    )


def _dtype(schema: ConfigSchema, written: Written, findings: Findings) -> DType:
    if schema.fp16.enabled and schema.bf16.enabled:
        findings.error("bf16.enabled", "fp16 and bf16 are both enabled", "set one of them to false")
    if schema.fp16.enabled:
        return "fp16"
    if schema.bf16.enabled:
        return "bf16"
    for path in sorted(_HALF & written.auto):
        findings.warn(path, '"auto" has no value: false, so the run is fp32; write true for speed')
    return "fp32"


def _loss_scale(fp16: Fp16Section, findings: Findings) -> LossScaleConfig:
    scale = LossScaleConfig(
        static_scale=fp16.loss_scale,
        initial_scale_power=fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        min_scale=fp16.min_loss_scale,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
    )
    if not scale.static_scale and scale.min_scale > 2.0**scale.initial_scale_power:
        findings.error(
            "fp16.min_loss_scale",
            f"{scale.min_scale:g} is above the first scale, 2^{scale.initial_scale_power}",
            "lower it or raise fp16.initial_scale_power",
        )
    return scale


def resolve_non_finite(
    schema: ConfigSchema, precision: PrecisionConfig, findings: Findings
) -> NonFiniteConfig:
    """Return what a step with NaN or Inf gradients does; contradictions become errors.

    Args:
        schema: the validated document.
        precision: the resolved types; bf16 may switch the check off.
        findings: collects errors, notes and hints.
    """
    is_given = "non_finite" in schema.given
    is_unchecked = precision.dtype == "bf16" and not schema.bf16.check_grad_overflow
    if is_unchecked and is_given:
        findings.error(
            "non_finite",
            f'"{schema.non_finite}", but bf16.check_grad_overflow is false, so gradients are not checked',
            "remove one of them",
        )
    if is_unchecked and not is_given:
        findings.warn(
            "bf16.check_grad_overflow",
            "false: NaN or Inf in a gradient goes into the weights; remove it to skip such steps",
        )
    is_dynamic = precision.scales_loss and not precision.loss_scale.static_scale
    if is_dynamic and schema.non_finite != "skip":
        findings.warn(
            "non_finite",
            f'"{schema.non_finite}" ends the run at the first overflow, which dynamic loss scaling '
            'makes on purpose: write "skip", or a constant fp16.loss_scale',
        )
    return NonFiniteConfig(
        policy=cast("Literal['skip', 'raise', 'stop']", schema.non_finite),
        checks=not is_unchecked,
        max_consecutive_skips=_max_skips(schema, findings),
    )


def _max_skips(schema: ConfigSchema, findings: Findings) -> int:
    name = "max_consecutive_skips"
    here, older = schema.max_consecutive_skips, schema.fp16.max_consecutive_skips
    if name not in schema.fp16.given:
        return here
    if name in schema.given and here != older:
        findings.error(
            f"fp16.{name}", f"{older}, but {name} is {here} at the top level", "remove one of them"
        )
    return older
