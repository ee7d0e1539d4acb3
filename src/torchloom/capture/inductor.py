"""The Inductor route: an unmodified Inductor, reached through its own hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from torchloom._torch.aot import min_cut_partition
from torchloom._torch.inductor import inductor_compile
from torchloom.capture.calls import name_calls, prepare_calls, split_joint
from torchloom.capture.hooks import GraphHook, SplitHook, WeaveHooks, kind_of
from torchloom.ops.regions import known_bodies


def compile_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    hooks: WeaveHooks,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, woven by `hooks`.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs.
        hooks: the rewrites and their key.
        options: more Inductor settings, which win over ours except for the hooks.
    """

    def joint(graph: fx.GraphModule) -> None:
        hooks.joint(graph, "joint")
        if kind_of(graph) == "inference":  # which no partitioner sees
            name_calls(graph.graph, hooks.bodies)

    def lowered(graph: fx.GraphModule) -> None:
        hooks.phase("rest")
        hooks.lowered(graph, kind_of(graph))
        prepare_calls(graph, hooks.phase)

    patches = {
        # The order of the woven graph is the plan; this pass would move transfers to other places.
        "reorder_for_peak_memory": False,
        **(options or {}),
        "joint_custom_pre_pass": GraphHook(joint, _named("joint", hooks.key)),
        "post_grad_custom_post_pass": GraphHook(lowered, _named("lowered", hooks.key)),
    }
    if hooks.partition is not None or hooks.bodies:

        def split(graph: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
            return split_joint(graph, inputs, hooks, min_cut_partition, **settings)

        patches["custom_partitioner_fn"] = SplitHook(split, _named("split", hooks.key))
    return inductor_compile(
        gm,
        example_inputs,
        patches,
        hooks.compiled,
        backward_at_once=hooks.backward_at_once,
        around=lambda: known_bodies(hooks.bodies),
    )


def _named(stage: str, key: str | None) -> str | None:
    return None if key is None else f"{stage}-{key}"
