"""The built-in passes: one file per rewrite, and none imports another.

`PASSES` lists them by name; presets in `torchloom.pipeline.presets` order them. Adding a pass is
one file here, one line below and one line in a preset. Options of a pass are the keyword-only parameters of
its function; a key of the configuration that sets one names it: `used(..., option="free_saved.min_bytes")`.
"""

from __future__ import annotations

from torchloom.graph.contract import GraphPass
from torchloom.passes.bucket import bucket
from torchloom.passes.cast_gathers import cast_gathers
from torchloom.passes.dedupe_gathers import dedupe_gathers
from torchloom.passes.elide_copies import elide_copies
from torchloom.passes.free_activation import free_activation, free_saved
from torchloom.passes.offload_activation import offload_activation
from torchloom.passes.offload_opt_states import offload_opt_states
from torchloom.passes.offload_parameters import offload_parameters
from torchloom.passes.overlap_copies import overlap_copies
from torchloom.passes.place import place
from torchloom.passes.prefetch import prefetch
from torchloom.passes.recompute import recompute
from torchloom.passes.selective_gather import selective_gather
from torchloom.passes.symmetric_gathers import symmetric_gathers
from torchloom.passes.zero1 import zero1
from torchloom.passes.zero2 import zero2
from torchloom.passes.zero3 import zero3

PASSES: dict[str, GraphPass] = {
    each.name: each
    for each in (
        GraphPass(name="dedupe_gathers", fn=dedupe_gathers, stage="joint"),
        GraphPass(name="elide_copies", fn=elide_copies, stage="joint"),
        GraphPass(name="cast_gathers", fn=cast_gathers, stage="joint"),
        GraphPass(
            name="zero1",
            fn=zero1,
            stage="joint",
            provides=frozenset({"zero"}),
            conflicts_with=frozenset({"zero2", "zero3"}),
        ),
        GraphPass(
            name="zero2",
            fn=zero2,
            stage="joint",
            provides=frozenset({"zero"}),
            conflicts_with=frozenset({"zero1", "zero3"}),
        ),
        GraphPass(
            name="zero3",
            fn=zero3,
            stage="joint",
            provides=frozenset({"zero"}),
            conflicts_with=frozenset({"zero1", "zero2"}),
        ),
        GraphPass(
            name="offload_parameters",
            fn=offload_parameters,
            stage="joint",
            requires=frozenset({"zero"}),
        ),
        GraphPass(name="offload_activation", fn=offload_activation, stage="joint"),
        GraphPass(name="free_activation", fn=free_activation, stage="joint"),
        GraphPass(name="recompute", fn=recompute, stage="joint"),
        GraphPass(name="symmetric_gathers", fn=symmetric_gathers, stage="lowered"),
        GraphPass(name="place", fn=place, stage="lowered", provides=frozenset({"transfers"})),
        GraphPass(
            name="selective_gather",
            fn=selective_gather,
            stage="lowered",
            requires=frozenset({"transfers"}),
        ),
        GraphPass(name="bucket", fn=bucket, stage="lowered", requires=frozenset({"transfers"})),
        GraphPass(name="prefetch", fn=prefetch, stage="lowered", requires=frozenset({"transfers"})),
        GraphPass(
            name="overlap_copies",
            fn=overlap_copies,
            stage="lowered",
            requires=frozenset({"transfers"}),
        ),
        GraphPass(name="free_saved", fn=free_saved, stage="lowered"),
        GraphPass(name="offload_opt_states", fn=offload_opt_states, stage="lowered"),
    )
}

__all__ = ["PASSES"]
