"""Top-level keys of DeepSpeed that torchloom does not implement, each with what to do instead."""

from __future__ import annotations

from torchloom.config.fields import Section, hint, no_effect, refused
from torchloom.config.schema_types import AllReduceOp, AnyValue, MaybeFlag

ZERO3 = "remove it; use zero_optimization.stage 3 to divide a large model"
LOG_TO = "pass the tracker's function to engine.log_to"
BY_MODEL = "call torch.utils.checkpoint in the model"
PROFILER = "profile with torch.profiler"
CONSTANT = "remove it; prepare data and model outside the engine"
MEAN = "torchloom always averages gradients over ranks"


class OtherKeys(Section):
    """Keys that have no effect here, and keys that torchloom refuses."""

    zero_allow_untested_optimizer: MaybeFlag = hint(
        "allow any torch optimizer", "the caller chooses the optimizer"
    )
    zero_force_ds_cpu_optimizer: MaybeFlag = hint(
        "demand the CPU optimizer", "the optimizer is torch's, on the device of the shards"
    )
    prescale_gradients: MaybeFlag = no_effect(False, "divide before the reduction", MEAN)
    gradient_predivide_factor: AnyValue = no_effect(1.0, "divide in two parts", MEAN)
    gradient_allreduce_op: AllReduceOp = refused(
        "gradients that are summed over ranks",
        "remove it; multiply the loss by the number of ranks: that is the same sum",
        idle=("mean",),
    )
    graph_harvesting: MaybeFlag = no_effect(
        False, "record CUDA graphs", 'set compile.kwargs to {"mode": "reduce-overhead"}'
    )
    log_level: AnyValue = no_effect(
        None, "level of DeepSpeed's log", "set the level of the logger `torchloom`"
    )
    vocabulary_size: AnyValue = hint(
        "size to warn about if no multiple of 8", "nothing depends on it"
    )
    disable_allgather: MaybeFlag = no_effect(False, "old switch of ZeRO-1", "remove it")
    dump_state: MaybeFlag = no_effect(
        False, "print the engine's state", "`torchloom check` prints the configuration"
    )
    memory_breakdown: MaybeFlag = no_effect(False, "print memory use", "use torch.cuda.memory")
    activation_checkpointing: AnyValue = no_effect(None, "recompute activations", BY_MODEL)
    use_data_before_expert_parallelism: MaybeFlag = no_effect(
        False, "order of process groups", "there is one data-parallel group"
    )
    seq_parallel_communication_data_type: AnyValue = no_effect(
        None, "type of sequence-parallel traffic", "there is no sequence parallelism"
    )
    timers: AnyValue = no_effect(None, "timer details", "set wall_clock_breakdown", gated=True)
    flops_profiler: AnyValue = no_effect(None, "count operations", PROFILER, gated=True)
    comms_logger: AnyValue = no_effect(None, "log collectives", PROFILER, gated=True)
    comet: AnyValue = no_effect(None, "write Comet logs", LOG_TO, gated=True)
    trackio: AnyValue = no_effect(None, "write Trackio logs", LOG_TO, gated=True)
    monitor_config: AnyValue = no_effect(None, "loggers", LOG_TO, gated=True)
    amp: AnyValue = refused(
        "mixed precision by apex", "remove it; set bf16.enabled or fp16.enabled", gated=True
    )
    aio: AnyValue = refused("asynchronous NVMe reads", "remove it; there is no NVMe offloading")
    sparse_gradients: AnyValue = refused(
        "sparse embedding gradients", "remove it; build embeddings with sparse=False"
    )
    pipeline: AnyValue = refused("pipeline parallelism", ZERO3)
    tensor_parallel: AnyValue = refused("tensor parallelism", ZERO3, idle=(1,))
    sequence_parallel_size: AnyValue = refused("sequence parallelism", ZERO3, idle=(1,))
    expert_parallel: AnyValue = refused("expert parallelism", ZERO3, idle=(1,))
    hybrid_engine: AnyValue = refused(
        "one engine for training and generation",
        "remove it; generate with a separate copy of the model",
        gated=True,
    )
    compression_training: AnyValue = refused("compression while training", CONSTANT, gated=True)
    quantize_training: AnyValue = refused("quantized training", CONSTANT, gated=True)
    data_efficiency: AnyValue = refused("data sampling and routing", CONSTANT, gated=True)
    curriculum_learning: AnyValue = refused("curriculum learning", CONSTANT, gated=True)
    progressive_layer_drop: AnyValue = refused("progressive layer drop", CONSTANT, gated=True)
    eigenvalue: AnyValue = refused("eigenvalues of the loss", CONSTANT, gated=True)
    sparse_attention: AnyValue = refused(
        "block-sparse attention", "remove it; use torch.nn.attention.flex_attention in the model"
    )
    elasticity: AnyValue = refused(
        "batch sizes that follow the world size",
        "remove it; write the batch sizes of this run",
        gated=True,
    )
    autotuning: AnyValue = refused(
        "search for settings", "remove it; write the settings of this run", gated=True
    )
    weight_quantization: AnyValue = refused("quantized weights", CONSTANT)
    datastates_ckpt: AnyValue = refused(
        "checkpoints by DataStates", "remove it; set checkpoint.async_save"
    )
    nebula: AnyValue = refused("checkpoints by Nebula", "remove it; save to a folder", gated=True)
