"""What users write under `compile`."""

from __future__ import annotations

from torchloom.config.fields import Section, free_form, no_effect, refused, used
from torchloom.config.schema_types import (
    AnyValue,
    Budget,
    Count,
    Flag,
    FlagOrText,
    Items,
    MaybeFlag,
    MaybeList,
    MaybeNames,
    MaybeText,
    Name,
    Names,
)

BARRIER = "remove it; ordering comes from data dependencies in the graph"
NO_KERNELS = "remove it; torch chooses the library of each matrix product"
NO_REPLAY = "graphs are not replayed, so no inputs are kept"


class CompileSection(Section):
    """What `engine.compile()` does with the captured graphs."""

    deepcompile: Flag = used(
        False, "the wish to weave; `engine.compile()` weaves in any case, without it nothing does"
    )
    enabled: Flag = used(False, "`torchloom.initialize` calls `engine.compile()` itself")
    backend: Name = used("inductor", "compiler of the graphs")
    kwargs: Items = free_form("more keyword arguments for torch.compile")
    passes: MaybeNames = used(
        None, 'passes to run, in order; `"z1"`, `"z2"`, `"z3"` mean the preset of that stage'
    )
    disable_passes: Names = used((), "passes left out of the preset")
    schedule: MaybeList = used(
        None, "`[[step, [name, [name, memory budget], ...]], ...]`: what runs from a step on"
    )
    strict: Flag = used(False, "a failed weave is an error instead of an eager fallback")
    dump_graphs: FlagOrText = used(False, "write graphs around each pass; a string is the folder")
    debug_log: Flag = used(False, "each pass logs what it did")
    free_activation: Flag = used(
        False,
        "saved activations are freed right after their last use also by backends that keep their "
        "arguments; Inductor and torchloom's own runner do so in any case",
        adds="free_activation",
    )
    free_activation_threshold: Count = used(
        10 << 20,
        "bytes from which `free_activation` frees, this size included",
        option="free_saved.min_bytes",
    )
    double_buffer: Flag = used(
        True, "two transfers between device and host per direction are under way, instead of one"
    )
    offload_activation: Flag = used(
        False, "saved activations wait on the host for backward", adds="offload_activation"
    )
    offload_activation_threshold: Count = used(
        1 << 20,
        "torchloom's own: bytes from which activations are offloaded, this size included",
        option="offload_activation.min_bytes",
    )
    offload_activation_pin_memory: Flag = used(
        True,
        "host copies of activations are page-locked; nothing to do on a CPU",
        option="offload_activation.pin_memory",
    )
    offload_opt_states: Flag = used(
        False,
        "optimizer states wait on the host and stream through the step",
        adds="offload_opt_states",
    )
    offload_parameters: Flag = used(
        False,
        "this rank's shards of parameters wait on the host until they are gathered",
        adds="offload_parameters",
    )
    symmetric_memory: Flag = used(
        False,
        "ranks of one host communicate through memory that they share; where that cannot be had, "
        "the log says why and the process group is used",
    )
    memory_budget: Budget = used(
        None,
        'device memory of a step: bytes, `"40GB"`, `"40GiB"`, a fraction of the device, `"auto"`',
        auto="derive",
    )
    plan: MaybeText = used(None, "a plan.json to follow, instead of planning for the memory budget")
    replan_step: Count = used(
        5,
        "optimizer step after which operators are measured, one at a time, and the plan is made "
        "again by what was found; 0 keeps the first one",
    )
    autoep_non_moe: AnyValue = refused("expert parallelism", "remove it; use ZeRO stage 3")
    sync_before_reduce: MaybeFlag = no_effect(False, "wait before a reduction", BARRIER)
    sync_after_reduce: MaybeFlag = no_effect(False, "wait after a reduction", BARRIER)
    sync_before_allgather: MaybeFlag = no_effect(False, "wait before an all-gather", BARRIER)
    sync_after_allgather: MaybeFlag = no_effect(False, "wait after an all-gather", BARRIER)
    keep_int_input_tensors: MaybeFlag = no_effect(True, "keep integer inputs", NO_REPLAY)
    choose_kernels: MaybeFlag = no_effect(
        False, "measure which library multiplies matrices faster", NO_KERNELS
    )
    keep_all_input_tensors: MaybeFlag = no_effect(False, "keep all inputs", NO_REPLAY)
