"""The objects that DeepCompile's passes receive: parameters of a graph, and the runtime.

param_manager[graph_id].params[name]   a parameter, by the name of the input that holds it
nz3.set_persistent(ds_id)              keep a weight gathered between micro-steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn

from torchloom import ops
from torchloom.errors import PassError
from torchloom.graph import args_of, find, viewed
from torchloom.ops.match import gathers
from torchloom.shard import Layout, ParamSpec


class Residency(Protocol):
    """What the runtime does for weights that stay gathered."""

    def invalidate(self, param: str | None = None) -> None:
        """Gather a weight anew at its next use; None means all of them."""
        ...

    def clear(self) -> None:
        """Free all gathered weights; they are gathered again at their next use."""
        ...


@dataclass(frozen=True, slots=True)
class OwnedParam:
    """A parameter of the model with the attributes that DeepSpeed adds to its parameters.

    Other attributes are those of the parameter: `.grad`, `.data`, `.requires_grad`, ...
    """

    parameter: nn.Parameter
    spec: ParamSpec
    ds_id: int
    residents: set[str] = field(repr=False)

    @property
    def ds_persist(self) -> bool:
        """Whether the weight is on every rank between steps: whole, or resident."""
        return self.spec.mode != "sharded" or self.spec.name in self.residents

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the weight."""
        return torch.Size(self.spec.shape)

    @property
    def ds_numel(self) -> int:
        """Elements of the weight."""
        return self.spec.numel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parameter, name)


@dataclass(frozen=True, slots=True)
class GraphParam:
    """One parameter as a captured graph sees it."""

    name: str
    """Name of the graph's input that holds the shard."""
    full_name: str
    """Of the parameter in the model."""
    shape: torch.Size
    """Of the weight."""
    dtype: torch.dtype
    """In which the weight is gathered."""
    device: torch.device
    node: fx.Node
    """The graph's input that holds the shard."""
    allgather_node: fx.Node | None
    """The node whose result is the weight, or its bucket's; None for a whole parameter."""
    release_node: fx.Node | None
    """The last node that reads the weight: after it the weight is freed."""
    param: OwnedParam
    numel: int


class GraphParams:
    """The parameters of one captured graph.

    Args:
        graph: the forward graph.
        names: parameter by graph input.
        layout: the model's.
        owned: the model's parameters by name.
    """

    def __init__(
        self,
        graph: fx.Graph,
        names: Mapping[str, str],
        layout: Layout,
        owned: Mapping[str, OwnedParam],
    ) -> None:
        inputs = enumerate(graph.find_nodes(op="placeholder"))
        held = [(index, node) for index, node in inputs if node.name in names]
        self._index = {node.name: index for index, node in held}
        self._params = {
            node.name: _graph_param(graph, node, layout[names[node.name]], owned)
            for _, node in held
        }

    @property
    def param_names(self) -> list[str]:
        """The inputs that hold parameters, in order."""
        return list(self._params)

    @property
    def params(self) -> dict[str, GraphParam]:
        """The parameters by input."""
        return self._params

    @property
    def ds_ids(self) -> dict[str, int]:
        """The parameters' ids by input; one parameter has one id in all graphs."""
        return {name: each.param.ds_id for name, each in self._params.items()}

    @property
    def indices(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Of each parameter: place among the inputs, id, shape of the weight."""
        return [
            (self._index[name], each.param.ds_id, tuple(each.shape))
            for name, each in self._params.items()
        ]

    def get_bwd_mapping(self, bw_graph: fx.Graph) -> tuple[list[fx.Node], dict[str, fx.Node]]:
        """Return the inputs of a backward graph that hold parameters, and gradients by input name."""
        found = [n for n in bw_graph.find_nodes(op="placeholder") if n.name in self._params]
        results: Any = bw_graph.output_node().args[0]
        grads = {name: results[self._index[name]] for name in self._params}
        return found, {name: grad for name, grad in grads.items() if isinstance(grad, fx.Node)}

    def get_grad_name(self, name: str) -> str:
        """Return a name for the gradient of a parameter.

        Raises:
            PassError: the graph has no such parameter.
        """
        if name not in self._params:
            raise PassError(f"no parameter {name!r}: this graph has {', '.join(self._params)}")
        return f"{name}_grad"


def _graph_param(
    graph: fx.Graph, node: fx.Node, spec: ParamSpec, owned: Mapping[str, OwnedParam]
) -> GraphParam:
    gather, weight = _gather_of(graph, node)
    param = owned[spec.name]
    return GraphParam(
        name=node.name,
        full_name=spec.name,
        shape=torch.Size(spec.shape),
        dtype=spec.compute_dtype,
        device=param.parameter.device,
        node=node,
        allgather_node=gather,
        release_node=None if weight is None else _last_reader(graph, weight),
        param=param,
        numel=spec.numel,
    )


def _gather_of(graph: fx.Graph, shard: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Return the node that gathers a shard, and the one that holds the weight."""
    for transfer in gathers(graph):
        for source, pick in zip(transfer.inputs, transfer.results, strict=True):
            if source is shard:
                return transfer.start, pick
    for op in (ops.gather, ops.resident):
        for node in find(graph, op):
            if args_of(node)[0] is shard:
                return node, node
    return None, None


def _last_reader(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    """Return the last node that reads a weight or a view of it."""
    family = {weight}
    last = weight
    for node in graph.nodes:
        if family & set(node.all_input_nodes):
            last = node
            if viewed(node) in family:
                family.add(node)
    return last


class RuntimeHandle:
    """The methods of DeepCompile's native handle `nz3` that passes need.

    Other methods of DeepSpeed's handle raise an error that names them.
    """

    def __init__(
        self,
        specs: Mapping[int, ParamSpec],
        keep: Callable[[str], None],
        registered: dict[int, tuple[int, ...]],
        residency: Residency | None,
    ) -> None:
        self._specs, self._keep = specs, keep
        self._registered, self._residency = registered, residency

    def set_persistent(self, ds_id: int) -> None:
        """Keep a weight gathered between micro-steps: one gather per optimizer step.

        Graphs that are compiled already are compiled once more at the next optimizer step. The
        passes then run again, on graphs that still gather, and should choose the same.

        Raises:
            PassError: no parameter has this id, or no runtime refreshes resident weights after a step.
        """
        spec = self._spec(ds_id)
        if self._residency is None:
            raise PassError(
                "nz3.set_persistent needs an engine, which knows when weights change: compile with "
                "engine.compile() of torchloom.initialize, or pass optimizer= to torchloom.compile()"
            )
        if spec.mode == "sharded":
            self._keep(spec.name)

    def is_profiling(self) -> bool:
        """Return False: graphs are never run to be profiled."""
        return False

    def invalidate_gathered_param(self, ds_id: int) -> None:
        """Gather a resident weight again at its next use."""
        spec = self._spec(ds_id)
        if self._residency is not None:
            self._residency.invalidate(spec.name)

    def clear_all_gathered_params(self) -> None:
        """Free all resident weights; they are gathered again at their next use."""
        if self._residency is not None:
            self._residency.clear()

    def register_graph_z1(self, graph_id: int, ds_ids: Iterable[int]) -> None:
        """Check that a graph's parameters exist, and record them."""
        self._registered[graph_id] = tuple(ds_ids)
        for ds_id in self._registered[graph_id]:
            self._spec(ds_id)

    register_graph_z2 = register_graph_z1
    register_graph_z3 = register_graph_z1

    def _spec(self, ds_id: int) -> ParamSpec:
        if ds_id not in self._specs:
            raise PassError(
                f"no parameter has id {ds_id!r}: take ids from param_manager[graph_id].ds_ids"
            )
        return self._specs[ds_id]

    def __getattr__(self, name: str) -> Any:
        reason = _REFUSED.get(name)
        if reason is None:
            raise AttributeError(f"nz3 has no method {name!r}")
        raise PassError(f"nz3.{name} is not offered: {reason}")


_STATE = "parameters and gradient buffers belong to the sharded model and to autograd"
_CLOCK = "the engine's forward, backward and step do it"
_REFUSED = {
    "register_param": _STATE,
    "register_z3_param": _STATE,
    "update_param_grad_buffer": _STATE,
    "enable_profiling": "graphs are not run to be profiled; read profiling_results",
    "start_forward": _CLOCK,
    "end_forward": _CLOCK,
    "start_backward": _CLOCK,
    "init": "torchloom.initialize does it",
    "reset": "each compile starts from the captured graph",
    "cleanup": "engine.destroy() does it",
}
