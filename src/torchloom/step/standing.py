"""Add up the device memory of a step outside its graphs: what stays between steps, and what the update needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.errors import PlanError
from torchloom.log import get_logger
from torchloom.memory import StepMemory, WorkspaceTable, distinct_bytes, step_memory
from torchloom.pipeline.registry import offloadable_params
from torchloom.plan import HostStates
from torchloom.shard.leaf_modules import leaf_bytes
from torchloom.step.description import StepDescription
from torchloom.step.interfaces import SHARDS, STATES, Driver

logger = get_logger(__name__)

_UNTRIED_STATES = 2
"""A guess, as Adam keeps: tensors of a parameter's size that an optimizer keeps which cannot be tried without data."""
_COUNTER_BYTES = 4
"""An optimizer's count of steps, for each parameter; where its states are known, it is among them."""
_RESERVE_BYTES = 16 << 10
"""For losses, norms, scales and random states, which are not planned one by one."""
_UNLIMITED_BYTES = 1 << 60


PARAMETERS, BUFFERS, GRADIENTS = "parameters", "buffers", "gradients"
OPTIMIZER_STATES, MASTERS = "optimizer states", "master copies"
Parts = tuple[tuple[str, str, int], ...]
"""(kind, layer, bytes) of what lives on a rank's device between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Device memory of a step outside its graphs, and how much of it may wait on the host.

    Each figure is the largest of any rank, so that all ranks make the same plan.
    """

    budget_bytes: int | None
    """Device memory that the user allows for the whole step; None: no limit."""
    base_bytes: int
    """Memory in use before and after each forward and backward; of `standing_parts` and some more."""
    gradient_bytes: int
    """Gradients that are live in the optimizer's step and not part of the base."""
    update_bytes: int = 0
    """Memory that the optimizer's step allocates for itself."""
    keeps_pool: bool = False
    """Whether graphs hold their memory in the optimizer's step too, as recorded ones do."""
    states: HostStates | None = None
    """What may wait on the host; all of it does where no budget leaves room."""
    parts: Parts = ()
    """What lives on this rank's device between steps."""

    @property
    def beside_graphs_bytes(self) -> int:
        """Memory in use while graphs hold theirs."""
        return self.base_bytes + (self.update_bytes if self.keeps_pool else 0)

    @property
    def step_bytes(self) -> int:
        """Memory that the optimizer's step needs beyond the base."""
        return self.gradient_bytes + self.update_bytes


def standing_of(
    description: StepDescription,
    model: nn.Module,
    driver: Driver,
    workspaces: WorkspaceTable,
    *,
    copy_bytes: int,
) -> Standing:
    """Return the device memory that a sharded model needs outside its graphs. All ranks must call.

    Args:
        description: of the step.
        model: sharded; its parameters hold what the optimizer steps.
        driver: steps it.
        workspaces: what operators allocate for themselves.
        copy_bytes: size of copies of this rank's weights in another dtype, where ranks share them.

    Raises:
        PlanError: see `_step_memory`.
    """
    optimizer, ranks, budget_bytes = driver.optimizer, driver.ranks, description.budget_bytes
    accumulates, always = description.accumulates, description.timetable.names_throughout
    waits = STATES in always
    memory = _step_memory(description, driver, workspaces)
    parts = _parts(
        model,
        optimizer,
        memory,
        accumulates=accumulates,
        waits=waits,
        on_host=offloadable_params(description.layout) if SHARDS in driver.host.names else (),
    )
    own_bytes = _RESERVE_BYTES + copy_bytes + sum(size for _, _, size in parts)
    own_bytes += leaf_bytes(model)  # they run between graphs
    if optimizer is not None and (waits or not (memory or optimizer.state)):
        own_bytes += _COUNTER_BYTES * sum(len(group["params"]) for group in optimizer.param_groups)
    base = ranks.most("bytes that live on", own_bytes)
    gradients, update_bytes = 0 if accumulates else _trained_bytes(model), 0
    if budget_bytes is not None and (not waits or driver.owned_memory):
        peak = 0 if memory is None else memory.peak_bytes
        # The rank that keeps most need not be the one that allocates most.
        update_bytes = ranks.most("bytes in the optimizer's step", own_bytes + peak) - base
    states = None
    if optimizer is not None and (waits or SHARDS in always):
        leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        sizes = [_state_bytes(leaf, memory) for leaf in leaves] if waits else []
        largest_bytes = max(sizes, default=0) if driver.by_parts else sum(sizes)
        shards = description.layout.sharded if SHARDS in always else ()
        shard_bytes = sum(spec.shard_numel * spec.dtype.itemsize for spec in shards)
        step_bytes = _UNLIMITED_BYTES if budget_bytes is None else budget_bytes
        step_bytes -= base + gradients + update_bytes
        states = HostStates(  # its states count although the first step makes them
            total_bytes=ranks.most("bytes of optimizer states", sum(sizes)),
            largest_bytes=ranks.most("bytes of states that are stepped together", largest_bytes),
            num_params=ranks.most("trained elements", sum(leaf.numel() for leaf in leaves)),
            step_bytes=ranks.least("bytes free in the optimizer's step", step_bytes),
            num_slots=description.host_slots,
            shard_bytes=ranks.most("bytes of pieces", shard_bytes),
        )
    return Standing(
        budget_bytes=budget_bytes,
        base_bytes=base,
        gradient_bytes=gradients,
        update_bytes=update_bytes,
        keeps_pool=description.cuda_graphs,
        states=states,
        parts=parts,
    )


def _step_memory(
    description: StepDescription, driver: Driver, workspaces: WorkspaceTable
) -> StepMemory | None:
    """Return what this rank's optimizer allocates in a step and keeps; None if that is not known. All ranks must call.

    Raises:
        PlanError: something is planned, and ranks own parameters, but what they keep of them is not known.
    """
    optimizer, ranks, owned = driver.optimizer, driver.ranks, driver.owned_memory
    if optimizer is None:
        return None
    is_planned = description.budget_bytes is not None or description.pinned is not None
    if (
        not is_planned
    ):  # what it keeps is shown; what operators need for themselves is not worth measuring
        workspaces = WorkspaceTable(measures=False)
    if owned is None:  # without what a framework wraps around
        found = step_memory(getattr(optimizer, "optimizer", optimizer), workspaces)
    else:
        found = owned(workspaces)
        if ranks.most("whether the optimizer's memory is not known", int(found is None)):
            found = None
    if found is None and is_planned:
        text = (
            f"{type(optimizer).__name__}'s step cannot be tried on tensors without data, as it needs their values: "
            "what it allocates is not known"
        )
        if owned is not None:
            raise PlanError(
                f"{text}, nor what ranks keep of whole parameters or fp32 copies. Drop compile.memory_budget and compile.plan, "
                "or use another optimizer"
            )
        logger.info("%s, and no part of the plan", text)
    return found


def _parts(
    model: nn.Module,
    optimizer: Optimizer | None,
    memory: StepMemory | None,
    *,
    accumulates: bool,
    waits: bool,
    on_host: Collection[str],
) -> Parts:
    """Return (kind, layer, bytes) of what lives on this rank's device between steps.

    Each storage counts once, for the first name that it has.

    Args:
        model: its parameters and buffers.
        optimizer: its states; None: there are none.
        memory: of the optimizer, where it has been tried.
        accumulates: whether gradients stay from one micro-step to the next, and count.
        waits: whether optimizer states wait on the host, where they do not count.
        on_host: names of the parameters whose shards wait there.
    """
    sums: defaultdict[tuple[str, str], int] = defaultdict(int)
    layers: dict[int, str] = {}
    for kind, name, tensor in _tensors(model):
        layer = name.rpartition(".")[0]
        key = tensor.untyped_storage()._cdata
        if key in layers:
            continue
        layers[key] = layer
        num_bytes = int(tensor.untyped_storage().nbytes())
        if name not in on_host:
            sums[kind, layer] += num_bytes
        if accumulates and tensor.requires_grad:
            sums[GRADIENTS, layer] += num_bytes
    for kind, layer, num_bytes in _of_optimizer(optimizer, layers, memory, waits=waits):
        sums[kind, layer] += num_bytes
    return tuple((kind, layer, size) for (kind, layer), size in sums.items() if size)


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, param in model.named_parameters():
        yield PARAMETERS, name, param
    for name, buffer in model.named_buffers():
        yield BUFFERS, name, buffer


def _of_optimizer(
    optimizer: Optimizer | None, layers: dict[int, str], memory: StepMemory | None, *, waits: bool
) -> Iterator[tuple[str, str, int]]:
    """Yield what the optimizer keeps, by the layer of the parameter that it steps."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for leaf in group["params"]:
            key = leaf.untyped_storage()._cdata
            layer = layers.get(key, "")
            if key not in layers:  # the optimizer steps a copy of its own
                yield MASTERS, layer, int(leaf.untyped_storage().nbytes())
            if not waits:
                made = distinct_bytes(optimizer.state.get(leaf, {}).values())
                yield OPTIMIZER_STATES, layer, made or _state_bytes(leaf, memory)


def _state_bytes(leaf: Tensor, memory: StepMemory | None) -> int:
    """Return the bytes of the states that the optimizer will keep of a parameter."""
    if memory is None:
        return _UNTRIED_STATES * leaf.numel() * leaf.element_size()
    return memory.state_bytes[id(leaf)]


def _trained_bytes(model: nn.Module) -> int:
    """Return the bytes of a gradient of every trainable parameter, as this rank holds it."""
    return distinct_bytes(param for param in model.parameters() if param.requires_grad)
