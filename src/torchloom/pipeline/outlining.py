"""Let equal parts of a captured graph become calls of one body, where the session and its passes allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchloom._torch.aot import min_cut_partition
from torchloom._torch.bodies import AmbientAutocast, TracedPart
from torchloom._torch.inductor import inductor_config
from torchloom.capture import partition_by_tags
from torchloom.errors import RegionError
from torchloom.graph import Choices, PassContext
from torchloom.passes import PASSES
from torchloom.pipeline.keys import is_built_in
from torchloom.pipeline.planning import OFFLOAD
from torchloom.pipeline.setup import CompileSetup
from torchloom.regions import Outlined, RegionBody, SplitBody, outline

_COMPILERS = ("aot_eager", "inductor")
"""Backends whose route compiles bodies."""


def outline_graph(setup: CompileSetup, gm: fx.GraphModule, inputs: Sequence[Any]) -> Outlined:
    """Return a captured graph with calls in the place of its equal parts, or as it is.

    Args:
        setup: the session.
        gm: the graph; not changed.
        inputs: one value for each of its inputs.
    """
    reason = _reason(setup)
    if reason is not None:
        return Outlined(gm, reasons=(reason,))
    for_inductor = setup.backend == "inductor"
    regathers = any(each.name == "zero3" for each in setup.passes)
    casts = any(each.name == "cast_gathers" for each in setup.passes)
    devices = sorted({each.device.type for each in inputs if isinstance(each, Tensor)})
    ambient = AmbientAutocast.now(devices)

    def body(
        name: str,
        captured: fx.GraphModule,
        operands: Sequence[Tensor],
        sizes: Sequence[Any],
        weights: frozenset[int],
    ) -> RegionBody:
        return RegionBody(
            name,
            captured,
            operands,
            sizes,
            weights,
            regathers,
            casts,
            for_inductor,
            _split_of(setup),
            ambient,
        )

    key = f"{setup.backend} {regathers} {casts} {ambient} {torch.is_grad_enabled()} {setup.planner is not None}"
    try:
        return outline(gm, key, body)
    except RegionError as error:
        return Outlined(gm, reasons=(str(error),))


def _reason(setup: CompileSetup) -> str | None:
    """Return why a session does not outline, None if it does."""
    whole = [each.name for each in setup.passes if not (is_built_in(each) or each.sees_regions)]
    options = (
        setup.options if setup.backend != "inductor" else {**inductor_config(), **setup.options}
    )
    reasons = {
        "compile.regions is false": not setup.regions,
        "this backend is given whole graphs": setup.backend not in _COMPILERS,
        "Inductor's wrapper in C++ cannot call bodies": bool(options.get("cpp_wrapper")),
        f"pass {''.join(whole[:1])!r} sees whole graphs": bool(whole),
        "a plan may move activations to the host": setup.planner is not None
        and any(each.name == OFFLOAD for each in setup.passes),
    }
    return next((text for text, holds in reasons.items() if holds), None)


def _split_of(setup: CompileSetup) -> SplitBody:
    """Return what splits bodies: the plan of the whole graph, or torch's min-cut."""
    if setup.planner is not None:
        return _split_by_plan
    more = {"compiler": "inductor"} if setup.backend == "inductor" else {}

    def split(joint: fx.GraphModule, traced: TracedPart, names: frozenset[str]) -> Any:
        settings = {**traced.settings, **more}
        return min_cut_partition(joint, (), num_fwd_outputs=traced.num_results, **settings)

    return split


def _split_by_plan(joint: fx.GraphModule, traced: TracedPart, names: frozenset[str]) -> Any:
    context = PassContext(world_size=1, choices=Choices(recompute=names))
    PASSES["recompute"].fn(joint, context)
    return partition_by_tags(joint, (), num_fwd_outputs=traced.num_results)
