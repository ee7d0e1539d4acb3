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
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""A partitioner of AOTAutograd: `(joint, joint_inputs, *, num_fwd_outputs, ...)`."""


Bodies = dict[str, Body]
"""What stands for equal parts of a captured graph, by the names that its calls know."""


class GraphHook(CustomGraphPass):
    """A rewrite of one kind of graph, in the form of Inductor's custom passes."""

    def __init__(self, weave: Callable[[fx.GraphModule], None], key: str | None) -> None:
        self._weave, self._key = weave, key

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        owner = graph.owning_module
        assert owner is not None, "compilers hand over graphs that belong to a module"
        self._weave(owner)

    def uuid(self) -> Any:
        """Return the key of the rewrite; equal keys promise equal results, None forbids caches."""
        return self._key

    def __getstate__(self) -> dict[str, Any]:
        # Caches and compile workers may pickle the configuration; the key stands for the rewrite.
        return {"_weave": None, "_key": self._key}


class SplitHook(CustomPartitionerFn):
    """A partitioner, in the form of Inductor's custom partitioners."""

    def __init__(self, split: Partition, key: str | None) -> None:
        self._split, self._key = split, key

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph."""
        return self._split(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Return the key of the split; None forbids caches."""
        return self._key

    def __getstate__(self) -> dict[str, Any]:
        return {"_split": None, "_key": self._key}


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
    phase: Callable[[str], None] = lambda name: None
    """Called with what a route begins to do: "trace", "layer" (to lower a body), "rest" (to lower a graph)."""


def kind_of(gm: fx.GraphModule) -> GraphKind:
    """Tell a lowered graph's kind from its inputs: only backward graphs take tangents."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    if any(name.startswith("tangents") for name in names):
        return "backward"
    if any(name.startswith("primals") for name in names):
        return "forward"
    return "inference"
