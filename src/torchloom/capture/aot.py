"""The route for every backend but Inductor: our partitioner, our boxed runner.

AOTAutograd traces the joint graph; the hooks rewrite it before and after min-cut splits it. The
graphs then run as FX code that drops each value after its last use, or go to another compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from torchloom._torch.aot import BoxedCodeGen, aot_compile, boxed, min_cut_partition
from torchloom.capture.calls import call_boxed, name_calls, split_joint
from torchloom.capture.hooks import GraphKind, WeaveHooks
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
                hooks.phase("layer")
                call_boxed(lowered, run_boxed)
            hooks.phase("rest")
            compiled = run_boxed(lowered) if lower is None else boxed(lower(lowered, inputs))
            hooks.compiled(kind, time.perf_counter() - started, None)
            return compiled

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
