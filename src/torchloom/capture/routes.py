"""Compiles a Dynamo graph, woven by hooks: through an unmodified Inductor, or through AOTAutograd for any other backend.

Inductor is reached through its own hooks. In the other route AOTAutograd traces the joint graph; the hooks rewrite it
before and after min-cut splits it. The graphs then run as FX code that drops each value after its last use, or go to
another compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from torchloom._torch.aot import BoxedCodeGen, aot_compile, boxed, min_cut_partition
from torchloom._torch.inductor import inductor_compile
from torchloom.capture.calls import call_boxed, name_calls, prepare_calls, split_joint
from torchloom.capture.hooks import GraphHook, GraphKind, SplitHook, WeaveHooks, kind_of
from torchloom.ops.regions import known_bodies

Lower = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_with_aot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    hooks: WeaveHooks,
    lower: Lower | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph through AOTAutograd, woven by `hooks`.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs.
        hooks: the rewrites.
        lower: compiles a woven graph, `(gm, example_inputs) -> callable`; None runs it as FX code.
    """

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        hooks.joint(joint, "joint")
        return split_joint(joint, joint_inputs, hooks, min_cut_partition, **kwargs)

    def compiler(kind: GraphKind) -> Callable[..., Any]:
        def compile_graph(lowered: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if kind == "inference":
                hooks.joint(lowered, "inference")
                name_calls(lowered.graph, hooks.bodies)
            started = time.perf_counter()
            with known_bodies(hooks.bodies):
                hooks.lowered(lowered, kind)
                wrap = None if hooks.wrap is None else hooks.wrap(kind, lowered)
                hooks.phase("layer")
                call_boxed(lowered, run_boxed)
            hooks.phase("rest")
            compiled = run_boxed(lowered) if lower is None else boxed(lower(lowered, inputs))
            hooks.compiled(kind, time.perf_counter() - started, None)
            return compiled if wrap is None else wrap(compiled)

        return compile_graph

    with known_bodies(hooks.bodies):
        return aot_compile(
            gm,
            example_inputs,
            forward=compiler("forward"),
            backward=compiler("backward"),
            partition=partition,
            inference=compiler("inference"),
            backward_at_once=hooks.backward_at_once,
        )


def run_boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a function that runs a graph's code and frees each input after its last use.

    It takes one list, which it empties: the caller's references do not keep inputs alive.
    """
    gm.graph.set_codegen(BoxedCodeGen())
    gm.recompile()

    def run(args: list[Any]) -> Any:
        return gm.forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]  how AOTAutograd recognises the convention
    return run


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
    if hooks.partition is not None or hooks.bodies or hooks.backward_at_once:

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
        wrap=hooks.wrap,
    )


def _named(stage: str, key: str | None) -> str | None:
    return None if key is None else f"{stage}-{key}"
