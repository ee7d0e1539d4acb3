"""Plan a training step for N ranks on one machine: the session's own path, over tensors without data.

    model on meta -> shard for rank 0 of a simulated world -> describe and build the step
    -> one call captures, plans and weaves forward and backward -> predicted peak, seconds and plan

No operator runs, no weight is allocated, and no other rank exists.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom._torch.modes import wants_values
from torchloom._torch.tensors import fake_mode
from torchloom.config import Config, load_config
from torchloom.config.findings import Findings
from torchloom.config.source import read
from torchloom.costs import CostTable, collective_us, device_row, over_network
from torchloom.costs.collectives import between_copies_us, network_row
from torchloom.errors import PlanError, TorchloomError, first_line, program_error
from torchloom.exchange import Agreement
from torchloom.loop.elementwise import may_step_by_parts
from torchloom.loop.optimizers import make_optimizer
from torchloom.loop.owned_params import OwnedParams
from torchloom.loop.owner_memory import owned_memory, owned_us
from torchloom.loop.precision import autocasting, cast_inputs, dtype_of, shard_precision
from torchloom.loop.rounding import rounding_of
from torchloom.loop.step_log import work_of
from torchloom.pipeline.report import GraphReport
from torchloom.runtime import Communicator
from torchloom.shard import Layout, plan_layout, shard_module
from torchloom.shard.nested import loss_in
from torchloom.shard.roots import forget_model
from torchloom.simulation.checkpointing import checkpoint_layers
from torchloom.simulation.lower import lowered, prepare
from torchloom.simulation.result import Simulation
from torchloom.simulation.world import EqualRanks, simulated_world
from torchloom.step import CompileCall, CompiledStep, Driver, build_step, describe_step
from torchloom.step.description import cast_params
from torchloom.step.interfaces import SHARDS, STATES

Inputs = Sequence[Any] | Mapping[str, Any]


class _Compiled(NamedTuple):
    """A captured step, its model and layout."""

    step: CompiledStep
    module: nn.Module
    layout: Layout
    num_params: int
    stepped: int
    """Elements that this rank's optimizer steps as shards or slices."""
    owned_us: float
    """Time of the exchanges and updates of what ranks own."""

    def result(
        self, table: CostTable, settings: Config, name: str, tokens: int, began: float
    ) -> Simulation:
        """Return what was found.

        Args:
            table: of the simulated hardware.
            settings: of the run.
            name: of the model.
            tokens: of a micro batch.
            began: when the simulation began, by `time.perf_counter`.

        Raises:
            PlanError: no graph has a backward.
        """
        graphs = [each for each in self.step.session.report.graphs if each.times is not None]
        if not graphs:
            raise PlanError(
                f"no graph of {name} has a backward: let the model return its loss, or pass loss="
            )
        standing, micro_steps = self.step.standing, settings.batch.accumulation_steps
        exposed, computed = Counter[str](), Counter[str]()
        for each in graphs:
            exposed.update(each.times.exposed_by if each.times else {})
            computed.update(each.times.compute_by if each.times else {})
        peak, batch_bytes = max(
            ((each.peak, each.batch_bytes) for each in graphs if each.peak),
            key=lambda found: found[0].peak_bytes + found[1],
        )
        boundary_us = _boundary_us(self.layout, table)
        plan = self.step.session.plan() if standing.budget_bytes is not None else None
        update_us = 1e6 * self.stepped / table.device.adamw_params_per_s + self.owned_us
        if plan is not None:
            update_us += micro_steps * max((e.states_us for e in plan.graphs), default=0.0)
        elif standing.states is not None:
            update_us += standing.states.added_us(0, table.device)
        kinds: Counter[str] = Counter()
        for group in peak.groups:
            kinds[group.kind] += group.num_bytes
        for kind, _, num_bytes in (
            self.step.session.standing.parts if self.step.session.standing else ()
        ):
            kinds[kind] += num_bytes
        kinds["batch"] += batch_bytes
        within_bytes = max(batch_bytes + peak.peak_bytes, standing.step_bytes)
        work = work_of(self.module, self.layout, torch.device("cpu"))
        return Simulation(
            model=name,
            num_params=self.num_params,
            world_size=self.layout.num_ranks,
            stage=settings.zero.stage,
            device=table.device.name,
            network=table.network.name,
            micro_steps=micro_steps,
            tokens=tokens * micro_steps,
            compute_by={kind: micro_steps * us / 1e6 for kind, us in computed.most_common()},
            compute_s=micro_steps * _sum(graphs, "compute_us"),
            exposed_s=micro_steps * _sum(graphs, "exposed_us") + boundary_us / 1e6,
            loaded_s=micro_steps * _sum(graphs, "loaded_us"),
            update_s=update_us / 1e6,
            network_s=micro_steps * sum(e.times.busy_us["network"] for e in graphs if e.times) / 1e6
            + boundary_us / 1e6,
            exposed_by={what: micro_steps * us / 1e6 for what, us in exposed.most_common()},
            peak_bytes=standing.base_bytes + within_bytes if plan is None else plan.peak_bytes,
            standing_bytes=standing.base_bytes,
            capacity_bytes=table.device.capacity_bytes,
            budget_bytes=standing.budget_bytes,
            peak_by_kind=dict(kinds.most_common()),
            flops_per_token=work.flops_per_token,
            plan=plan,
            flat_because=tuple(dict.fromkeys(why for each in graphs for why in each.flat_because)),
            lowered=lowered(graphs, peak.peak_bytes),
            simulated_in_s=time.perf_counter() - began,
        )


@dataclass
class _SimulatedHost:
    """Says which passes keep tensors in host memory; nothing moves, as nothing has data."""

    names: frozenset[str] = field(default=frozenset())

    def follow(self, names: Collection[str]) -> None:
        self.names = frozenset(names) & {STATES, SHARDS}

    def make_room(self) -> None:
        pass

    def keep_shards(self, names: Collection[str]) -> None:
        pass

    def fit(self, free_bytes: int, step_bytes: int) -> None:
        pass


def simulate(  # noqa: PLR0913  settings of one run, named by the caller
    model: nn.Module | Callable[[], nn.Module],
    inputs: Inputs,
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world_size: int,
    device: str = "h100-80gb",
    network: str = "nvlink",
    budget: str | float | None = None,
    optimizer: Callable[..., Optimizer] | None = None,
    loss: Callable[..., Tensor] | None = None,
    costs: CostTable | None = None,
    checkpointing: str = "none",
    eager: bool = False,
    lowers: bool = False,
    name: str = "",
) -> Simulation:
    """Predict peak memory and time of a training step on hardware that is not there.

    Args:
        model: on the meta device, or a function that makes it (it is called under `torch.device("meta")`). It
            is sharded in place.
        inputs: arguments of one forward pass, positional or by name: tensors of the shapes and dtypes of one
            micro-batch, on any device; their values are not read.
        config: as for `torchloom.initialize`.
        world_size: number of ranks.
        device: a row of `torchloom.costs.DEVICES`, such as "h100-80gb".
        network: a row of `torchloom.costs.NETWORKS`, or two of them, "nvlink+infiniband-400": inside of a host
            of eight devices, and between hosts.
        budget: takes the place of the config's `compile.memory_budget`: "70GB", or a part of the device's
            memory, as 0.9.
        optimizer: function from parameters to an optimizer; default: the config's, else fused AdamW.
        loss: called as `loss(model, *inputs, **inputs)`; default: what the model returns, or its `loss`.
        costs: measured figures in place of `device` and `network`, as `torchloom calibrate` writes them.
        checkpointing: what layers keep for backward, as published runs have it: "none", "full", "layers" or
            "selective" (`checkpoint_layers`). A budget chooses by itself.
        eager: whether operators run one by one, as where nothing is compiled, not fused.
        lowers: whether Inductor compiles the graphs for the device, as `torchloom plan simulate --lower` asks; only
            its own process can.
        name: of the model, for tables.

    Raises:
        PlanError: the device or network is unknown, no plan keeps the budget (the text says what is lacking), or
            forward reads values of tensors.
        ConfigError: the config is wrong.
        ShardError: the model cannot be sharded, or is not on meta.

    Example:
        >>> found = simulate(  # doctest: +SKIP
        ...     lambda: MyModel(), (torch.zeros(1, 4096, dtype=torch.long),),
        ...     {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        ...      "zero_optimization": {"stage": 3}},
        ...     world_size=64, device="h100-80gb", network="nvlink+infiniband-400", budget="70GB",
        ... )
        >>> found.peak_bytes, found.step_s  # doctest: +SKIP
        (61234567890, 2.1)
    """
    began = time.perf_counter()
    table = costs or CostTable(device=device_row(device), network=network_row(network))
    table = over_network(table, table.network)
    if eager:
        table = replace(table, device=replace(table.device, fuses=False))
    if lowers:
        prepare(table.device.name, table.device.capacity_bytes or 1 << 40)
    settings = load_config(_with_budget(config, budget, lowers=lowers), world_size=world_size)
    sharing = settings.zero.shard_size or world_size
    with torch.device("meta"):
        module = model if isinstance(model, nn.Module) else model()
    _check_on_meta(module)
    checkpoint_layers(module, checkpointing)
    with simulated_world(sharing, _transport_of(table), world_size // sharing) as comm:
        try:
            place = torch.device("cuda" if lowers else "cpu")
            compiled = _compiled(module, inputs, settings, comm, table, place, optimizer, loss)
            return compiled.result(
                table, settings, name or type(module).__name__, _tokens(inputs), began
            )
        except Exception as error:
            if wants_values(error):
                raise PlanError(
                    "forward reads values of tensors (a branch by data, .item()), and tensors of a simulation have "
                    "none: simulate the branch that most batches take"
                ) from error
            first = program_error(error)
            if first is error or isinstance(first, TorchloomError):
                raise
            at = getattr(error, "innermost_user_frame_summary", None)
            where = "" if at is None else f" at {at.filename}:{at.lineno} in {at.name}"
            raise PlanError(
                f"{name or type(module).__name__} does not run{where}: {first_line(first)}: change the sizes in its "
                "config (heads, widths), its code or its inputs"
            ) from error
        finally:
            forget_model(module)


def _with_budget(config: Any, budget: str | float | None, *, lowers: bool) -> Any:
    """Return the config for code that runs here, with another budget where one is given."""
    settings: dict[str, Any] = read(config, Findings()).tree
    options: dict[str, Any] = dict(settings.get("compile") or {})
    # Inductor's code would be for this processor; the graphs are the same under any backend.
    options |= {"backend": "inductor" if lowers else "aot_eager", "strict": True}
    if budget is not None:
        options["memory_budget"] = budget
    return {**settings, "compile": options}


def _transport_of(table: CostTable) -> str:
    return "gloo" if table.network.name in ("gloo", "shared-memory") else "nccl"


def _check_on_meta(module: nn.Module) -> None:
    real = next((n for n, p in module.named_parameters() if not p.is_meta), None)
    if real is not None:
        raise PlanError(
            f"parameter {real!r} has data: pass a function that makes the model, or make it under "
            'torch.device("meta"); nothing of a simulation needs weights'
        )


def _check_loss(result: Any) -> None:
    if loss_in(result) is None:
        is_tensor = isinstance(result, Tensor)
        what = f"tensor of shape {tuple(result.shape)}" if is_tensor else type(result).__name__
        raise PlanError(
            f"forward returned a {what}, and backward begins at one number: let the model return its loss, or "
            "a result with a field `loss`, or pass loss= to torchloom.simulate"
        )


def _compiled(
    module: nn.Module,
    inputs: Inputs,
    settings: Config,
    comm: Communicator,
    table: CostTable,
    device: torch.device,
    optimizer: Callable[..., Optimizer] | None,
    loss: Callable[..., Tensor] | None,
) -> _Compiled:
    """Shard, build and capture a step."""
    num_params = sum(param.numel() for param in module.parameters())
    layout = plan_layout(
        module,
        stage=settings.zero.stage,
        world_size=comm.world_size,
        num_replicas=comm.num_replicas,
        rank=0,
        handle=comm.handle,
        persistence_threshold=settings.zero.param_persistence_threshold,
        precision=shard_precision(settings.precision),
        sync_in_backward=False,
    )
    cast_params(settings.precision, module, layout)
    with fake_mode():
        shard_module(module, layout, init=lambda each: None, device=device)
        local = OwnedParams(module, layout, comm)
        with _whole(local):
            made = make_optimizer(
                settings.optimizer,
                optimizer or (None if settings.optimizer else _adamw),
                None,
                local,
            )
        description = describe_step(
            settings,
            CompileCall(name="torchloom.simulate"),
            module,
            comm,
            device,
            total_bytes=table.device.capacity_bytes or 1 << 40,
            target=table,
        )
        rounding = rounding_of(settings, module, layout, made)
        driver = Driver(
            ranks=Agreement(EqualRanks(layout.num_ranks)),
            host=_SimulatedHost(),
            optimizer=made,
            owned_memory=owned_memory(made, of_any_rank=True),
            by_parts=may_step_by_parts(made),
            update=None if rounding is None else rounding.update,
            as_shards=local.as_shards,
            name="torchloom.simulate",
        )
        step = build_step(description, module, comm, driver)
        args, kwargs = _fake_inputs(inputs, device, settings)
        with autocasting(settings.precision, device):
            result = loss(module, *args, **kwargs) if loss else module(*args, **kwargs)
        _check_loss(result)
        del result
        with local.as_shards():
            update_us = 0.0 if made is None else owned_us(made, table)
    owned = {} if local.ownership is None else local.ownership.units
    stepped = sum(math.prod(each.shard_shape) for each in local if id(each.param) not in owned)
    return _Compiled(step, module, layout, num_params, stepped, update_us)


@contextmanager
def _whole(local: OwnedParams) -> Iterator[None]:
    """Let parameters have the shapes of whole ones in a `with` block, as real shards say of themselves."""
    held = [(each.param, each.param.data) for each in local]
    for each in local:
        each.param.data = torch.empty(each.spec.shape, dtype=each.spec.dtype)
    yield
    for param, data in held:
        param.data = data


def _adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, fused=True)


def _fake_inputs(
    inputs: Inputs, device: torch.device, settings: Config
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made: dict[int, Tensor] = {}  # one that is given twice stays one

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        like = torch.empty(value.shape, dtype=value.dtype, device=device)
        return made.setdefault(id(value), like)

    kwargs = (
        {key: fake(each) for key, each in inputs.items()} if isinstance(inputs, Mapping) else {}
    )
    args = () if isinstance(inputs, Mapping) else tuple(fake(each) for each in inputs)
    dtype = dtype_of(settings.precision.dtype)
    if dtype is torch.float32:
        return args, kwargs
    return cast_inputs(args, dtype), cast_inputs(kwargs, dtype)


def _tokens(inputs: Inputs) -> int:
    """Return the elements of the first tensor of integers, else the rows of the first tensor."""
    values = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    tensors = [each for each in values if isinstance(each, Tensor)]
    ids = next((each for each in tensors if not each.is_floating_point()), None)
    if ids is not None:
        return ids.numel()
    return len(tensors[0]) if tensors else 0


def _sum(graphs: Sequence[GraphReport], what: str) -> float:
    return sum(getattr(each.times, what) for each in graphs) / 1e6


def _boundary_us(layout: Layout, table: CostTable) -> float:
    """Return the time of what travels behind backward at stages 0 and 1, where nothing hides it."""
    whole = [spec for spec in layout if spec.requires_grad and spec.mode == "whole"]
    reduced = sum(spec.numel * spec.wire_dtype.itemsize for spec in whole)
    sliced = sum(spec.numel * spec.dtype.itemsize for spec in whole if spec.is_sliced)
    ranks, copies = layout.world_size, layout.num_replicas
    if not reduced:
        return 0.0
    if not sliced:
        return collective_us("all_reduce", reduced, ranks * copies, table)
    return (
        collective_us("reduce_scatter", reduced, ranks, table)
        + between_copies_us(reduced // ranks, ranks, copies, table)
        + collective_us("all_gather", sliced, ranks, table)
    )
