"""Add up the device memory of a step outside its graphs: what stays between steps, and what the update needs."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.errors import PlanError
from torchloom.exchange import Agreement
from torchloom.log import get_logger
from torchloom.memory import StepMemory, WorkspaceTable, distinct_bytes, step_memory
from torchloom.plan import HostStates
from torchloom.shard.leaf_modules import leaf_bytes
from torchloom.step.interfaces import OwnedMemory

logger = get_logger(__name__)

_NUM_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "RMSprop": 1, "Lion": 1}
"""Number of tensors of a parameter's size that an optimizer will keep, by its class."""
_COUNTER_BYTES = 4
"""An optimizer's count of steps, for each parameter; where its states are known, it is among them."""
_RESERVE_BYTES = 16 << 10
"""For losses, norms, scales and random states, which are not planned one by one."""
_UNLIMITED_BYTES = 1 << 60


PARAMETERS, BUFFERS, GRADIENTS = "parameters", "buffers", "gradients"
STATES, MASTERS = "optimizer states", "master copies"
Parts = tuple[tuple[str, str, int], ...]
"""(kind, layer, bytes) of what lives on a rank's device between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MayWait:
    """What the config allows to wait on the host while the device does not need it."""

    states: bool
    """Optimizer states, streamed through the step."""
    shard_bytes: int | None
    """Size of this rank's shards that may wait, in bytes; None if none may."""
    num_slots: int
    """Chunks of states that may be on the device at a time."""


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

    @property
    def beside_graphs_bytes(self) -> int:
        """Memory in use while graphs hold theirs."""
        return self.base_bytes + (self.update_bytes if self.keeps_pool else 0)

    @property
    def step_bytes(self) -> int:
        """Memory that the optimizer's step needs beyond the base."""
        return self.gradient_bytes + self.update_bytes


def standing_of(  # noqa: PLR0913  facts of one step, from one caller
    model: nn.Module,
    optimizer: Optimizer | None,
    ranks: Agreement,
    *,
    parts: Parts,
    budget_bytes: int | None,
    accumulates: bool,
    may_wait: MayWait,
    copy_bytes: int = 0,
    memory: StepMemory | None = None,
    counts_update: bool = False,
    by_parts: bool = True,
    keeps_pool: bool = False,
) -> Standing:
    """Return the device memory that a sharded model needs outside its graphs. All ranks must call.

    Args:
        model: sharded, so that its parameters hold this rank's shards.
        optimizer: over this rank's leaves.
        ranks: all of them.
        parts: what `standing_parts` found.
        budget_bytes: device memory that the user allows for the whole step.
        accumulates: whether gradients wait from one micro-step for the next.
        may_wait: what may wait on the host, by the config.
        copy_bytes: size of copies of this rank's weights in another dtype, where ranks share them.
        memory: of the optimizer, where it has been tried.
        counts_update: whether what the step allocates counts also where states wait on the host.
        by_parts: see `Driver`.
        keeps_pool: see `Standing`.
    """
    own_bytes = _RESERVE_BYTES + copy_bytes + sum(size for _, _, size in parts)
    own_bytes += leaf_bytes(model)  # they run between graphs
    if optimizer is not None and (may_wait.states or not (memory or optimizer.state)):
        own_bytes += _COUNTER_BYTES * sum(len(group["params"]) for group in optimizer.param_groups)
    base = ranks.most("bytes that live on", own_bytes)
    gradients, update_bytes = 0 if accumulates else _trained_bytes(model), 0
    if budget_bytes is not None and (not may_wait.states or counts_update):
        peak = 0 if memory is None else memory.peak_bytes
        # The rank that keeps most need not be the one that allocates most.
        update_bytes = ranks.most("bytes in the optimizer's step", own_bytes + peak) - base
    states = None
    if optimizer is not None and (may_wait.states or may_wait.shard_bytes is not None):
        states = _host_states(
            optimizer,
            ranks,
            step_bytes=(_UNLIMITED_BYTES if budget_bytes is None else budget_bytes)
            - base
            - gradients
            - update_bytes,
            may_wait=may_wait,
            memory=memory,
            by_parts=by_parts,
        )
    return Standing(
        budget_bytes=budget_bytes,
        base_bytes=base,
        gradient_bytes=gradients,
        update_bytes=update_bytes,
        keeps_pool=keeps_pool,
        states=states,
    )


def step_memory_of(
    optimizer: Optimizer | None,
    ranks: Agreement,
    owned_memory: OwnedMemory | None,
    workspaces: WorkspaceTable,
    *,
    update: Callable[[Optimizer], None] | None = None,
    is_planned: bool,
) -> StepMemory | None:
    """Return what this rank's optimizer allocates in a step; None if that is not known. All ranks must call.

    Args:
        optimizer: over this rank's leaves.
        ranks: all of them.
        owned_memory: see `Driver`.
        workspaces: what operators allocate for themselves.
        update: see `Driver`.
        is_planned: whether there is a budget or a plan.

    Raises:
        PlanError: there is, and ranks own parameters, but what they keep of them is not known.
    """
    if optimizer is None or not (is_planned or owned_memory):
        return None
    if owned_memory is None:
        by = {} if update is None else {"step_of": lambda twin: functools.partial(update, twin[0])}
        found = step_memory(optimizer, workspaces, **by)
    else:
        found = owned_memory(workspaces)
        if ranks.most("whether the optimizer's memory is not known", int(found is None)):
            found = None
    if found is None:
        text = (
            f"{type(optimizer).__name__}'s step cannot be tried on tensors without data, as it needs their values: "
            "what it allocates is not known"
        )
        if owned_memory is not None and is_planned:
            raise PlanError(
                f"{text}, nor what it keeps of the whole parameters that ranks own. Drop compile.memory_budget and compile.plan, "
                "or use another optimizer"
            )
        logger.info("%s, and no part of the plan", text)
    return found


def standing_parts(
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    accumulates: bool,
    waits: bool,
    memory: StepMemory | None = None,
    on_host: Collection[str] = (),
) -> Parts:
    """Return (kind, layer, bytes) of what lives on this rank's device between steps.

    Each storage counts once, for the first name that it has.

    Args:
        model: its parameters and buffers.
        optimizer: its states; None: there are none.
        accumulates: whether gradients stay from one micro-step to the next, and count.
        waits: whether optimizer states wait on the host, where they do not count.
        memory: of the optimizer, where it has been tried.
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
    num_states = num_states_of(optimizer)
    for group in optimizer.param_groups:
        for leaf in group["params"]:
            key = leaf.untyped_storage()._cdata
            layer = layers.get(key, "")
            if key not in layers:  # the optimizer steps a copy of its own
                yield MASTERS, layer, int(leaf.untyped_storage().nbytes())
            if not waits:
                made = distinct_bytes(optimizer.state.get(leaf, {}).values())
                like_it = num_states * leaf.numel() * leaf.element_size()
                tried = like_it if memory is None else memory.state_bytes[id(leaf)]
                yield STATES, layer, made or tried


def _host_states(
    optimizer: Optimizer,
    ranks: Agreement,
    *,
    step_bytes: int,
    may_wait: MayWait,
    memory: StepMemory | None,
    by_parts: bool,
) -> HostStates:
    """Return what may wait on the host and then streams through the step. All ranks must call.

    Args:
        optimizer: over this rank's leaves; its states count although the first step makes them.
        ranks: all of them, which plan alike.
        step_bytes: device memory that is free in a step which keeps no states.
        may_wait: states, shards of parameters, or both.
        memory: of the optimizer, where it has been tried.
        by_parts: see `Driver`.
    """
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
    num_states = num_states_of(optimizer)
    sizes = [
        num_states * leaf.numel() * leaf.element_size()
        if memory is None
        else memory.state_bytes[id(leaf)]
        for leaf in leaves
        if may_wait.states
    ]
    largest_bytes = max(sizes, default=0) if by_parts else sum(sizes)
    return HostStates(
        total_bytes=ranks.most("bytes of optimizer states", sum(sizes)),
        largest_bytes=ranks.most("bytes of states that are stepped together", largest_bytes),
        num_params=ranks.most("trained elements", sum(leaf.numel() for leaf in leaves)),
        step_bytes=ranks.least("bytes free in the optimizer's step", step_bytes),
        num_slots=may_wait.num_slots,
        shard_bytes=ranks.most("bytes of pieces", may_wait.shard_bytes or 0),
    )


def _trained_bytes(model: nn.Module) -> int:
    """Return the bytes of a gradient of every trainable parameter, as this rank holds it."""
    return distinct_bytes(param for param in model.parameters() if param.requires_grad)


def num_states_of(optimizer: Optimizer) -> int:
    """Return how many tensors of a parameter's size an optimizer keeps, before it has made them."""
    name = type(optimizer).__name__
    if name == "SGD":
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    return _NUM_STATES.get(name, 2)
