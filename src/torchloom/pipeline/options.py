"""Options of the passes that run: those that follow from model and backend, and the value of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchloom.costs import Network
from torchloom.graph import GraphPass
from torchloom.passes import PASSES
from torchloom.plan.transfer_sizes import default_sizes
from torchloom.shard import Layout

PassOptions = dict[str, dict[str, object]]
"""Options by the name of the pass."""

_BOXED = ("inductor", "aot_eager", "eager")
"""Routes whose code takes its inputs in a list that it empties."""


def derived_options(
    layout: Layout | None, backend: str | Callable[..., Any], network: Network
) -> PassOptions:
    """Return the options that no setting gives.

    Args:
        layout: how the model is sharded; None for graphs of a model that is not.
        backend: what the woven graphs are compiled with.
        network: what carries the collectives.
    """
    found: PassOptions = {"free_saved": {"keeps_inputs": backend not in _BOXED}}
    if layout is not None:
        found |= default_sizes(layout, network)
        found["zero1"] = {"params": _names(spec.name for spec in layout if spec.is_sliced)}
        found["offload_parameters"] = {"params": offloadable_params(layout)}
    return found


def offloadable_params(layout: Layout) -> tuple[str, ...]:
    """Return the names of the parameters whose shards can wait on the host: all that are sharded."""
    return _names(spec.name for spec in layout.sharded)


def joined_options(*parts: Mapping[str, Mapping[str, object]]) -> PassOptions:
    """Return all options; where two parts name the same one, the later part wins."""
    found: PassOptions = {}
    for part in parts:
        for name, options in part.items():
            found[name] = {**found.get(name, {}), **options}
    return found


def option_of(passes: Mapping[str, GraphPass], name: str, option: str) -> Any:
    """Return the value of a pass's option; the default if the pass does not run.

    Args:
        passes: those that run, by name.
        name: of the pass.
        option: its keyword.
    """
    return passes.get(name, PASSES[name]).option(option)


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
