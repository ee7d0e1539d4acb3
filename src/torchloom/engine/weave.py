"""From config and layout to a compile session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from torchloom import _torch
from torchloom.backends.graphs import name_of
from torchloom.compiler import get_backend_fn
from torchloom.config import Config, thawed_map
from torchloom.engine.pieces import offloaded_params
from torchloom.errors import ConfigError
from torchloom.graph import GraphPass, PassContext
from torchloom.log import get_logger
from torchloom.pipeline import CompileSession, resolve_passes
from torchloom.runtime import lookup
from torchloom.shard import Layout, detach_hooks

logger = get_logger(__name__)

_DUMP_DIR = "runs/graphs"


def build_session(
    config: Config,
    layout: Layout,
    *,
    backend: str | Callable[..., Any] | None,
    compile_kwargs: Mapping[str, Any] | None,
    passes: Sequence[str | GraphPass] | None,
    schedule: Sequence[tuple[int, Sequence[str | GraphPass]]] | None,
) -> tuple[CompileSession, dict[str, Any]]:
    """Return the session and the remaining arguments of `torch.compile`.

    Raises:
        ConfigError: both `passes` and `schedule` are given, or a schedule switches later.
        PassOrderError: see `resolve_passes`.
    """
    options = config.compile
    kwargs = {**thawed_map(options.kwargs), **(compile_kwargs or {})}
    if "backend" in kwargs:
        named = kwargs.pop("backend")
        if backend is not None:
            logger.warning(
                "compile_kwargs names backend %r, the argument %r: the argument is used",
                name_of(named),
                name_of(backend),
            )
        backend = backend or named
    inductor_options = thawed_map(kwargs.pop("options", None) or {})
    asked = _from_schedule(passes, schedule)
    session = CompileSession(
        passes=resolve_passes(
            layout.stage,
            asked if asked is not None else options.passes,
            options.disable_passes,
            extras=extra_passes(config),
        ),
        context=pass_context(config, layout),
        backend=get_backend_fn(backend or options.backend),
        options=inductor_options,
        strict=options.strict,
        regather=layout.stage == 3,
        debug_log=options.debug_log,
        announce=dist.get_rank() == 0,
        dump_dir=_dump_dir(options.dump_graphs, layout.rank),
    )
    return session, kwargs


def start_compiled(model: nn.Module, session: CompileSession, **kwargs: Any) -> None:
    """Let calls of a sharded model go through a session from now on."""
    if session.backend == "inductor":
        _torch.load_inductor()
    _torch.compile_in_place(model, session, **kwargs)
    detach_hooks(model)  # last: a compile that could not be set up leaves the model as it was


def pass_context(config: Config, layout: Layout) -> PassContext:
    """Return what passes may know."""
    return PassContext(
        world_size=layout.world_size,
        gather_bucket_bytes=config.zero.gather_bucket_bytes,
        reduce_bucket_bytes=config.zero.reduce_bucket_bytes,
        prefetch_bytes=_prefetch_bytes(config, layout),
        sliced=tuple(sorted(spec.name for spec in layout if spec.is_sliced)),
        offload_min_bytes=config.offload.activation_min_bytes,
        pin_memory=config.offload.pin_memory,
        host_params=offloaded_params(layout) if config.offload.parameters else (),
        copy_slots=2 if config.offload.double_buffer else 1,
    )


def extra_passes(config: Config) -> tuple[str, ...]:
    """Return the passes that settings add to the preset."""
    offload = config.offload
    names: list[str] = []
    if offload.parameters:
        names.append("offload_parameters")
    if offload.activations:
        names.append("offload_activation")
    if offload.activations or offload.parameters:
        names.append("overlap_copies")
    return tuple(names)


def _prefetch_bytes(config: Config, layout: Layout) -> int:
    """Return the bytes in flight that pay.

    Measured over gloo, 2 ranks on 2 cores, 34 M parameters, batch 1: two buckets ahead cost 49 MB
    more peak memory than one and gained less than 1 % of the step.
    """
    asked = config.zero.prefetch_bytes
    if asked is not None:
        return asked
    num_buckets = 4 if lookup(layout.handle).overlaps_compute else 1
    return num_buckets * config.zero.gather_bucket_bytes


def _from_schedule(
    passes: Sequence[str | GraphPass] | None,
    schedule: Sequence[tuple[int, Sequence[str | GraphPass]]] | None,
) -> Sequence[str | GraphPass] | None:
    if schedule is None:
        return passes
    if passes is not None:
        raise ConfigError("engine.compile() got both passes= and schedule=: give one of them")
    if len(schedule) != 1 or schedule[0][0] != 0:
        steps = [entry[0] for entry in schedule]
        raise ConfigError(
            f"schedule has entries at steps {steps}: only one entry, at step 0, is supported; "
            "put all passes there"
        )
    return schedule[0][1]


def _dump_dir(asked: bool | str, rank: int) -> Path | None:
    """Rank 0 writes; the graphs of all ranks are equal."""
    if not asked or rank != 0:
        return None
    return Path(asked if isinstance(asked, str) else _DUMP_DIR)
