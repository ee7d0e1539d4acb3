"""The Inductor route: an unmodified Inductor, reached through its own hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from torchloom._torch.inductor import inductor_compile
from torchloom.capture.hooks import GraphHook, SplitHook, WeaveHooks, kind_of


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
    patches = {
        # The order of the woven graph is the plan; this pass would move transfers to other places.
        "reorder_for_peak_memory": False,
        **(options or {}),
        "joint_custom_pre_pass": GraphHook(
            lambda joint: hooks.joint(joint, "joint"), _named("joint", hooks.key)
        ),
        "post_grad_custom_post_pass": GraphHook(
            lambda lowered: hooks.lowered(lowered, kind_of(lowered)), _named("lowered", hooks.key)
        ),
    }
    if hooks.partition is not None:
        patches["custom_partitioner_fn"] = SplitHook(hooks.partition, _named("split", hooks.key))
    return inductor_compile(
        gm,
        example_inputs,
        patches,
        hooks.compiled,
        # A plan is judged by the code of both graphs.
        backward_at_once=hooks.backward_at_once or hooks.partition is not None,
    )


def _named(stage: str, key: str | None) -> str | None:
    return None if key is None else f"{stage}-{key}"
