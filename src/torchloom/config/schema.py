"""What users write: the top level of the configuration, DeepSpeed's names and shapes.

The larger sections have their own files: `schema_zero`, `schema_compile`; keys of DeepSpeed that
torchloom does not build are in `schema_others`.
"""

from __future__ import annotations

from torchloom.config.fields import Section, free_form, hint, no_effect, refused, section, used
from torchloom.config.schema_compile import CompileSection
from torchloom.config.schema_monitors import CsvSection, TensorBoardSection, WandbSection
from torchloom.config.schema_others import OtherKeys
from torchloom.config.schema_types import (
    AnyValue,
    Clip,
    DTypeName,
    Flag,
    Items,
    MaybeCount,
    MaybeFlag,
    MaybeNames,
    MaybeSeconds,
    Name,
    NonFinite,
    Positive,
    PrintEvery,
    Scale,
    ScalePower,
    Seconds,
    Seed,
)
from torchloom.config.schema_zero import ZeroSection

MASTER_FP32 = "remove it; torchloom keeps fp32 master shards and optimizer states"


class Fp16Section(Section):
    """Mixed precision with fp16 and a scaled loss."""

    enabled: Flag = used(False, "compute in fp16 with a scaled loss", auto="derive")
    loss_scale: Scale = used(0.0, "constant loss scale; 0 means dynamic scaling")
    initial_scale_power: ScalePower = used(16, "dynamic scaling starts at 2 to this power")
    loss_scale_window: Positive = used(1000, "steps without overflow before the scale doubles")
    hysteresis: Positive = used(2, "overflows tolerated before the scale halves")
    consecutive_hysteresis: Flag = used(
        False, "a step without overflow resets the count of tolerated overflows"
    )
    min_loss_scale: Scale = used(1.0, "lowest value of the dynamic scale")
    max_consecutive_skips: Positive = used(
        50, "the same as `max_consecutive_skips` at the top level, which replaces it"
    )
    auto_cast: MaybeFlag = hint("cast inputs to fp16", "floating-point inputs are always cast")
    fp16_master_weights_and_grads: AnyValue = refused("fp16 master weights", MASTER_FP32)


class Bf16Section(Section):
    """Mixed precision with bf16."""

    enabled: Flag = used(False, "compute in bf16", auto="derive")
    check_grad_overflow: Flag = used(
        True, "check the gradients of each step for NaN and Inf; see `non_finite`"
    )
    immediate_grad_update: MaybeFlag = hint(
        "accumulate each gradient as soon as it is computed",
        "gradients are reduced as soon as they are computed",
    )
    bf16_master_weights_and_grads: AnyValue = refused("bf16 master weights", MASTER_FP32)
    bf16_optimizer_states: AnyValue = refused("bf16 optimizer states", MASTER_FP32)


class AutocastSection(Section):
    """`torch.autocast` around the model's forward."""

    enabled: Flag = used(False, "run forward under `torch.autocast`; weights keep their type")
    dtype: DTypeName = used(
        None,
        "type that autocast casts to: bf16 (the default), or fp16 with a scaled loss, see `fp16`",
    )
    lower_precision_safe_modules: MaybeNames = used(
        None,
        "classes, such as `torch.nn.Linear`, whose weights compiled code may gather in that type; the "
        "default is all classes. A weight is gathered in that type only if every operator that reads "
        "it casts it",
    )


class DataTypesSection(Section):
    """Types of the training state."""

    grad_accum_dtype: DTypeName = refused(
        "gradients that accumulate in 16 bits", "remove it; they accumulate in fp32", idle=("fp32",)
    )
    param_dtype: DTypeName = used(
        None, "must be the type that `bf16`, `fp16` or neither of them chooses"
    )
    buffer_dtype: DTypeName = refused(
        "buffers of another type", "remove it; cast the model's buffers before initialize"
    )


class OptimizerSection(Section):
    """The optimizer that the engine builds."""

    type: Name = used("", "`AdamW`, `Adam` or `SGD`, in any case", auto="refuse")
    params: Items = free_form("its keyword arguments, listed below")
    legacy_fusion: MaybeFlag = no_effect(False, "an old fused layout", "remove it")


class SchedulerSection(Section):
    """The learning-rate schedule that the engine builds."""

    type: Name = used("", "name of a schedule, listed below", auto="refuse")
    params: Items = free_form("its keyword arguments")


class TimeoutsSection(Section):
    """How long a rank waits for other ranks; torchloom's own keys."""

    step_s: Seconds = used(600.0, "seconds to wait for another rank during a step")
    compile_s: Seconds = used(1800.0, "seconds to wait for a rank that compiles, loads or saves")
    agree_s: Seconds = used(
        120.0, "seconds to wait until all ranks have compared configuration and model"
    )
    rendezvous_s: Seconds = used(120.0, "seconds to wait for all ranks to connect")
    process_group_s: MaybeSeconds = used(
        None,
        "timeout in seconds of the process group that `initialize` creates; the default is 60 s more "
        "than the longest of step_s, compile_s and agree_s",
    )


class CheckpointSection(Section):
    """Defaults for `engine.save_checkpoint`."""

    async_save: Flag = used(
        False, "torchloom's own: write checkpoints in the background while training continues"
    )
    keep_last: MaybeCount = used(
        None, "torchloom's own: number of newest checkpoints to keep; the default keeps all"
    )
    tag_validation: AnyValue = no_effect(
        None, "compare tags between ranks", "ranks with different tags are always an error"
    )
    load_universal: MaybeFlag = no_effect(
        False, "load converted checkpoints", "all checkpoints load on any number of ranks"
    )
    use_node_local_storage: MaybeFlag = refused(
        "checkpoints on node-local disks", "remove it; save to a folder that all ranks share"
    )
    checkpoint_serialization: MaybeFlag = no_effect(True, "pickle", "files hold plain data only")
    parallel_write: AnyValue = no_effect(None, "which ranks write", "every rank writes its part")
    writer: AnyValue = no_effect(None, "how files are written", "there is one way")


class ConfigSchema(OtherKeys):
    """The keys of the outermost object."""

    train_batch_size: MaybeCount = used(
        None, "samples per optimizer step, summed over all ranks", auto="derive"
    )
    train_micro_batch_size_per_gpu: MaybeCount = used(
        None, "samples per forward pass of one rank", auto="derive"
    )
    gradient_accumulation_steps: MaybeCount = used(
        None, "micro-steps per optimizer step", auto="derive"
    )
    managed_gradient_accumulation: Flag = used(
        True, "whether the engine counts micro-steps; `false`: each `step()` updates the weights"
    )
    gradient_clipping: Clip = used(
        0.0,
        'largest global gradient norm; 0 turns clipping off (DeepSpeed: 1.0 since 2026-06); "auto" is 1.0',
        auto="derive",
    )
    non_finite: NonFinite = used(
        "skip",
        "torchloom's own: what all ranks do when a gradient is NaN or Inf: `skip` drops the step, "
        "`raise` raises an error at once, `stop` drops the step and sets `engine.should_stop`",
    )
    max_consecutive_skips: Positive = used(
        50, "torchloom's own: steps skipped in a row before training ends with an error"
    )
    zero_optimization: ZeroSection = section(
        ZeroSection, "how training state is sharded over ranks"
    )
    bf16: Bf16Section = section(Bf16Section, "mixed precision with bf16", aliases=("bfloat16",))
    fp16: Fp16Section = section(Fp16Section, "mixed precision with fp16")
    torch_autocast: AutocastSection = section(
        AutocastSection, "`torch.autocast` around the model's forward"
    )
    communication_data_type: DTypeName = used(
        None, "type in which gradients are reduced; the default is fp32"
    )
    data_types: DataTypesSection = section(DataTypesSection, "types of the training state")
    optimizer: OptimizerSection | None = used(
        None, "the optimizer that the engine builds; without this key, pass one to `initialize`"
    )
    scheduler: SchedulerSection | None = used(
        None,
        "the learning-rate schedule that the engine builds; without this key, pass one to `initialize` "
        "or use none",
    )
    compile: CompileSection = section(CompileSection, "what `engine.compile()` does")
    timeouts: TimeoutsSection = section(TimeoutsSection, "how long a rank waits for other ranks")
    checkpoint: CheckpointSection = section(
        CheckpointSection, "defaults for `engine.save_checkpoint`"
    )
    steps_per_print: PrintEvery = used(10.0, "steps between progress lines; `Infinity` prints none")
    wall_clock_breakdown: Flag = used(False, "measure the time of forward, backward and step")
    tensorboard: TensorBoardSection = section(
        TensorBoardSection, "numbers of each step for TensorBoard"
    )
    wandb: WandbSection = section(WandbSection, "numbers of each step to Weights & Biases")
    csv_monitor: CsvSection = section(CsvSection, "numbers of each step in CSV files")
    dataloader_drop_last: Flag = used(False, "the engine's data loader drops an incomplete batch")
    seed: Seed = used(None, "torchloom's own: seed of the engine's random choices")
