"""The lists of passes that a ZeRO stage runs, as literals, and DeepSpeed's names for passes."""

from __future__ import annotations

PRESETS: dict[int, tuple[str, ...]] = {
    0: ("dedupe_gathers", "elide_copies", "place", "bucket", "prefetch"),
    1: ("dedupe_gathers", "elide_copies", "zero1", "place", "bucket", "prefetch"),
    2: (
        *("dedupe_gathers", "elide_copies", "cast_gathers", "zero2"),
        *("place", "selective_gather", "bucket", "prefetch"),
    ),
    3: (
        *("dedupe_gathers", "elide_copies", "cast_gathers", "zero3"),
        *("symmetric_gathers", "place", "selective_gather", "bucket", "prefetch"),
    ),
}

# Names that DeepSpeed's schedules and config files use for what these passes do.
ALIASES: dict[str, str] = {
    "z1": "zero1",
    "z2": "zero2",
    "z3": "zero3",
    "zero1_compile": "zero1",
    "zero2_compile": "zero2",
    "zero3_compile": "zero3",
    "offload_adam_states": "offload_opt_states",
    "move_opt_states": "offload_opt_states",
}

# DeepSpeed's functions of `deepspeed.compile.passes`, where these have other names than their passes.
FUNCTIONS: dict[str, str] = {
    "add_z1_reduce": "zero1_compile",
    "add_z2_reduce": "zero2_compile",
    "add_z3_gather_release": "zero3_compile",
    "schedule_prefetch": "prefetch",
    "offload_parameter_fwd": "offload_parameters",
}

# Names that schedules may hold and that do nothing: DeepSpeed's phases, for which torchloom's one plan has
# no need.
NO_OPS: tuple[str, ...] = (
    "offload_adam_states_for_init",
    "offload_adam_states_sync",
    "offload_activation_floor",
    "move_opt_states_sync",
)

# Passes over the joint graph, and the one that finishes their work on the split graphs.
SECOND_HALF: dict[str, str] = {
    "offload_parameters": "overlap_copies",
    "offload_activation": "overlap_copies",
    "free_activation": "free_saved",
}

# DeepSpeed's `zero3_compile` stands for several passes of torchloom over gathers and reductions;
# a list that names `bucket` chooses its place itself.
BASIS: tuple[str, ...] = ("dedupe_gathers", "elide_copies", "cast_gathers")
COMMUNICATION: dict[str, tuple[str, ...]] = {
    "zero1": ("place", "bucket"),
    "zero2": ("place", "bucket"),
    "zero3": ("symmetric_gathers", "place", "bucket"),
}
