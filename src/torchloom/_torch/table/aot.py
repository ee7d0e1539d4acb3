"""Names of AOTAutograd, its partitioner, and FX."""

from __future__ import annotations

from torchloom._torch.table.records import PrivateName, each

_NO_WEAVING = "`engine.compile()` leaves graphs eager, or fails with `compile.strict`"
_NO_PLANS = "plans under a memory budget fail"
_NO_SERVING = "serving cannot build programs"
_WRAPPED = "programs run with torch's wrappers: slower, and loads import the compiler"

AOT = (
    PrivateName(
        name="torch._dynamo.backends.common.aot_autograd",
        used_for="compile graphs with other compilers than Inductor",
        without="backends other than Inductor fail",
    ),
    PrivateName(
        name="torch._functorch.aot_autograd.make_boxed_func",
        used_for="call graphs with a list that they empty",
        without="backends other than Inductor fail",
    ),
    PrivateName(
        name="torch._functorch.aot_autograd:_boxed_call",
        used_for="know what is called with a list already",
        without="the list is taken apart once more",
        is_needed=False,
    ),
    PrivateName(
        name="torch._functorch.compile_utils.fx_graph_cse",
        used_for="merge repeated nodes of a joint graph",
        without=_NO_PLANS,
    ),
    *each(
        "torch._functorch.config",
        "patch cse",
        "merge nodes or not; compile backward at once",
        _NO_WEAVING,
    ),
    *each(
        "torch._functorch.config",
        "force_non_lazy_backward_lowering",
        "compile backward together with forward",
        _NO_WEAVING,
    ),
    *each(
        "torch._functorch.config",
        "strict_autograd_cache bypass_autograd_cache_key",
        "build code ahead of its calls",
        _NO_SERVING,
    ),
    *each(
        "torch._functorch.partitioners",
        "min_cut_rematerialization_partition",
        "split joint graphs by min-cut",
        _NO_WEAVING,
    ),
    *each(
        "torch._functorch.partitioners",
        "_extract_fwd_bwd_modules classify_nodes cleanup_recompute_tags functionalize_rng_ops"
        " has_recomputable_ops raise_getitems reordering_to_mimic_autograd_engine",
        "split a joint graph as a plan says",
        _NO_PLANS,
    ),
    *each(
        "torch._functorch.partitioners",
        "force_save_collectives force_save_effectful_ops force_save_bw_mutation_src",
        "save what may not be computed again",
        "what this check of torch's would save is computed again if the plan says so",
        is_needed=False,
    ),
    *each(
        "torch._prims.rng_prims",
        "run_and_save_rng_state run_with_rng_state",
        "count the memory of what draws the same random numbers again",
        _NO_PLANS,
    ),
    PrivateName(
        name="torch._functorch.partitioners.thread_graphsafe_rng_from_hops",
        used_for="hand random states to graphs inside of a graph",
        without="graphs that draw random numbers inside of a graph fail",
        is_needed=False,
    ),
    *each(
        "torch._functorch.partitioners:",
        "partitioner_tag must_be_in_backward",
        "keep what backward alone may run out of forward",
        _NO_WEAVING,
    ),
    *each(
        "torch._functorch._aot_autograd.schemas.OutputType",
        "custom_function_view is_input non_alias unsafe_view_alias",
        "know which results are inputs",
        _WRAPPED,
    ),
    *each(
        "torch._functorch._aot_autograd.schemas:",
        "is_rng_op_functionalized tokens grad_enabled_mutation num_mutated_inp_runtime_indices"
        " num_intermediate_bases output_info mutated_graph_handled_indices_seen_by_autograd",
        "know what torch's wrappers do around a graph",
        _WRAPPED,
        is_needed=False,
    ),
    *each(
        "torch._functorch._aot_autograd.aot_autograd_result.GenericAOTAutogradResult",
        "compiled_fw compiled_bw runtime_metadata maybe_subclass_meta dispatch_wrappers",
        "take the code of a graph out of what torch stores",
        _WRAPPED,
        is_needed=False,
    ),
    *each(
        "torch._guards",
        "CompileContext.current_compile_id",
        "name the compile that a thread is in",
        "`torchloom.watch` and `torchloom.jit` fail",
    ),
    PrivateName(
        name="torch._guards.detect_fake_mode",
        used_for="find the mode in which a graph was traced",
        without="plans for graphs that draw random numbers twice fail",
    ),
    *each(
        "torch._guards.SLoc",
        "framework_loc maybe_user_loc",
        "name the line that assumed something of a size",
        "conditions on sizes are shown without their line",
        is_needed=False,
    ),
    *each(
        "torch.fx._graph_pickler",
        "GraphPickler.dumps GraphPickler.loads Options",
        "store graphs that run as they are",
        "programs with such parts are not stored",
    ),
    *each(
        "torch.fx._lazy_graph_module",
        "_LazyGraphModule _use_lazy_graph_module",
        "make no code for graphs that are only looked at",
        _NO_PLANS,
    ),
    PrivateName(
        name="torch.fx.experimental._config.patch",
        used_for="trace sizes of 0 and 1 like others",
        without=_NO_SERVING,
    ),
    PrivateName(
        name="torch.fx.experimental._config.backed_size_oblivious",
        used_for="trace sizes of 0 and 1 like others",
        without=_NO_SERVING,
    ),
    PrivateName(
        name="torch.fx.experimental.proxy_tensor.is_sym_node",
        used_for="tell numbers from tensors in a joint graph",
        without=_NO_PLANS,
    ),
    *each(
        "torch.fx.experimental.symbolic_shapes",
        "ShapeEnv DimDynamic.DUCK DimDynamic.STATIC StatelessSymbolicContext ShapeEnv.create_symbol"
        " ShapeEnv.constrain_symbol_range",
        "trace with sizes that are symbols",
        _NO_SERVING,
    ),
    PrivateName(
        name="torch.fx.experimental.symbolic_shapes:backed_var_to_val",
        used_for="know what symbols stood for",
        without="the older name is used",
        is_needed=False,
        instead="torch.fx.experimental.symbolic_shapes:var_to_val",
    ),
    PrivateName(
        name="torch.fx.experimental.symbolic_shapes:var_to_val",
        used_for="know what symbols stood for",
        without=_NO_SERVING,
        is_needed=False,
        instead="torch.fx.experimental.symbolic_shapes:backed_var_to_val",
    ),
    *each(
        "torch._subclasses.fake_tensor",
        "FakeTensorConverter FakeTensorConverter.from_real_tensor",
        "trace what tensors hold as unknown",
        _NO_SERVING,
    ),
    PrivateName(
        name="torch._subclasses.fake_tensor:export",
        used_for="trace what tensors hold as unknown",
        without=_NO_SERVING,
    ),
    PrivateName(
        name="torch._dynamo.source.FloatTensorSource",
        used_for="tell floats that are arguments from tensors",
        without=_NO_SERVING,
    ),
    *each(
        "torch.fx.experimental.symbolic_shapes:",
        "shape_env var_to_range",
        "give symbols the ranges of a contract",
        _NO_SERVING,
    ),
    PrivateName(
        name="torch.fx.graph._BoxedCodeGen",
        used_for="run graphs that free each value after its last use",
        without="backend `eager` and `aot_eager` fail",
    ),
    *each(
        "torch.utils._sympy.functions",
        "Max Min",
        "clamp slices along sizes that vary",
        _NO_SERVING,
    ),
    PrivateName(
        name="torch.utils._sympy.printers.PythonPrinter",
        used_for="write conditions on sizes as Python",
        without=_NO_SERVING,
    ),
)
