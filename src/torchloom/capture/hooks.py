"""The hooks by which a compiler calls passes, each with a key for the compiler's caches.

Inductor and AOTAutograd look a graph up before they compile it; a hook without a key would make
them bypass their caches. The key is a hash of the source of every pass, of the pass list and of
everything that a pass may know. On a cache hit no hook runs at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from torchloom._torch.custom_pass import CustomGraphPass, CustomPartitionerFn
from torchloom.ops.regions import Body

GraphKind = Literal["joint", "forward", "backward", "inference"]
WeaveFn = Callable[[fx.GraphModule, GraphKind], None]
Boxed = Callable[[list[Any]], Any]
"""Code of a graph: takes one list, which it empties."""
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""A partitioner of AOTAutograd: `(joint, joint_inputs, *, num_fwd_outputs, ...)`."""


Bodies = dict[str, Body]
"""What stands for equal parts of a captured graph, by the names that its calls know."""


class _Keyed:
    """A function of ours with the key under which compilers may cache what it made."""

    def __init__(self, run: Callable[..., Any], key: str | None) -> None:
        self._run, self._key = run, key

    def uuid(self) -> Any:
        """Return the key; equal keys promise equal results, None forbids caches."""
        return self._key

    def __getstate__(self) -> dict[str, Any]:
        # Caches and compile workers may pickle the configuration; the key stands for the function.
        return {"_run": None, "_key": self._key}


class GraphHook(_Keyed, CustomGraphPass):
    """A rewrite of one kind of graph, in the form of Inductor's custom passes."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        self._run(graph.owning_module)


class SplitHook(_Keyed, CustomPartitionerFn):
    """A partitioner, in the form of Inductor's custom partitioners."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph."""
        return self._run(gm, joint_inputs, **kwargs)


@dataclass(frozen=True)
class WeaveHooks:
    """The rewrites of a captured graph before and after the forward/backward split."""

    joint: WeaveFn
    lowered: WeaveFn
    key: str | None
    """Hash of everything that the two may depend on; None where caches must not be used."""
    compiled: Callable[[GraphKind, float, str | None], None] = lambda kind, seconds, source: None
    """Called after a lowered graph is compiled, with its kind, the compiler's seconds and the Python code that the
    compiler wrote, or None."""
    partition: Partition | None = None
    """Splits the joint graph as a plan says; None leaves it to torch's min-cut."""
    backward_at_once: bool = False
    """Whether to compile backward together with forward, so that its failures show then and a plan can be judged by
    the code of both. Otherwise torch compiles each backward graph when it first runs, after all forward graphs of a
    model with graph breaks."""
    bodies: Bodies = field(default_factory=dict)
    halves: Callable[[fx.Graph, fx.Graph], None] = lambda forward, backward: None
    """Called with forward and backward as they were split, before a compiler rewrites them."""
    phase: Callable[[str], None] = lambda name: None
    """Called with what a route begins to do: "trace", "layer" (to lower a body), "rest" (to lower a graph)."""
    wrap: Callable[[GraphKind, fx.GraphModule], Callable[[Boxed], Boxed]] | None = None
    """Called with each lowered graph before it is compiled; returns what makes something else of its code."""


def kind_of(gm: fx.GraphModule) -> GraphKind:
    """Tell a lowered graph's kind from its inputs: only backward graphs take tangents."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    if any(name.startswith("tangents") for name in names):
        return "backward"
    if any(name.startswith("primals") for name in names):
        return "forward"
    return "inference"
