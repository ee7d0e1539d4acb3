"""Call AOTAutograd with compilers of our own, torch's partitioner whole or in parts, and graph modules that run boxed or lazily."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen

_DYNAMO_ATTRS = ("compile_subgraph_reason", "_param_name_to_source", "_backend_id")
"""Attributes that Dynamo sets on a graph module for its compilers (2.11-2.15)."""
_SOURCE = "_dynamo_source"


def aot_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    partition: Callable[..., Any],
    inference: Callable[..., Any],
    backward_at_once: bool = False,
) -> Callable[..., Any]:
    """Run AOTAutograd over a Dynamo graph with compilers and a partitioner of our own.

    Args:
        gm: the graph.
        example_inputs: fake tensors and sizes, one for each placeholder.
        forward: compiles the forward graph.
        backward: compiles the backward graph.
        partition: splits the joint graph into these two.
        inference: compiles the graph of a call without gradients.
        backward_at_once: let a failure of the backward graph be that of the whole. With sizes that vary, torch
            otherwise tries that graph again at its first run.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=partition,
        inference_compiler=inference,
        keep_inference_input_mutations=True,  # as torch's own backends do: `param.data = ...` in forward needs it
    )
    eager = {"force_non_lazy_backward_lowering": True} if backward_at_once else {}
    with functorch_config.patch(eager):
        return backend(gm, list(example_inputs))


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with the calling convention of compiled graphs: one list."""
    from torch._functorch.aot_autograd import make_boxed_func

    return fn if getattr(fn, "_boxed_call", False) else make_boxed_func(fn)


BoxedCodeGen = _BoxedCodeGen
"""Code generation for functions that take one list and empty it."""


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a module with its own graph, over the same parameters, buffers and metadata.

    Its Python code is generated when it is first called: compilers read the graph alone, and recompile it again and again.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        new.meta = dict(old.meta)
        if hasattr(old, _SOURCE):  # AOTAutograd asks inputs where they come from
            setattr(new, _SOURCE, getattr(old, _SOURCE))
    twin = _LazyGraphModule(gm, graph)
    twin.meta = dict(gm.meta)
    for name in _DYNAMO_ATTRS:
        if hasattr(gm, name):
            setattr(twin, name, getattr(gm, name))
    return twin


def sketching() -> AbstractContextManager[Any]:
    """Return a block in which torch's partitioners return graph modules that make their code when they are called first."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


def prepare_joint(joint: fx.GraphModule, *, is_clean: bool = False) -> fx.GraphModule:
    """Remove dead and repeated nodes; tag what must be saved whatever anybody wants.

    Args:
        joint: the joint graph, which is edited.
        is_clean: whether such nodes were removed before, so that only tags are looked at.
    """
    from torch._functorch import config
    from torch._functorch import partitioners as torch_partitioners
    from torch._functorch.compile_utils import fx_graph_cse

    if not is_clean:
        joint.graph.eliminate_dead_code()
        joint.recompile()
        if config.cse:
            joint.graph = fx_graph_cse(joint.graph)
    if torch_partitioners.has_recomputable_ops(joint):
        joint = torch_partitioners.cleanup_recompute_tags(joint, is_default_partition=False)
    for name in (
        "force_save_collectives",
        "force_save_effectful_ops",
        "force_save_bw_mutation_src",
    ):
        check = getattr(torch_partitioners, name, None)
        if check is not None:
            check(joint)
    return joint


def split_joint(
    joint: fx.GraphModule,
    saved: Sequence[fx.Node],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int],
    redraws: bool,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward, given the values that cross.

    Args:
        joint: from `prepare_joint`.
        saved: nodes whose values forward hands to backward; numbers of symbolic shapes among them.
        num_fwd_outputs: results of the forward graph, without saved values.
        static_lifetime_input_indices: inputs that live on, as AOTAutograd knows them.
        redraws: whether random operators run again in backward and must draw the same numbers.
    """
    from torch._functorch import partitioners as torch_partitioners
    from torch.fx.experimental.proxy_tensor import is_sym_node

    info = torch_partitioners.classify_nodes(
        joint, list(static_lifetime_input_indices), num_fwd_outputs
    )
    symbols = [node for node in saved if is_sym_node(node)]
    forward, backward = torch_partitioners._extract_fwd_bwd_modules(
        joint,
        [node for node in saved if not is_sym_node(node)],
        saved_sym_nodes=symbols,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=info.static_lifetime_input_nodes,
    )
    if redraws:
        with _fake_mode_of(joint):
            forward, backward = torch_partitioners.functionalize_rng_ops(
                joint, forward, backward, len(symbols)
            )
        _record_drawn(joint, forward.graph, backward.graph)
    backward = torch_partitioners.reordering_to_mimic_autograd_engine(backward)
    forward = torch_partitioners.raise_getitems(forward)
    backward = torch_partitioners.raise_getitems(backward)
    thread = getattr(torch_partitioners, "thread_graphsafe_rng_from_hops", None)
    if thread is not None:
        forward, backward = thread(forward, is_backward=False), thread(backward, is_backward=True)
    return forward, backward


def _record_drawn(joint: fx.GraphModule, *graphs: fx.Graph) -> None:
    """Record the values of calls that draw random numbers twice, which torch leaves without.

    Their results take memory from the call on, not from where they are picked.
    """
    from torch._prims import rng_prims
    from torch.utils._python_dispatch import _disable_current_modes

    targets = (
        rng_prims.run_and_save_rng_state,
        rng_prims.run_with_rng_state,
        rng_prims.graphsafe_run_with_rng_state,
    )
    with _disable_current_modes(), _fake_mode_of(joint):  # bodies are split within a trace
        for graph, target in itertools.product(graphs, targets):
            for node in graph.find_nodes(op="call_function", target=target):
                if all("val" in each.meta for each in node.all_input_nodes):
                    call = node.args, node.kwargs
                    args, kwargs = fx.node.map_arg(call, lambda each: each.meta["val"])
                    node.meta["val"] = target(*args, **kwargs)


def _fake_mode_of(joint: fx.GraphModule) -> AbstractContextManager[Any]:
    """Return the mode in which a graph was traced: plans are also made when no trace is running."""
    from torch._guards import detect_fake_mode

    values = [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]
    return detect_fake_mode() or detect_fake_mode(values) or nullcontext()


def is_symbol(node: fx.Node) -> bool:
    """Say whether a node's value is a symbolic number."""
    from torch.fx.experimental.proxy_tensor import is_sym_node

    return bool(is_sym_node(node))


def min_cut_partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
    """Split a joint graph by min-cut, obeying the recompute tags of its nodes."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
    _record_drawn(joint, forward.graph, backward.graph)
    return forward, backward


def trial_partition(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[fx.Graph, fx.Graph]:
    """Return the graphs that min-cut would make of a joint graph, which stays as it is.

    Nodes keep their names: in the trial common subexpressions are not merged, and random operators
    that backward runs again are not wrapped.
    """
    from unittest import mock

    from torch._functorch import config, partitioners

    copy = fx.Graph()
    copy.output(copy.graph_copy(joint.graph, {}))
    copy.output_node().meta.update(joint.graph.output_node().meta)
    as_they_are = mock.patch.object(
        partitioners, "functionalize_rng_ops", lambda joint, fw, bw, num_syms: (fw, bw)
    )
    with config.patch(cse=False), as_they_are:  # type: ignore[attr-defined]
        forward, backward = partitioners.min_cut_rematerialization_partition(
            fx.GraphModule(joint, copy), (), num_fwd_outputs=num_fwd_outputs
        )
    return forward.graph, backward.graph


MUST_BE_IN_BACKWARD = {"partitioner_tag": "must_be_in_backward"}
"""Meta of a node that min-cut leaves to the backward graph, with all that reads it."""
