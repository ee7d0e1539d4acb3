"""The backend "torchloom" of `torch.compile`: the pass pipeline over any lowering.

    torch.compile(model, backend="torchloom", options={"lowering": "aot_eager", "passes": [...]})

A graph of a model that `torchloom.shard_model` sharded names its parameters; their layout tells the
stage, and with it the preset. Over any other graph only the passes in `options` run.
With `engine.compile()` and `torchloom.compile()` the ranks also compare what they weave.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from torchloom import ops
from torchloom.config.compiling import SIZES
from torchloom.costs import NETWORKS
from torchloom.errors import BackendError
from torchloom.graph import PassContext, find
from torchloom.pipeline.registry import PassOptions, derived_options, joined_options
from torchloom.pipeline.schedule import resolve_passes
from torchloom.pipeline.session import CompileSession
from torchloom.shard import Layout, living_layouts

_OPTIONS = (
    "lowering",
    "passes",
    "disable_passes",
    "inductor",
    "strict",
    "dump_graphs",
    *SIZES,
)


def weave(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one captured graph with torchloom's passes.

    Args:
        gm: the captured graph.
        example_inputs: its inputs, fake or real.
        mode: not taken; give Inductor's settings as `options={"inductor": {...}}`.
        options: `lowering` (a registered backend's name or a callable, default "inductor"),
            `passes` and `disable_passes` (names or `GraphPass` objects), `inductor` (its settings), `strict` (raise when a pass fails instead of running eagerly), `dump_graphs` (a folder),
            and `gather_bucket_bytes`, `reduce_bucket_bytes`, `prefetch_bytes`.

    Raises:
        BackendError: an option is unknown, or the graph mixes models of several layouts.
        PassOrderError: the passes are unknown, contradict each other, or lack what they need.
    """
    if mode not in (None, "default"):
        raise BackendError(
            f"backend 'torchloom' takes no mode (got {mode!r}): give Inductor's settings as "
            'options={"inductor": {...}}'
        )
    given = dict(options or {})
    _check_options(given)
    layout = _layout_of_graph(gm)
    context = PassContext(world_size=1)
    if layout is not None:
        context = PassContext(world_size=layout.world_size, handle=layout.handle)
    asked = given.get("passes", None if layout else ())
    folder = given.get("dump_graphs")
    session = CompileSession(
        passes=resolve_passes(
            layout.stage if layout else 0,
            asked,
            given.get("disable_passes", ()),
            options=_pass_options(given, layout, example_inputs),
        ),
        context=context,
        backend=given.get("lowering", "inductor"),
        options=dict(given.get("inductor", {})),
        strict=bool(given.get("strict", False)),
        regather=layout is not None and layout.stage == 3,
        dump_dir=None if folder is None else Path(folder),
    )
    return session(gm, example_inputs)


def _check_options(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in _OPTIONS:
            close = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(_OPTIONS)}."
            raise BackendError(
                f"backend 'torchloom' has no option {name!r}: {hint} Settings of Inductor go into "
                'options={"inductor": {...}}'
            )


def _pass_options(
    given: Mapping[str, Any], layout: Layout | None, example_inputs: Sequence[Any]
) -> PassOptions:
    on_cuda = any(getattr(each, "is_cuda", False) for each in example_inputs)
    network = NETWORKS["nvlink" if on_cuda else "gloo"]
    sizes = [{name: {option: given[key]}} for key, (name, option) in SIZES.items() if key in given]
    derived = derived_options(layout, given.get("lowering", "inductor"), network)
    return joined_options(derived, *sizes)


def _layout_of_graph(gm: fx.GraphModule) -> Layout | None:
    """Return the layout of the model that a graph belongs to, None if no model of ours."""
    named = {
        (str(node.args[-2]), str(node.args[-1]))
        for op in (ops.gather, ops.replicate)
        for node in find(gm.graph, op)
    }
    if not named:
        return None
    handles = sorted({handle for handle, _ in named})
    params = {param for _, param in named}
    found = [
        layout
        for layout in living_layouts()
        if layout.handle in handles and params <= {spec.name for spec in layout}
    ]
    stages = sorted({layout.stage for layout in found})
    if len(handles) != 1 or len(stages) != 1:
        raise BackendError(
            f"a graph uses parameters of sharded models over {handles} at stages {stages}: backend "
            "'torchloom' needs one model per graph; use engine.compile() or torchloom.compile()"
        )
    return found[0]
