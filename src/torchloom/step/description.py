"""Describe what is compiled for one training step, as one plain value made of config and arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchloom.backends.graphs import name_of
from torchloom.capture import recorded
from torchloom.compiler import get_backend_fn
from torchloom.compiler.support import check_supported
from torchloom.config import Config, PrecisionConfig, thawed_map
from torchloom.costs import NETWORKS, CostTable, Network
from torchloom.errors import ConfigError
from torchloom.graph import PassContext
from torchloom.log import get_logger
from torchloom.pipeline import REGISTRY, PassItem, PassRegistry, Resolver, Schedule
from torchloom.pipeline.registry import derived_options, joined_options
from torchloom.pipeline.schedule import ScheduleEntry, Timetable
from torchloom.plan import Plan
from torchloom.plan.transfer_sizes import sizes_within
from torchloom.runtime import Communicator
from torchloom.shard import Layout, class_of, layout_of

logger = get_logger(__name__)

_DUMP_DIR = "runs/graphs"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDescription:
    """What is compiled for one training step; made by `describe_step`, or by hand for a simulation."""

    layout: Layout
    """How the model is sharded."""
    timetable: Timetable
    """Which passes run, with which options, from which optimizer step on."""
    backend: str | Callable[..., Any] = "inductor"
    """Compiler of the woven graphs."""
    inductor_options: Mapping[str, Any]
    """Settings of Inductor."""
    compile_kwargs: Mapping[str, Any]
    """More arguments of `torch.compile`."""
    budget_bytes: int | None = None
    """Device memory that a step may use; None: no limit."""
    pinned: Plan | None = None
    """A plan to follow instead of making one."""
    replan_step: int = 0
    """Optimizer step after which operators are measured and the plan is made again; 0: never."""
    micro_steps: int = 1
    """Forwards and backwards per optimizer step."""
    prefetch_is_bound: bool = False
    """Whether the option of pass `prefetch` is an upper bound on what plans may prefetch."""
    host_slots: int = 2
    """Chunks of optimizer states that may be on the device at a time."""
    device: torch.device
    """Where the model computes."""
    network: Network
    """Links that carry the collectives, for the planner's cost model."""
    target: CostTable | None = None
    """Hardware that the step is planned for without running on it; None: this machine, which is measured."""
    regions: bool = True
    cuda_graphs: bool = False
    """Whether launches of compiled graphs are recorded and replayed."""
    strict: bool = False
    """Whether a failed compile raises, instead of falling back to eager."""
    debug_log: bool = False
    """Whether each pass logs what it did."""
    dump_dir: Path | None = None
    """Folder for the text of each graph before and after each pass."""

    @property
    def context(self) -> PassContext:
        """The facts that all passes receive."""
        return PassContext(
            world_size=self.layout.world_size,
            copies=self.layout.num_replicas,
            handle=self.layout.handle,
            memory_budget_bytes=self.budget_bytes,
        )

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait from one micro-step for the next."""
        return self.micro_steps > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCall:
    """The arguments of one call of `compile`; None leaves it to the config."""

    backend: str | Callable[..., Any] | None = None
    """Compiler of the graphs."""
    compile_kwargs: Mapping[str, Any] | None = None
    """More arguments of `torch.compile`, added to the config's."""
    passes: Sequence[PassItem] | None = None
    """What runs from the start."""
    schedule: Schedule | None = None
    """What runs from which optimizer step on."""
    registry: PassRegistry = REGISTRY
    """Passes by name."""
    name: str = "engine.compile()"
    """What the user called, for messages."""
    reads_logits: bool = False
    """Whether the loop may read what a model returns beside its loss."""


def describe_step(
    config: Config,
    call: CompileCall,
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    *,
    total_bytes: int,
    target: CostTable | None = None,
) -> StepDescription:
    """Return what a config and the arguments of a call ask for.

    Args:
        config: the run's settings.
        call: the arguments, which win over the config.
        model: sharded.
        comm: the model's communicator.
        device: where the model computes.
        total_bytes: memory of the device, equal on all ranks; budgets may be fractions of it.
        target: see `StepDescription`.

    Raises:
        CompileError: torch.compile does not work here.
        ConfigError: the backend cannot be found, or both passes and a schedule are given.
        PassOrderError: the passes are unknown, contradict each other, or lack what they need.
        PlanError: the plan that the config names cannot be read, or is for another number of ranks.
    """
    check_supported()
    layout, options = layout_of(model), config.compile
    chosen, inductor_options, kwargs = _compiler(config, call)
    budget = options.memory_budget
    pinned = None if options.plan is None else Plan.load(options.plan)
    if pinned is not None:
        pinned.check_world(layout.world_size)
    network = _network(comm, device) if target is None else target.network
    options_of_passes = joined_options(  # the last one wins
        derived_options(layout, chosen, network),
        {"cast_gathers": {"params": cast_params(config.precision, model, layout)}},
        {
            "chunk_loss": {
                "returns_stand_ins": options.chunk_loss == "always" or not call.reads_logits
            }
        },
        sizes_within(options.pass_options, network),
    )
    disabled = options.disable_passes
    if options.chunk_loss == "never":
        disabled = (*disabled, "chunk_loss")
    resolver = Resolver(
        layout.stage,
        call.registry,
        disabled,
        total_bytes,
        options.extra_passes,
        options_of_passes,
    )
    timetable = _timetable(config, resolver, call)
    if options.cuda_graphs:
        _check_cuda_graphs(timetable, chosen, device if target is None else None)
    return StepDescription(
        layout=layout,
        timetable=timetable,
        backend=chosen,
        inductor_options=inductor_options,
        compile_kwargs=kwargs,
        budget_bytes=None if budget is None else budget.resolve(total_bytes),
        pinned=pinned,
        replan_step=0 if pinned is not None or budget is None else options.replan_step,
        micro_steps=config.batch.accumulation_steps,
        prefetch_is_bound=config.zero.prefetch_bytes is not None,
        host_slots=2 if config.offload.double_buffer else 1,
        device=device,
        network=network,
        target=target,
        regions=options.regions,
        cuda_graphs=options.cuda_graphs,
        strict=options.strict,
        debug_log=options.debug_log,
        dump_dir=_dump_dir(options.dump_graphs, layout.rank),
    )


def _check_cuda_graphs(
    timetable: Timetable, backend: str | Callable[..., Any], device: torch.device | None
) -> None:
    """Refuse to record steps where nothing could be recorded, or whose plan counts on memory that recordings keep."""
    if device is not None and device.type != recorded.DEVICE:
        raise ConfigError(
            f"compile.cuda_graphs needs a CUDA device, and this model computes on {device}: set it to false here"
        )
    if backend == "eager":
        raise ConfigError(
            "compile.cuda_graphs records compiled graphs, and backend eager makes none: use inductor or aot_eager"
        )
    for each in timetable.all_passes:
        if each.name.startswith("offload_") or each.name == "free_activation":
            raise ConfigError(
                f"compile.cuda_graphs keeps the memory of graphs where it is, and pass {each.name} gives it to others: "
                "use one of the two"
            )


def _compiler(
    config: Config, call: CompileCall
) -> tuple[str | Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """Return the backend, Inductor's settings, and the other arguments of `torch.compile`."""
    kwargs = {**thawed_map(config.compile.kwargs), **(call.compile_kwargs or {})}
    backend = call.backend
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
    asked = kwargs.get("mode") == "reduce-overhead" and bool(kwargs.pop("mode"))
    if inductor_options.pop("triton.cudagraphs", False) or asked:
        logger.warning(
            "torch's own CUDA graphs (mode reduce-overhead, option triton.cudagraphs) would replay collectives without their "
            "names, and stay off: compile.cuda_graphs records torchloom's"
        )
    return get_backend_fn(backend or config.compile.backend), inductor_options, kwargs


def _timetable(config: Config, resolver: Resolver, call: CompileCall) -> Timetable:
    """Return which passes run from which step on: as the call says, else as the config does."""
    passes, schedule = call.passes, call.schedule
    if passes is not None and schedule is not None:
        raise ConfigError(f"{call.name} got both passes= and schedule=: give one of them")
    if passes is None and schedule is None:
        passes, schedule = config.compile.passes, config.compile.schedule
    if schedule is not None:
        return resolver.timetable(schedule)
    return Timetable((ScheduleEntry(0, resolver.passes(passes)),))


def _network(comm: Communicator, device: torch.device) -> Network:
    if comm.shares_memory:
        return NETWORKS["shared-memory"]
    return NETWORKS["nvlink" if device.type == "cuda" else "gloo"]


def _dump_dir(asked: bool | str, rank: int) -> Path | None:
    """Rank 0 writes; the graphs of all ranks are equal."""
    if not asked or rank != 0:
        return None
    return Path(asked if isinstance(asked, str) else _DUMP_DIR)


def cast_params(
    config: PrecisionConfig, model: nn.Module, layout: Layout
) -> tuple[str, ...] | None:
    """Return the parameters that may be cast before they are gathered; None: all.

    Args:
        config: names classes of modules.
        model: sharded or not.
        layout: of its parameters.

    Raises:
        ConfigError: there is no such class.
    """
    if config.autocast is None or config.autocast.modules is None:
        return None
    classes = {_class_named(name) for name in config.autocast.modules}
    safe = {path for path, module in model.named_modules() if class_of(module) in classes}
    return tuple(spec.name for spec in layout if any(owner.module in safe for owner in spec.owners))


def _class_named(name: str) -> type[nn.Module]:
    """Return a class by name; its file is imported already if the model has a module of it."""
    package, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(package), last, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    raise ConfigError(
        f"torch_autocast.lower_precision_safe_modules: {name!r} is no class of modules that has been "
        "imported; write package.Class, as in torch.nn.Linear"
    )
