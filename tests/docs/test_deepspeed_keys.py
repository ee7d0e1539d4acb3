"""The table of DeepSpeed's keys: complete, and as the loader treats each of them."""

from __future__ import annotations

import pytest

from docs_pages.deepspeed_keys import all_rows, ask
from torchloom.config.keys import known_paths

# Sections and keys that DeepSpeed does not have, or whose keys one line stands for.
NOT_IN_THE_TABLE = (
    "non_finite", "max_consecutive_skips", "fp16.max_consecutive_skips", "timeouts", "seed",
    "checkpoint.async_save", "checkpoint.keep_last", "zero_optimization.shard_size", "trackio",
    "monitor_config", "tensorboard.", "wandb.", "csv_monitor.", "optimizer.params", "scheduler.",
    "torch_autocast.enabled", "amp", "bf16.bf16_", "zero_optimization.offload_optimizer.pipeline",
    "zero_optimization.offload_optimizer.buffer_size", "zero_optimization.offload_optimizer.max_in_cpu",
    "zero_optimization.offload_param.pipeline", "zero_optimization.offload_param.fast_init",
    "zero_optimization.offload_param.ratio", "zero_optimization.offload_param.super_offload",
    "zero_optimization.offload_param.cpuadam_cores_perc",
    *(f"compile.{key}" for key in (
        "enabled", "backend", "kwargs", "disable_passes", "schedule", "regions", "chunk_loss", "strict",
        "dump_graphs", "offload_activation_threshold", "memory_budget", "plan", "replan_step",
        "autoep_non_moe", "choose_kernels")),
)  # fmt: skip


def test_each_key_of_the_schema_is_in_the_table() -> None:
    told = {row.key for row in all_rows()}
    parents = {path.rpartition(".")[0] for path in known_paths()}
    missing = [
        path
        for path in known_paths()
        if path not in told and path not in parents and not path.startswith(NOT_IN_THE_TABLE)
    ]
    assert missing == []


@pytest.mark.parametrize("row", all_rows(), ids=lambda row: f"{row.key}-{row.value}"[:60])
def test_the_loader_does_what_the_table_says(row) -> None:
    plain, asked = ask(row.key, None, row.around), ask(row.key, row.value, row.around)
    assert not plain.errors
    if row.outcome == "refused":
        assert asked.errors and row.why
        return
    assert not asked.errors
    is_told = any(
        each.path.startswith(row.key)
        for each in (*asked.hints, *asked.notes)
        if getattr(each, "level", "warning") == "warning"
    )
    changes = asked.config != plain.config
    if row.outcome == "no effect":
        assert is_told and not changes and row.why
    else:
        assert changes or row.outcome == "differs"
        assert (row.outcome == "differs") == bool(row.why)
