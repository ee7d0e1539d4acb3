"""Memory that stays between steps, by kind and layer, for recorders; `standing` gives the sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom import events
from torchloom.runtime.host import is_on_host
from torchloom.step.standing import Standing, num_states_of

PARAMETERS, BUFFERS, GRADIENTS = "parameters", "buffers", "gradients"
STATES, MASTERS = "optimizer states", "master copies"


def found_standing(
    standing: Standing,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    accumulates: bool,
    waits: bool,
) -> events.StandingFound:
    """Return the event that reports the memory used outside the graphs.

    Args:
        standing: the figures that plans use.
        model: sharded, so that its parameters hold this rank's shards.
        optimizer: over this rank's leaves; its states count although the first step makes them.
        accumulates: whether gradients wait from one micro-step for the next.
        waits: whether optimizer states wait on the host.
    """
    return events.StandingFound(
        budget_bytes=standing.budget_bytes,
        base_bytes=standing.base_bytes,
        step_bytes=standing.step_bytes,
        parts=standing_parts(model, optimizer, accumulates=accumulates, waits=waits),
    )


def standing_parts(
    model: nn.Module, optimizer: Optimizer | None, *, accumulates: bool, waits: bool
) -> tuple[tuple[str, str, int], ...]:
    """Return (kind, layer, bytes) of what lives on this rank's device between steps.

    Each storage counts once, for the first name that it has.

    Args:
        model: its parameters and buffers.
        optimizer: its states; None: there are none.
        accumulates: whether gradients stay from one micro-step to the next, and count.
        waits: whether optimizer states wait on the host, where they do not count.
    """
    sums: defaultdict[tuple[str, str], int] = defaultdict(int)
    layers: dict[int, str] = {}
    for kind, layer, tensor in _tensors(model):
        key = tensor.untyped_storage()._cdata
        if key in layers or is_on_host(tensor):
            continue
        layers[key] = layer
        num_bytes = int(tensor.untyped_storage().nbytes())
        sums[kind, layer] += num_bytes
        if accumulates and tensor.requires_grad:
            sums[GRADIENTS, layer] += num_bytes
    for kind, layer, num_bytes in _of_optimizer(optimizer, layers, waits=waits):
        sums[kind, layer] += num_bytes
    return tuple((kind, layer, size) for (kind, layer), size in sums.items() if size)


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, param in model.named_parameters():
        yield PARAMETERS, _layer_of(name), param
    for name, buffer in model.named_buffers():
        yield BUFFERS, _layer_of(name), buffer


def _of_optimizer(
    optimizer: Optimizer | None, layers: dict[int, str], *, waits: bool
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
            if waits:
                continue
            made = [
                each for each in optimizer.state.get(leaf, {}).values() if isinstance(each, Tensor)
            ]
            size = sum(each.untyped_storage().nbytes() for each in made)
            yield STATES, layer, int(size) or num_states * leaf.numel() * leaf.element_size()


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]
