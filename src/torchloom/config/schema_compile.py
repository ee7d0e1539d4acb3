"""What users write under `compile`."""

from __future__ import annotations

from torchloom.config.budget import parse_budget
from torchloom.config.fields import Section, free_form, no_effect, refused, used
from torchloom.config.kinds import flag, flag_or_text, names, sequence, text, whole

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
