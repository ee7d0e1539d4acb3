"""The built-in passes: a file for each family, and none imports another.

`PASSES` lists them by name; presets in `torchloom.pipeline.registry` order them. Adding a pass is
one function here, one line below and one line in a preset. Options of a pass are the keyword-only parameters of
its function; a key of the configuration that sets one names it: `used(..., option="free_saved.min_bytes")`.
"""

from __future__ import annotations

from typing import Any

from torchloom.graph.contract import GraphPass, PassFn
from torchloom.passes.bucket import bucket
from torchloom.passes.chunk_loss import chunk_loss
from torchloom.passes.gathers import cast_gathers, dedupe_gathers, elide_copies
from torchloom.passes.offload_activation import free_activation, free_saved, offload_activation
from torchloom.passes.offload_parameters import offload_opt_states, offload_parameters
from torchloom.passes.overlap_copies import overlap_copies
from torchloom.passes.place import place
from torchloom.passes.prefetch import prefetch
from torchloom.passes.whole_weights import selective_gather, symmetric_gathers
from torchloom.passes.zero import recompute, zero1, zero2, zero3

_ZERO, _TRANSFERS = frozenset({"zero"}), frozenset({"transfers"})
_STAGES = frozenset({"zero1", "zero2", "zero3"})


def _captured(fn: PassFn, **needs: Any) -> GraphPass:
    return GraphPass(name=fn.__name__, fn=fn, stage="captured", **needs)


def _joint(fn: PassFn, **needs: Any) -> GraphPass:
    return GraphPass(name=fn.__name__, fn=fn, stage="joint", **needs)


def _lowered(fn: PassFn, **needs: Any) -> GraphPass:
    return GraphPass(name=fn.__name__, fn=fn, stage="lowered", **needs)


PASSES: dict[str, GraphPass] = {
    each.name: each
    for each in (
        _captured(chunk_loss),
        _joint(dedupe_gathers),
        _joint(elide_copies),
        _joint(cast_gathers),
        _joint(zero1, provides=_ZERO, conflicts_with=_STAGES - {"zero1"}),
        _joint(zero2, provides=_ZERO, conflicts_with=_STAGES - {"zero2"}),
        _joint(zero3, provides=_ZERO, conflicts_with=_STAGES - {"zero3"}),
        _joint(offload_parameters, requires=_ZERO),
        _joint(offload_activation),
        _joint(free_activation),
        _joint(recompute),
        _lowered(symmetric_gathers),
        _lowered(place, provides=_TRANSFERS),
        _lowered(selective_gather, requires=_TRANSFERS),
        _lowered(bucket, requires=_TRANSFERS),
        _lowered(prefetch, requires=_TRANSFERS),
        _lowered(overlap_copies, requires=_TRANSFERS),
        _lowered(free_saved),
        _lowered(offload_opt_states),
    )
}

__all__ = ["PASSES"]
