"""Plan a training step for N ranks on one machine: the session's own path, over tensors without data.

    model on meta -> shard for rank 0 of a simulated world -> describe and build the step
    -> one call captures, plans and weaves forward and backward -> predicted peak, seconds and plan

No operator runs, no weight is allocated, and no other rank exists.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom._torch.attention import attention_of_gpus
from torchloom._torch.modes import wants_values
from torchloom._torch.tensors import fake_mode
from torchloom.config import Config, load_config
from torchloom.config.findings import Findings
from torchloom.config.source import read
from torchloom.costs import CostTable, device_row, over_network
from torchloom.costs.collectives import network_row
from torchloom.errors import PlanError, TorchloomError, first_line, program_error
from torchloom.exchange import Agreement
from torchloom.loop.elementwise import may_step_by_parts
from torchloom.loop.optimizers import make_optimizer
from torchloom.loop.owned_params import OwnedParams
from torchloom.loop.owner_memory import owned_memory, owned_us
from torchloom.loop.precision import autocasting, cast_inputs, dtype_of, shard_precision
from torchloom.loop.rounding import round_stochastically, seed_of_rounding
from torchloom.runtime import Communicator
from torchloom.shard import plan_layout, shard_module
from torchloom.shard.nested import loss_in
from torchloom.shard.roots import forget_model
from torchloom.simulation.checkpointing import checkpoint_layers
from torchloom.simulation.lower import prepare
from torchloom.simulation.result import Captured, Simulation
from torchloom.simulation.world import EqualRanks, simulated_world
from torchloom.step import CompileCall, Driver, build_step, describe_step
from torchloom.step.description import cast_params
from torchloom.step.interfaces import SHARDS, STATES

Inputs = Sequence[Any] | Mapping[str, Any]


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
    _check_parameters(module)
    checkpoint_layers(module, checkpointing)
    with (
        simulated_world(sharing, _transport_of(table), world_size // sharing) as comm,
        warnings.catch_warnings(),
    ):
        # Code of libraries, which whoever plans cannot change: transformers' experts call such functions.
        warnings.filterwarnings(
            "ignore", message=r"Dynamo detected a call to a `functools\.lru_cache"
        )
        try:
            place = torch.device("cuda" if lowers else "cpu")
            is_gpu = table.device.name != "cpu"
            with attention_of_gpus(place.type) if is_gpu else nullcontext():
                compiled = _compiled(module, inputs, settings, comm, table, place, optimizer, loss)
            return compiled.result(
                table, settings, name or type(module).__name__, _tokens(inputs), began
            )
        except Exception as error:
            if wants_values(error):
                raise PlanError(
                    "forward reads values of tensors (a branch by data, .item(), sizes by data as of nonzero()), and "
                    "tensors of a simulation have none: simulate the branch that most batches take, at its usual size"
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


def _check_parameters(module: nn.Module) -> None:
    real = next((n for n, p in module.named_parameters() if not p.is_meta), None)
    if real is not None:
        raise PlanError(
            f"parameter {real!r} has data: pass a function that makes the model, or make it under "
            'torch.device("meta"); nothing of a simulation needs weights'
        )
    if not any(param.requires_grad for param in module.parameters()):
        raise PlanError(
            f"{type(module).__name__} has no parameter that trains (requires_grad): nothing of it is a training step"
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
) -> Captured:
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
        round_stochastically(module, layout, seed_of_rounding(settings))
        driver = Driver(
            ranks=Agreement(EqualRanks(layout.num_ranks)),
            host=_SimulatedHost(),
            optimizer=made,
            owned_memory=owned_memory(made, of_any_rank=True),
            by_parts=may_step_by_parts(made),
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
    return Captured(step, module, layout, num_params, stepped, update_us)


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
