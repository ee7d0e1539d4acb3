"""Make one `NonFiniteConfig` from `non_finite` and the older keys of the same purpose."""

from __future__ import annotations

from typing import Literal, cast

from torchloom.config.findings import Findings
from torchloom.config.model import NonFiniteConfig, PrecisionConfig
from torchloom.config.schema import ConfigSchema


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
