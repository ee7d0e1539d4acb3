"""What users write: the top level of the configuration, DeepSpeed's names and shapes.

The two largest sections are in `schema_sections`; keys of DeepSpeed that
torchloom does not build say what to do instead (`OtherKeys`).
"""

from __future__ import annotations

from torchloom.config.fields import (
    Section,
    absent,
    free_form,
    hint,
    no_effect,
    refused,
    section,
    used,
)
from torchloom.config.kinds import above, dtype, flag, names, norm, number, text, whole, word
from torchloom.config.monitors import CsvSection, TensorBoardSection, WandbSection
from torchloom.config.schema_sections import CompileSection, ZeroSection

ZERO3 = "remove it; use zero_optimization.stage 3 to divide a large model"
LOG_TO = "pass the tracker's function to engine.log_to"
BY_MODEL = "call torch.utils.checkpoint in the model"
PROFILER = "profile with torch.profiler"
CONSTANT = "remove it; prepare data and model outside the engine"
MEAN = "torchloom always averages gradients over ranks"


class OtherKeys(Section):
    """Keys that have no effect here, and keys that torchloom refuses."""

    zero_allow_untested_optimizer = hint(
        "allow any torch optimizer", "the caller chooses the optimizer"
    )
    zero_force_ds_cpu_optimizer = hint(
        "demand the CPU optimizer", "the optimizer is torch's, on the device of the shards"
    )
    prescale_gradients = no_effect("divide before the reduction", MEAN)
    gradient_predivide_factor = no_effect("divide in two parts", MEAN, default=1.0)
    gradient_allreduce_op = refused(
        "gradients that are summed over ranks",
        "remove it; multiply the loss by the number of ranks: that is the same sum",
        idle=("mean",),
        take=word("mean", "sum"),
    )
    graph_harvesting = no_effect(
        "record CUDA graphs", 'set compile.kwargs to {"mode": "reduce-overhead"}'
    )
    log_level = no_effect("level of DeepSpeed's log", "set the level of the logger `torchloom`")
    vocabulary_size = hint("size to warn about if no multiple of 8", "nothing depends on it")
    disable_allgather = no_effect("old switch of ZeRO-1", "remove it")
    dump_state = no_effect("print the engine's state", "`torchloom check` prints the configuration")
    memory_breakdown = no_effect("print memory use", "use torch.cuda.memory")
    activation_checkpointing = no_effect("recompute activations", BY_MODEL)
    use_data_before_expert_parallelism = no_effect(
        "order of process groups", "there is one data-parallel group"
    )
    seq_parallel_communication_data_type = no_effect(
        "type of sequence-parallel traffic", "there is no sequence parallelism"
    )
    timers = no_effect("timer details", "set wall_clock_breakdown", gated=True)
    flops_profiler = no_effect("count operations", PROFILER, gated=True)
    comms_logger = no_effect("log collectives", PROFILER, gated=True)
    comet = no_effect("write Comet logs", LOG_TO, gated=True)
    trackio = no_effect("write Trackio logs", LOG_TO, gated=True)
    monitor_config = no_effect("loggers", LOG_TO, gated=True)
    amp = refused(
        "mixed precision by apex", "remove it; set bf16.enabled or fp16.enabled", gated=True
    )
    aio = refused("asynchronous NVMe reads", "remove it; there is no NVMe offloading")
    sparse_gradients = refused(
        "sparse embedding gradients", "remove it; build embeddings with sparse=False"
    )
    pipeline = refused("pipeline parallelism", ZERO3)
    tensor_parallel = refused("tensor parallelism", ZERO3, idle=(1,))
    sequence_parallel_size = refused("sequence parallelism", ZERO3, idle=(1,))
    expert_parallel = refused("expert parallelism", ZERO3, idle=(1,))
    hybrid_engine = refused(
        "one engine for training and generation",
        "remove it; generate with a separate copy of the model",
        gated=True,
    )
    compression_training = refused("compression while training", CONSTANT, gated=True)
    quantize_training = refused("quantized training", CONSTANT, gated=True)
    data_efficiency = refused("data sampling and routing", CONSTANT, gated=True)
    curriculum_learning = refused("curriculum learning", CONSTANT, gated=True)
    progressive_layer_drop = refused("progressive layer drop", CONSTANT, gated=True)
    eigenvalue = refused("eigenvalues of the loss", CONSTANT, gated=True)
    sparse_attention = refused(
        "block-sparse attention", "remove it; use torch.nn.attention.flex_attention in the model"
    )
    elasticity = refused(
        "batch sizes that follow the world size",
        "remove it; write the batch sizes of this run",
        gated=True,
    )
    autotuning = refused(
        "search for settings", "remove it; write the settings of this run", gated=True
    )
    weight_quantization = refused("quantized weights", CONSTANT)
    datastates_ckpt = refused("checkpoints by DataStates", "remove it; set checkpoint.async_save")
    nebula = refused("checkpoints by Nebula", "remove it; save to a folder", gated=True)


MASTER_FP32 = "remove it; torchloom keeps fp32 master shards and optimizer states"


class Fp16Section(Section):
    """Mixed precision with fp16 and a scaled loss."""

    enabled = used(flag, False, "compute in fp16 with a scaled loss", auto="derive")
    loss_scale = used(number(), 0.0, "constant loss scale; 0 means dynamic scaling")
    initial_scale_power = used(whole(0, 127), 16, "dynamic scaling starts at 2 to this power")
    loss_scale_window = used(whole(1), 1000, "steps without overflow before the scale doubles")
    hysteresis = used(whole(1), 2, "overflows tolerated before the scale halves")
    consecutive_hysteresis = used(
        flag, False, "a step without overflow resets the count of tolerated overflows"
    )
    min_loss_scale = used(number(), 1.0, "lowest value of the dynamic scale")
    max_consecutive_skips = used(
        whole(1), 50, "the same as `max_consecutive_skips` at the top level, which replaces it"
    )
    auto_cast = hint("cast inputs to fp16", "floating-point inputs are always cast")
    fp16_master_weights_and_grads = refused("fp16 master weights", MASTER_FP32)


class Bf16Section(Section):
    """Mixed precision with bf16."""

    enabled = used(flag, False, "compute in bf16", auto="derive")
    check_grad_overflow = used(
        flag, True, "check the gradients of each step for NaN and Inf; see `non_finite`"
    )
    immediate_grad_update = hint(
        "accumulate each gradient as soon as it is computed",
        "gradients are reduced as soon as they are computed",
    )
    bf16_master_weights_and_grads = used(
        flag, False, "keep shards of weights and gradients in bf16; needs `bf16_optimizer_states`"
    )
    bf16_optimizer_states = used(
        flag, False, "keep optimizer states in bf16; needs `bf16_master_weights_and_grads`"
    )


class AutocastSection(Section):
    """`torch.autocast` around the model's forward."""

    enabled = used(flag, False, "run forward under `torch.autocast`; weights keep their type")
    dtype = used(
        dtype,
        None,
        "type that autocast casts to: bf16 (the default), or fp16 with a scaled loss, see `fp16`",
    )
    lower_precision_safe_modules = used(
        names,
        None,
        "classes, such as `torch.nn.Linear`, whose weights compiled code may gather in that type; the "
        "default is all classes. A weight is gathered in that type only if every operator that reads "
        "it casts it",
    )


class DataTypesSection(Section):
    """Types of the training state."""

    grad_accum_dtype = refused(
        "gradients that accumulate in 16 bits",
        "remove it; they accumulate in fp32",
        idle=("fp32",),
        take=dtype,
    )
    param_dtype = used(
        dtype, None, "must be the type that `bf16`, `fp16` or neither of them chooses"
    )
    buffer_dtype = refused(
        "buffers of another type",
        "remove it; cast the model's buffers before initialize",
        take=dtype,
    )


class OptimizerSection(Section):
    """The optimizer that the engine builds."""

    type = used(text, "", "`AdamW`, `Adam`, `SGD` or `Muon`, in any case", auto="refuse")
    params = free_form("its keyword arguments, listed below")
    legacy_fusion = no_effect("an old fused layout", "remove it")


class SchedulerSection(Section):
    """The learning-rate schedule that the engine builds."""

    type = used(text, "", "name of a schedule, listed below", auto="refuse")
    params = free_form("its keyword arguments")


class TimeoutsSection(Section):
    """How long a rank waits for other ranks; torchloom's own keys."""

    step_s = used(above(0), 600.0, "seconds to wait for another rank during a step")
    compile_s = used(above(0), 1800.0, "seconds to wait for a rank that compiles, loads or saves")
    agree_s = used(
        above(0), 120.0, "seconds to wait until all ranks have compared configuration and model"
    )
    rendezvous_s = used(above(0), 120.0, "seconds to wait for all ranks to connect")
    process_group_s = used(
        above(0),
        None,
        "timeout in seconds of the process group that `initialize` creates; the default is 60 s more "
        "than the longest of step_s, compile_s and agree_s",
    )


class CheckpointSection(Section):
    """Defaults for `engine.save_checkpoint`."""

    async_save = used(
        flag, False, "torchloom's own: write checkpoints in the background while training continues"
    )
    keep_last = used(
        whole(1),
        None,
        "torchloom's own: number of newest checkpoints to keep; the default keeps all",
    )
    tag_validation = no_effect(
        "compare tags between ranks", "ranks with different tags are always an error"
    )
    load_universal = no_effect(
        "load converted checkpoints", "all checkpoints load on any number of ranks"
    )
    use_node_local_storage = refused(
        "checkpoints on node-local disks", "remove it; save to a folder that all ranks share"
    )
    checkpoint_serialization = no_effect("pickle", "files hold plain data only", default=True)
    parallel_write = no_effect("which ranks write", "every rank writes its part")
    writer = no_effect("how files are written", "there is one way")


class ConfigSchema(OtherKeys):
    """The keys of the outermost object."""

    train_batch_size = used(
        whole(1), None, "samples per optimizer step, summed over all ranks", auto="derive"
    )
    train_micro_batch_size_per_gpu = used(
        whole(1), None, "samples per forward pass of one rank", auto="derive"
    )
    gradient_accumulation_steps = used(
        whole(1), None, "micro-steps per optimizer step", auto="derive"
    )
    managed_gradient_accumulation = used(
        flag,
        True,
        "whether the engine counts micro-steps; `false`: each `step()` updates the weights",
    )
    gradient_clipping = used(
        norm,
        0.0,
        'largest global gradient norm; 0 turns clipping off (DeepSpeed: 1.0 since 2026-06); "auto" is 1.0',
        auto="derive",
    )
    non_finite = used(
        word("skip", "raise", "stop"),
        "skip",
        "torchloom's own: what all ranks do when a gradient is NaN or Inf: `skip` drops the step, "
        "`raise` raises an error at once, `stop` drops the step and sets `engine.should_stop`",
    )
    max_consecutive_skips = used(
        whole(1), 50, "torchloom's own: steps skipped in a row before training ends with an error"
    )
    zero_optimization = section(ZeroSection, "how training state is sharded over ranks")
    bf16 = section(Bf16Section, "mixed precision with bf16", aliases=("bfloat16",))
    fp16 = section(Fp16Section, "mixed precision with fp16")
    torch_autocast = section(AutocastSection, "`torch.autocast` around the model's forward")
    communication_data_type = used(
        dtype, None, "type in which gradients are reduced; the default is fp32"
    )
    data_types = section(DataTypesSection, "types of the training state")
    optimizer = absent(
        OptimizerSection,
        "the optimizer that the engine builds; without this key, pass one to `initialize`",
    )
    scheduler = absent(
        SchedulerSection,
        "the learning-rate schedule that the engine builds; without this key, pass one to `initialize` "
        "or use none",
    )
    compile = section(CompileSection, "what `engine.compile()` does")
    timeouts = section(TimeoutsSection, "how long a rank waits for other ranks")
    checkpoint = section(CheckpointSection, "defaults for `engine.save_checkpoint`")
    steps_per_print = used(above(0), 10.0, "steps between progress lines; `Infinity` prints none")
    wall_clock_breakdown = used(flag, False, "measure the time of forward, backward and step")
    tensorboard = section(TensorBoardSection, "numbers of each step for TensorBoard")
    wandb = section(WandbSection, "numbers of each step to Weights & Biases")
    csv_monitor = section(CsvSection, "numbers of each step in CSV files")
    dataloader_drop_last = used(flag, False, "the engine's data loader drops an incomplete batch")
    seed = used(whole(0, 2**63 - 1), None, "torchloom's own: seed of the engine's random choices")
