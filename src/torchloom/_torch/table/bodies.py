"""Names that compile equal layers as one body."""

from __future__ import annotations

from torchloom._torch.table.records import PrivateName, each

_FLAT = "layers are compiled one by one: `compile.regions` has no effect"
_WITH_INDUCTOR = "with Inductor, graphs whose layers repeat fail: set `compile.regions` to false"

BODIES = (
    PrivateName(
        name="torch._C._AutoDispatchBelowAutograd",
        used_for="call a body behind autograd, which has its derivative",
        without=_FLAT,
    ),
    *each(
        "torch.amp.autocast_mode",
        "_enter_autocast _exit_autocast",
        "see where a captured graph enters and leaves autocast",
        _FLAT,
    ),
    PrivateName(
        name="torch._ops.HigherOrderOperator",
        used_for="tell torch's own functions of graphs from those of users",
        without=_FLAT,
    ),
    *each(
        "torch._C",
        "_log_api_usage_once _set_grad_enabled",
        "know what statements of a captured graph do",
        _FLAT,
    ),
    PrivateName(
        name="torch._functorch.partitioners.default_partition",
        used_for="let AOTAutograd finish with a body whose joint graph is what counts",
        without=_FLAT,
    ),
    *each(
        "torch._guards",
        "TracingContext TracingContext.try_get tracing",
        "trace a body apart from the graph that calls it",
        _FLAT,
    ),
    PrivateName(
        name="torch._guards:fw_metadata",
        used_for="know whether a body is a plain function of its inputs",
        without=_FLAT,
    ),
    PrivateName(
        name="torch._inductor.compile_fx._recursive_post_grad_passes",
        used_for="rewrite a body as Inductor rewrites each graph",
        without=_WITH_INDUCTOR,
    ),
    *each(
        "torch._inductor.ir",
        "InvokeSubgraph.create MultiOutput Subgraph TensorBox.create",
        "generate the code of a body once for all of its calls",
        _WITH_INDUCTOR,
    ),
    *each(
        "torch._inductor.lowering",
        "lowerings register_lowering",
        "generate the code of a body once for all of its calls",
        _WITH_INDUCTOR,
    ),
    *each(
        "torch._inductor.virtualized",
        "V.graph",
        "generate the code of a body once for all of its calls",
        _WITH_INDUCTOR,
    ),
    *each(
        "torch.utils._sympy",
        "interp.sympy_interp reference.PythonReferenceAnalysis",
        "compute sizes in the backward of a body from symbols that it is given",
        _FLAT,
    ),
)
