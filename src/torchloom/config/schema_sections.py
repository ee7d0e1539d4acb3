"""Declare what users write under `zero_optimization` and `compile`."""

from __future__ import annotations

from torchloom.config.budget import parse_budget
from torchloom.config.fields import Section, free_form, hint, no_effect, refused, section, used
from torchloom.config.kinds import flag, flag_or_text, names, sequence, text, whole, word
from torchloom.config.model import UNSHARDED_BELOW

PINNED = "torchloom page-locks host memory for a GPU and sizes it by what is offloaded"
ON_DEVICE = "the optimizer always runs on the device"
NO_NVME = "nothing is offloaded to NVMe"
PLANNED = "torchloom decides the order and overlap of collectives for each graph"
ALWAYS = "always on: shards and gradients are contiguous and evenly split"
LIVENESS = "each gathered weight is released after its last use in the graph"
WHOLE_SHARDS = "the optimizer updates all shards at once"
NO_QUANTIZING = "remove it; weights and gradients travel in bf16, fp16 or fp32 only"
HYBRID = "set zero_optimization.shard_size to the number of ranks per shard group"


class OffloadSection(Section):
    """Where a part of the training state is kept."""

    device = used(word("none", "cpu", "nvme"), "none", '`"none"` or `"cpu"`; `"nvme"` is refused')
    pin_memory = hint("pin host buffers", PINNED)
    nvme_path = hint("folder on NVMe", NO_NVME)
    buffer_count = hint("number of host buffers", PINNED)
    buffer_size = hint("elements per host buffer", PINNED)
    max_in_cpu = hint("elements kept on the host", PINNED)
    fast_init = hint("faster start with NVMe", NO_NVME)
    pipeline = hint("pipelined transfers", "set compile.double_buffer")
    pipeline_read = hint("pipelined reads", "set compile.double_buffer")
    pipeline_write = hint("pipelined writes", "set compile.double_buffer")
    super_offload = hint("CPU Adam for Superchips", ON_DEVICE)
    cpuadam_cores_perc = hint("share of cores for CPU Adam", ON_DEVICE)
    ratio = hint("share of parameters updated on the host", ON_DEVICE)


class LeafSection(Section):
    """Modules of which ranks use other parts, such as experts; each is named in one of three ways."""

    classes = used(
        names, (), "their classes, as `MixtralSparseMoeBlock` or with the Python module before it"
    )
    name_suffixes = used(names, (), "ends of their names")
    names = used(names, (), "their names in the model")


class ZeroSection(Section):
    """How training state is sharded over ranks."""

    stage = used(
        whole(0, 3),
        0,
        "what is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters",
    )
    stage3_param_persistence_threshold = used(
        whole(),
        None,
        f"parameters with fewer elements are not sharded; the default is {UNSHARDED_BELOW}, or less where these would hold more "
        "than a hundredth of the model",
        aliases=("param_persistence_threshold",),
    )
    stage3_gather_16bit_weights_on_model_save = used(
        flag,
        False,
        "a 16-bit export gathers the full weights",
        aliases=("gather_16bit_weights_on_model_save",),
        old=("stage3_gather_fp16_weights_on_model_save", "gather_fp16_weights_on_model_save"),
    )
    shard_size = used(
        whole(1),
        None,
        "torchloom's own: ranks per shard group (hybrid sharding); the default is all ranks",
    )
    reduce_bucket_size = hint(
        "elements per merged reduction; the default is a layer", "", take=whole()
    )
    allgather_bucket_size = hint(
        "elements per merged all-gather; the default is a layer", "", take=whole()
    )
    stage3_prefetch_bucket_size = hint(
        "elements gathered ahead of their use; the default is one layer over gloo and two over other backends",
        "",
        aliases=("prefetch_bucket_size",),
        take=whole(),
    )
    sub_group_size = hint("elements per optimizer sub-group", WHOLE_SHARDS)
    stage3_max_live_parameters = hint(
        "elements gathered at a time", LIVENESS, aliases=("max_live_parameters",)
    )
    stage3_max_reuse_distance = hint(
        "elements before a weight is gathered again", LIVENESS, aliases=("max_reuse_distance",)
    )
    stage3_model_persistence_threshold = hint(
        "elements left unsharded in total",
        "stage3_param_persistence_threshold alone decides",
        aliases=("model_persistence_threshold",),
    )
    stage3_module_granularity_threshold = hint(
        "elements per module fetched as one", PLANNED, aliases=("module_granularity_threshold",)
    )
    stage3_use_all_reduce_for_fetch_params = hint(
        "fetch by all-reduce", PLANNED, aliases=("use_all_reduce_for_fetch_params",)
    )
    stage3_allgather_sequential = hint(
        "gather parameters one by one", PLANNED, aliases=("allgather_sequential",)
    )
    leaf_module = section(
        LeafSection, "modules of which ranks use other parts, gathered and reduced as one"
    )
    overlap_comm = hint("overlap reduction and backward", PLANNED)
    contiguous_gradients = hint("copy gradients to one buffer", ALWAYS)
    reduce_scatter = hint("reduce-scatter instead of all-reduce", ALWAYS)
    allgather_partitions = hint("all-gather instead of broadcasts", ALWAYS)
    round_robin_gradients = hint("spread gradients over ranks", ALWAYS)
    use_multi_rank_bucket_allreduce = hint("merge reductions of ranks", ALWAYS)
    memory_efficient_linear = hint("save no gathered weight of Linear", LIVENESS)
    ignore_unused_parameters = hint("allow parameters without gradient", "always allowed")
    load_from_fp32_weights = refused(
        "master weights restored from 16 bits",
        "remove it; checkpoints hold fp32 master shards",
        default=True,
    )
    zenflow = refused(
        "asynchronous updates of most gradients (ZenFlow)",
        "remove it; the optimizer updates all parameters at each step",
    )
    save_muon_momentum_buffer_in_memory = no_effect("Muon's momentum beside NVMe", NO_NVME)
    elastic_checkpoint = no_effect("old elastic checkpoints", "remove it")
    pipeline_loading_checkpoint = no_effect("pipelined loading", "remove it")
    override_module_apply = no_effect("patch Module.apply", "nothing is patched", default=True)
    log_trace_cache_warnings = no_effect(
        "log cache misses of the tracer", "torchloom has no such tracer"
    )
    enable_sanity_checks = no_effect("extra checks", "checks are always on")
    offload_optimizer = section(OffloadSection, "where optimizer states are kept")
    offload_param = section(OffloadSection, "where parameters are kept")
    cpu_offload = used(
        flag, None, 'deprecated: true means `offload_optimizer: {"device": "cpu"}`, with a warning'
    )
    cpu_offload_param = used(
        flag,
        None,
        'deprecated: true means `offload_param: {"device": "cpu"}`, with a warning',
        aliases=("cpu_offload_params",),
    )
    cpu_offload_use_pin_memory = hint("pin host buffers", PINNED)
    legacy_stage1 = refused("the old stage 1", "remove it; stage 1 has one form here")
    zero_quantized_weights = refused("quantized all-gathers (ZeRO++)", NO_QUANTIZING)
    zero_quantized_nontrainable_weights = refused(
        "quantized frozen weights (ZeRO++)", NO_QUANTIZING
    )
    zero_quantized_gradients = refused("quantized gradient reduction (ZeRO++)", NO_QUANTIZING)
    zeropp_loco_param = refused("quantization error feedback (ZeRO++)", NO_QUANTIZING)
    zero_hpz_partition_size = no_effect(
        "secondary partitions (ZeRO++)",
        "weights are gathered from all ranks in backward, too; shard_size gathers within a group, and "
        "shards optimizer states and gradients within it as well",
        default=1,
    )
    mics_shard_size = refused("shard groups (MiCS)", HYBRID, idle=(-1,))
    mics_hierarchical_params_gather = refused("two-level gathers (MiCS)", HYBRID)


BARRIER = "remove it; ordering comes from data dependencies in the graph"
NO_KERNELS = "remove it; torch chooses the library of each matrix product"
NO_REPLAY = "graphs are not replayed, so no inputs are kept"


class CompileSection(Section):
    """What `engine.compile()` does with the captured graphs."""

    deepcompile = used(
        flag,
        False,
        "accepted for DeepSpeed compatibility; `engine.is_deepcompile_enabled()` returns it. "
        "`engine.compile()` weaves with either value",
    )
    enabled = used(flag, False, "`torchloom.initialize` calls `engine.compile()`")
    backend = used(
        text,
        "inductor",
        "compiler of the graphs: a registered name or a path `package.module.function`",
    )
    kwargs = free_form("more keyword arguments for `torch.compile`")
    passes = used(
        names,
        None,
        'passes to run, in order, instead of the preset; `"z1"`, `"z2"`, `"z3"` mean the preset of that '
        "stage",
    )
    disable_passes = used(names, (), "passes removed from the preset")
    schedule = used(
        sequence,
        None,
        "`[[step, [name, [name, memory budget], ...]], ...]`: the passes to run from each of these "
        "optimizer steps on",
    )
    regions = used(
        flag,
        True,
        "compile layers that do the same once, as one body that is called for each; `false` compiles each by itself",
    )
    chunk_loss = used(
        word("auto", "always", "never"),
        "auto",
        "torchloom's own: compute a loss behind a large vocabulary a few rows at a time where nothing reads its logits. Logits "
        'that a model returns beside its loss are then made when they are read: with `"auto"` in training steps of '
        'an engine and of `TorchloomTrainer`, with `"always"` in all; `"never"` makes all logits',
    )
    strict = used(
        flag,
        False,
        "raise an error when weaving a graph fails, instead of running the graph eagerly",
    )
    dump_graphs = used(
        flag_or_text,
        False,
        "`true` (folder `runs/graphs`) or a folder: rank 0 writes each graph as captured and after each "
        "pass that changed it",
    )
    debug_log = used(flag, False, "each pass logs its edits and its time")
    free_activation = used(
        flag,
        False,
        "free saved activations right after their last use also under backends that keep their "
        "arguments; Inductor and torchloom's own runner always do so",
        adds="free_activation",
    )
    free_activation_threshold = used(
        whole(),
        10 << 20,
        "smallest size in bytes that `free_activation` frees",
        option="free_saved.min_bytes",
    )
    double_buffer = used(
        flag,
        True,
        "run two transfers at a time in each direction between device and host, instead of one",
    )
    offload_activation = used(
        flag,
        False,
        "move saved activations to host memory until backward needs them",
        adds="offload_activation",
    )
    offload_activation_threshold = used(
        whole(),
        1 << 20,
        "torchloom's own: smallest size in bytes of an activation that is offloaded",
        option="offload_activation.min_bytes",
    )
    offload_activation_pin_memory = used(
        flag,
        True,
        "page-lock the host copies of activations; no effect on a CPU",
        option="offload_activation.pin_memory",
    )
    offload_opt_states = used(
        flag,
        False,
        "keep optimizer states in host memory and stream them through the device during the step",
        adds="offload_opt_states",
    )
    offload_parameters = used(
        flag,
        False,
        "keep this rank's shards of parameters in host memory until they are gathered",
        adds="offload_parameters",
    )
    symmetric_memory = used(
        flag,
        False,
        "ranks of one host communicate through shared memory, in compiled and in eager code; where that "
        "is not possible, the log says why and the process group is used",
    )
    memory_budget = used(
        parse_budget,
        None,
        'device memory that a step may use at its peak: bytes, `"40GB"`, `"40GiB"`, a fraction of the device, `"auto"`',
        auto="derive",
    )
    plan = used(
        text, None, "path of a plan.json to follow, instead of planning for the memory budget"
    )
    replan_step = used(
        whole(),
        5,
        "optimizer step after which torchloom measures the operators one by one and plans again with "
        "the measured times; 0 keeps the first plan",
    )
    autoep_non_moe = refused("expert parallelism", "remove it; use ZeRO stage 3")
    sync_before_reduce = no_effect("wait before a reduction", BARRIER)
    sync_after_reduce = no_effect("wait after a reduction", BARRIER)
    sync_before_allgather = no_effect("wait before an all-gather", BARRIER)
    sync_after_allgather = no_effect("wait after an all-gather", BARRIER)
    keep_int_input_tensors = no_effect("keep integer inputs", NO_REPLAY, default=True)
    choose_kernels = no_effect("measure which library multiplies matrices faster", NO_KERNELS)
    keep_all_input_tensors = no_effect("keep all inputs", NO_REPLAY)
