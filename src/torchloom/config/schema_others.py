"""Top-level keys of DeepSpeed that torchloom does not implement, each with what to do instead."""

from __future__ import annotations

from torchloom.config.fields import Section, hint, no_effect, refused
from torchloom.config.kinds import word

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
