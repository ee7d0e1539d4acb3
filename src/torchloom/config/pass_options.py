"""From settings to passes and their options: by the keys that name one, and a few that are converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchloom.config.fields import keys_of
from torchloom.config.frozen import frozen_map
from torchloom.config.model import OffloadConfig, ZeroConfig
from torchloom.config.schema_compile import CompileSection


def resolve_pass_options(section: CompileSection, zero: ZeroConfig) -> Mapping[str, Any]:
    """Return the options of passes that the settings give, by the name of the pass.

    Args:
        section: the `compile` section; a key declared with `option="pass.option"` sets that option.
        zero: its bucket sizes are in bytes.
    """
    found: dict[str, dict[str, object]] = {
        "overlap_copies": {"slots": 2 if section.double_buffer else 1},
    }
    for name, option, size in (
        ("bucket", "gather_bytes", zero.gather_bucket_bytes),
        ("bucket", "reduce_bytes", zero.reduce_bucket_bytes),
        ("prefetch", "max_bytes", zero.prefetch_bytes),
    ):
        if size is not None:
            found.setdefault(name, {})[option] = size
    for key in keys_of(CompileSection).values():
        if key.option:
            name, _, option = key.option.partition(".")
            found.setdefault(name, {})[option] = getattr(section, key.name)
    return frozen_map(found)


def resolve_extra_passes(section: CompileSection, offload: OffloadConfig) -> tuple[str, ...]:
    """Return the passes that settings ask for, beside those of the list or preset.

    Args:
        section: the `compile` section; a key declared with `adds="pass"` adds that pass.
        offload: what DeepSpeed's keys ask for as well.
    """
    asked = {
        key.adds
        for key in keys_of(CompileSection).values()
        if key.adds and getattr(section, key.name)
    }
    if offload.parameters:
        asked.add("offload_parameters")
    if offload.opt_states:
        asked.add("offload_opt_states")
    return tuple(sorted(asked))
