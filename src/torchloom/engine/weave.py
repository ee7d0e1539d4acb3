"""From config and layout to a compile session."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from torchloom import _torch
from torchloom._torch.cache import why_cache_is_open
from torchloom.backends.graphs import name_of
from torchloom.compiler import get_backend_fn
from torchloom.config import Config, thawed_map
from torchloom.engine.pieces import offloaded_params
from torchloom.engine.precision import cast_params
from torchloom.graph import GraphPass, PassContext
from torchloom.log import get_logger
from torchloom.pipeline import CompileSession
from torchloom.runtime import lookup
from torchloom.shard import Layout, detach_hooks, layout_of
from torchloom.shard.regather import around_compiled

logger = get_logger(__name__)

_DUMP_DIR = "runs/graphs"


def build_session(
    config: Config,
    model: nn.Module,
    *,
    passes: tuple[GraphPass, ...],
    backend: str | Callable[..., Any] | None,
    compile_kwargs: Mapping[str, Any] | None,
    budget_bytes: int | None = None,
) -> tuple[CompileSession, dict[str, Any]]:
    """Return the session and the remaining arguments of `torch.compile`.

    Args:
        config: the run's settings.
        model: sharded; the session lets go of it when it is deleted.
        passes: what runs first.
        backend: as for `Engine.compile`; None is the configured one.
        compile_kwargs: more arguments of `torch.compile`.
        budget_bytes: device memory that a step may use, where somebody has said.
    """
    options, layout = config.compile, layout_of(model)
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
    session = CompileSession(
        passes=passes,
        context=replace(pass_context(config, model), memory_budget_bytes=budget_bytes),
        backend=get_backend_fn(backend or options.backend),
        options=inductor_options,
        strict=options.strict,
        regather=layout.stage == 3,
        debug_log=options.debug_log,
        announce=dist.get_rank() == 0,
        dump_dir=_dump_dir(options.dump_graphs, layout.rank),
    )
    # Dynamo keeps code that it made of parts of a model, and the session behind it, for good.
    weakref.finalize(model, session.close).atexit = False  # type: ignore[misc]
    return session, kwargs


def start_compiled(
    model: nn.Module,
    session: CompileSession,
    passes: tuple[GraphPass, ...] | None = None,
    **kwargs: Any,
) -> None:
    """Let calls of a sharded model go through a session from now on, with other passes if given."""
    if session.backend == "inductor":
        _torch.load_inductor()
        if (reason := why_cache_is_open()) and session.announce:
            logger.warning("%s", reason)
    around = partial(around_compiled, regather=session.regather)
    _torch.compile_in_place(model, session.begin(passes), around=around, **kwargs)
    detach_hooks(model)  # last: a compile that could not be set up leaves the model as it was


def pass_context(config: Config, model: nn.Module) -> PassContext:
    """Return what passes may know of a sharded model."""
    layout = layout_of(model)
    return PassContext(
        world_size=layout.world_size,
        gather_bucket_bytes=config.zero.gather_bucket_bytes,
        reduce_bucket_bytes=config.zero.reduce_bucket_bytes,
        prefetch_bytes=_prefetch_bytes(config, layout),
        prefetch_is_bound=config.zero.prefetch_bytes is not None,
        handle=layout.handle,
        sliced=tuple(sorted(spec.name for spec in layout if spec.is_sliced)),
        offload_min_bytes=config.offload.activation_min_bytes,
        pin_memory=config.offload.pin_memory,
        host_params=offloaded_params(layout),
        free_min_bytes=config.offload.free_min_bytes,
        copy_slots=2 if config.offload.double_buffer else 1,
        cast_params=cast_params(config.precision, model, layout),
    )


def extra_passes(config: Config) -> tuple[str, ...]:
    """Return the passes that settings ask for."""
    offload = config.offload
    names: list[str] = []
    if offload.parameters:
        names.append("offload_parameters")
    if offload.activations:
        names.append("offload_activation")
    if offload.free_activations:
        names.append("free_activation")
    if offload.opt_states:
        names.append("offload_opt_states")
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


def _dump_dir(asked: bool | str, rank: int) -> Path | None:
    """Rank 0 writes; the graphs of all ranks are equal."""
    if not asked or rank != 0:
        return None
    return Path(asked if isinstance(asked, str) else _DUMP_DIR)
