"""The argument `torchloom` of training arguments, and what else of them a configuration says.

A Trainer's arguments and a DeepSpeed-shaped configuration overlap. The arguments fill in what is "auto" in the
configuration, by the table of `Trainer(deepspeed=...)` in transformers; what is written twice must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import TrainingArguments

from torchloom.errors import ConfigError
from torchloom.integrations.given import Given


@dataclass
class TorchloomOptions:
    """The field `torchloom`, to be added to any class of training arguments.

    Put it first: `class Config(TorchloomOptions, SFTConfig)`, decorated with `@dataclass`. It has no other field,
    so it changes no default of the class beside it.
    """

    torchloom: dict | str | None = field(
        default=None,
        metadata={
            "help": "A DeepSpeed-shaped configuration for torchloom: the path of a JSON file, or a dict. "
            "Default: ZeRO stage 3."
        },
    )

    def __post_init__(self) -> None:
        """Refuse `fsdp=` and `deepspeed=` before the class beside looks for them.

        Raises:
            ConfigError: names the argument.
        """
        refuse_systems(self)
        getattr(super(), "__post_init__", lambda: None)()


@dataclass
class TorchloomArguments(TorchloomOptions, TrainingArguments):
    """`TrainingArguments` with the field `torchloom`.

    Example:
        >>> args = TorchloomArguments("runs/mine", torchloom="ds_config.json", bf16=True)  # doctest: +SKIP
    """


def given_by(args: TrainingArguments, model: Any, num_ranks: int) -> list[Given]:
    """Return what training arguments and the model say about a configuration.

    Source: `HfTrainerDeepSpeedConfig.trainer_config_process` and `trainer_config_finalize` of transformers 5.23.
    Sizes of buckets are left to torchloom, whose defaults were measured; that page takes squares of the hidden
    size.

    Args:
        args: of the Trainer.
        model: has `config.hidden_size`, or nothing is said about small parameters.
        num_ranks: of the run.
    """
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    rate = args.learning_rate
    given = [
        Given("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size", fills=True),
        Given("gradient_accumulation_steps", steps, "gradient_accumulation_steps", fills=True),
        Given(
            "train_batch_size",
            micro * steps * num_ranks,
            "per_device_train_batch_size x gradient_accumulation_steps x ranks",
        ),
        Given("gradient_clipping", args.max_grad_norm, "max_grad_norm", fills=True),
        Given("bf16.enabled", args.bf16, "bf16", fills=True),
        Given("fp16.enabled", args.fp16, "fp16"),
        Given("optimizer.params.lr", rate, "learning_rate"),
        Given(
            "optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"
        ),
        Given("optimizer.params.eps", args.adam_epsilon, "adam_epsilon"),
        Given("optimizer.params.weight_decay", args.weight_decay, "weight_decay"),
        Given("scheduler.params.warmup_min_lr", 0, "", must_match=False),
        Given("scheduler.params.warmup_max_lr", rate, "learning_rate"),
    ]
    hidden = _hidden_size(model)
    if hidden is not None:
        threshold = "zero_optimization.stage3_param_persistence_threshold"
        given.append(Given(threshold, 10 * hidden, "10 x hidden_size", must_match=False))
    return given


def steps_of(args: TrainingArguments, num_training_steps: int) -> list[Given]:
    """Return what is known about a schedule once the number of optimizer steps is.

    Args:
        args: of the Trainer.
        num_training_steps: optimizer steps of the whole run.
    """
    warmup = args.get_warmup_steps(num_training_steps)
    total = "scheduler.params.total_num_steps"
    return [
        Given(total, num_training_steps, "the number of training steps"),
        Given("scheduler.params.warmup_num_steps", warmup, "warmup_steps"),
    ]


def refuse_systems(args: Any) -> None:
    """Refuse arguments that ask for another system that places weights.

    Args:
        args: for a Trainer.

    Raises:
        ConfigError: names the argument.
    """
    name = next((name for name in ("fsdp", "deepspeed") if getattr(args, name, None)), None)
    if name is not None:
        given = "its configuration" if name == "deepspeed" else "a configuration"
        raise ConfigError(
            f"{name}={getattr(args, name)!r} and torchloom both place the weights: drop it, and give {given} as torchloom="
        )


def refuse_arguments(args: TrainingArguments) -> None:
    """Refuse arguments that mean nothing, or another thing, where weights are shards.

    Raises:
        ConfigError: names the argument.
    """
    refuse_systems(args)
    if args.fp16 or args.fp16_full_eval:
        raise ConfigError(
            "fp16 with a Trainer is not supported, as its loss scaler looks at one rank's shards: pass "
            "bf16=True, or train with torchloom.initialize, which scales the loss over all ranks"
        )
    if args.bf16_full_eval:
        raise ConfigError(
            "bf16_full_eval=True would cast the shards that training goes on with: drop it; with bf16=True "
            "evaluation computes in bf16 already"
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True lets ranks that run out of memory start again alone: give a "
            "per_device_train_batch_size, or compile.memory_budget in the configuration of torchloom"
        )
    if args.torch_compile_mode not in (None, "default"):
        raise ConfigError(
            f"torch_compile_mode={args.torch_compile_mode!r} is not supported: write Inductor's options into "
            'the configuration of torchloom, {"compile": {"kwargs": {"options": {...}}}}'
        )


def check_optimizer(written: Any, args: TrainingArguments) -> None:
    """Compare the section `optimizer` of a configuration with the optimizer that the Trainer builds.

    Args:
        written: the section; None if there is none.
        args: of the Trainer, whose optimizer steps the weights.

    Raises:
        ConfigError: they name different optimizers.
    """
    kind = str((written or {}).get("type", "auto")).lower()
    if kind == "auto":
        return
    params = (written or {}).get("params") or {}
    if kind == "adam" and params.get("adam_w_mode", True):  # DeepSpeed's Adam decays like AdamW
        kind = "adamw"
    built = str(getattr(args.optim, "value", args.optim))
    matches = {"adamw": ("adamw_torch", "adamw_torch_fused"), "sgd": ("sgd",)}
    if built not in matches.get(kind, ()):
        fits = " or ".join(map(repr, matches.get(kind, ()))) or "another one"
        raise ConfigError(
            f"optimizer.type is {written['type']!r}, and optim of the Trainer is {built!r}: set optim={fits}, or "
            "drop the section, as the Trainer builds the optimizer"
        )


def _hidden_size(model: nn.Module | None) -> int | None:
    """Return the size that transformers takes for a model's width."""
    for config in (
        getattr(model, "config", None),
        getattr(getattr(model, "config", None), "text_config", None),
    ):
        sizes = getattr(config, "hidden_sizes", None)
        hidden = getattr(config, "hidden_size", None) or (max(sizes) if sizes else None)
        if isinstance(hidden, int):
            return hidden
    return None
