"""Each private name of torch that `torchloom._torch` uses, under what happens where a torch lacks it.

A line holds the names of one owner: a class or module, or, where a colon follows, a module whose source has the
names as words (marks on objects, local variables, keys: attributes of nothing before torch has run). `a|b` is two
names for one thing, of which one is enough; `since=2.13` is the first version that has the names of a line.
"""

from __future__ import annotations

NEEDED = {
    "training at stage 3 fails: backward cannot gather saved weights again": """
        torch._C._autograd _pop_saved_tensors_default_hooks _push_saved_tensors_default_hooks
        torch._C._autograd _saved_tensors_hooks_disable _saved_tensors_hooks_is_enabled
        torch._C._autograd _top_saved_tensors_default_hooks
    """,
    "compiled backward fails": """
        torch._C._autograd _get_current_graph_task_keep_graph
    """,
    "no model can be sharded": """
        torch.utils._pytree tree_leaves tree_map_only
        torch.autograd _engine_run_backward
        torch.distributed _broadcast_coalesced
    """,
    "training fails": """
        torch._subclasses.fake_tensor FakeTensor
        torch._subclasses.functional_tensor FunctionalTensor
    """,
    "`torchloom.simulate` shows torch's error for a forward that reads values": """
        torch._subclasses.fake_tensor DataDependentOutputException DynamicOutputShapeException
    """,
    "`torchloom plan simulate --lower` fails": """
        torch._C _ensureCUDADeviceGuardSet
        torch._dynamo.device_interface.CudaInterface is_available
        torch._inductor.async_compile.AsyncCompile triton
        torch._inductor.codecache _load_triton_kernel_from_source
        torch._inductor.config force_disable_caches joint_graph_constant_folding shape_padding
        torch._inductor.runtime.triton_helpers set_driver_to_gpu
    """,
    "`torchloom.simulate` fails for GPUs": """
        torch._C DispatchKey
        torch._ops: _dispatch_cache py_kernels
        torch._ops.OperatorBase py_impl
        torch.ops.aten _scaled_dot_product_attention_math _scaled_dot_product_efficient_attention
        torch.ops.aten _scaled_dot_product_flash_attention
    """,
    "`torch.optim.Muon` refuses the shards of a model": """
        torch.optim._muon Muon
    """,
    "`torchloom.check_op` fails": """
        torch._C _dispatch_has_kernel_for_dispatch_key
        torch._dynamo.source ConstantSource
    """,
    "serving cannot be imported": """
        torch._C _is_tracing _len_torch_dispatch_stack _len_torch_function_stack _storage_Use_Count
        torch._C._functorch get_unwrapped is_functorch_wrapped_tensor maybe_current_level
        torch.overrides _get_current_function_mode_stack
        torch.utils._device CURRENT_DEVICE DeviceContext
    """,
    "`import torchloom.shard` fails": """
        torch._C _disabled_torch_function_impl
    """,
    "looking up a weight of a sharded module between two steps fails": """
        torch._C DisableTorchFunctionSubclass
    """,
    "`torchloom.shard.sharded_state_dict` fails": """
        torch.Tensor _make_wrapper_subclass
    """,
    "serving cannot build programs": """
        torch._C _PreserveDispatchKeyGuard _is_any_autocast_enabled _is_fwd_grad_enabled _set_fwd_grad_enabled
        torch._C._autograd _saved_tensors_hooks_enable _saved_tensors_hooks_get_disabled_error_message
        torch._C._functorch get_dynamic_layer_stack_depth get_inplace_requires_grad_allowed
        torch._C._functorch pop_dynamic_layer_stack_and_undo_to_depth set_inplace_requires_grad_allowed
        torch._dynamo.config assume_static_by_default automatic_dynamic_shapes patch record_runtime_overhead
        torch._dynamo.config specialize_float
        torch._dynamo.convert_frame fullgraph_capture
        torch._dynamo.convert_frame.BackendInput backend_id example_inputs fake_mode graph_module
        torch._dynamo.convert_frame.GraphRuntimeEnv bytecode external_refs import_sources
        torch._dynamo.decorators mark_unbacked maybe_mark_dynamic
        torch._dynamo.exc TensorifyScalarRestartAnalysis TorchDynamoException
        torch._dynamo.source FloatTensorSource
        torch._dynamo.utils get_metrics_context
        torch._functorch.config bypass_autograd_cache_key strict_autograd_cache
        torch._inductor standalone_compile
        torch._inductor.codecache.CppCodeCache load_async
        torch._inductor.config.cpp vec_isa_ok
        torch._inductor.sizevars.SizeVarAllocator evaluate_max evaluate_min
        torch._inductor.standalone_compile: compiled_fn inner_fn
        torch._subclasses.fake_tensor FakeTensorConverter
        torch._subclasses.fake_tensor.FakeTensorConverter from_real_tensor
        torch._subclasses.fake_tensor: export
        torch.fx.experimental._config backed_size_oblivious patch
        torch.fx.experimental.symbolic_shapes ShapeEnv StatelessSymbolicContext
        torch.fx.experimental.symbolic_shapes.DimDynamic DUCK STATIC
        torch.fx.experimental.symbolic_shapes.ShapeEnv constrain_symbol_range create_symbol
        torch.fx.experimental.symbolic_shapes: backed_var_to_val|var_to_val shape_env var_to_range
        torch.utils._sympy.functions Max Min
        torch.utils._sympy.printers PythonPrinter
    """,
    "`import torchloom.ops` fails": """
        torch._higher_order_ops.effects _register_effectful_op
        torch._higher_order_ops.effects._EffectType ORDERED
    """,
    "`torchloom.watch` fails": """
        torch._logging.structured INTERN_TABLE
    """,
    "`import torchloom._torch` fails": """
        torch._ops OpOverload OpOverloadPacket
        torch.utils._python_dispatch TorchDispatchMode _disable_current_modes _get_current_dispatch_mode_stack
    """,
    "custom operators and stored programs fail: what a trace goes through is not known": """
        torch._ops: _qualified_op_name _schema
    """,
    "programs whose parts run as graphs are built again": """
        torch._subclasses FakeTensorMode
    """,
    "plans and serving fail": """
        torch._subclasses.fake_tensor FakeTensorMode
    """,
    "plans fail": """
        torch.autograd _profiler_enabled
    """,
    "served calls fail": """
        torch.Tensor _version
        torch.UntypedStorage _cdata
        torch._C._dynamo.guards TensorGuards
        torch.autograd.forward_ad _current_level
    """,
    "`compile.cuda_graphs` fails": """
        torch._C _storage_Use_Count
        torch._functorch.config enable_autograd_cache
        torch._inductor.output_code: current_callable
        torch._inductor.utils get_first_incompatible_cudagraph_node
    """,
    "`shard_model` fails": """
        torch.nn.utils.clip_grad _get_total_norm
    """,
    "`engine.compile()` and `torchloom.compile` fail": """
        torch._C._dynamo.eval_frame reset_code
        torch._dynamo.config ignore_logging_functions recompile_limit
        torch._dynamo.eval_frame OptimizedModule check_if_dynamo_supported
        torch._dynamo.exc RestartAnalysis
        torch.nn.Module _call_impl _compiled_call_impl
    """,
    "serving fails for modules": """
        torch.nn.Module _backward_hooks _backward_pre_hooks _forward_hooks _forward_pre_hooks
        torch.nn.modules.module _global_backward_hooks _global_backward_pre_hooks _global_forward_hooks
        torch.nn.modules.module _global_forward_pre_hooks
    """,
    "gathers and reductions over NCCL fail": """
        torch.distributed all_gather_single|all_gather_into_tensor reduce_scatter_single|reduce_scatter_tensor
        torch.distributed.ProcessGroup all_gather_single_coalesced|allgather_into_tensor_coalesced
        torch.distributed.ProcessGroup reduce_scatter_single_coalesced|reduce_scatter_tensor_coalesced
    """,
    "`import torchloom.runtime` fails": """
        torch.distributed.distributed_c10d AllgatherOptions AllreduceCoalescedOptions ReduceScatterOptions
    """,
    "runs on several ranks fail as they meet": """
        torch._C._distributed_c10d.Backend.Options _timeout
        torch.distributed.ProcessGroup _device_types _get_backend
        torch.distributed.distributed_c10d _get_default_store _get_process_group_store
    """,
    "checkpoints in DCP's format are neither written nor read": """
        torch.distributed.checkpoint.filesystem _StorageInfo
        torch.distributed.checkpoint.metadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta
        torch.distributed.checkpoint.metadata TensorProperties TensorStorageMetadata
    """,
    "backends other than Inductor fail": """
        torch._dynamo.backends.common aot_autograd
        torch._functorch.aot_autograd make_boxed_func
    """,
    "plans under a memory budget fail": """
        torch._functorch.compile_utils fx_graph_cse
        torch._functorch.partitioners _extract_fwd_bwd_modules classify_nodes cleanup_recompute_tags
        torch._functorch.partitioners functionalize_rng_ops has_recomputable_ops raise_getitems
        torch._functorch.partitioners reordering_to_mimic_autograd_engine
        torch._inductor.fx_passes.reinplace inplaceable_foreach_ops inplaceable_ops
        torch._prims.rng_prims graphsafe_run_with_rng_state run_and_save_rng_state run_with_rng_state
        torch.fx._lazy_graph_module _LazyGraphModule _use_lazy_graph_module
        torch.fx.experimental.proxy_tensor is_sym_node
    """,
    "`engine.compile()` leaves graphs eager, or fails with `compile.strict`": """
        torch._functorch.config cse force_non_lazy_backward_lowering patch
        torch._functorch.partitioners min_cut_rematerialization_partition
        torch._functorch.partitioners: must_be_in_backward partitioner_tag
    """,
    "programs run with torch's wrappers: slower, and loads import the compiler": """
        torch._functorch._aot_autograd.schemas.OutputType alias_of_input is_input non_alias
        torch._functorch._aot_autograd.schemas.OutputType unsafe_view_alias
    """,
    "`torchloom.watch` and `torchloom.jit` fail": """
        torch._guards.CompileContext current_compile_id
    """,
    "plans for graphs that draw random numbers twice fail": """
        torch._guards detect_fake_mode
    """,
    "programs with parts that run as graphs are not stored": """
        torch.fx._graph_pickler Options
        torch.fx._graph_pickler.GraphPickler dumps loads
    """,
    "backend `eager` and `aot_eager` fail": """
        torch.fx.graph _BoxedCodeGen
    """,
    "layers are compiled one by one: `compile.regions` has no effect": """
        torch._C _AutoDispatchBelowAutograd _log_api_usage_once _set_grad_enabled
        torch._functorch.partitioners default_partition
        torch._guards TracingContext tracing
        torch._guards.TracingContext try_get
        torch._guards: fw_metadata
        torch._ops HigherOrderOperator
        torch.amp.autocast_mode _enter_autocast _exit_autocast
        torch.utils._sympy.interp sympy_interp
        torch.utils._sympy.reference PythonReferenceAnalysis
    """,
    "with Inductor, graphs whose layers repeat fail: set `compile.regions` to false": """
        torch._inductor.compile_fx _recursive_post_grad_passes
        torch._inductor.graph: _inductor_lowering_function original_output_strides user_visible_output_idxs
        torch._inductor.ir Buffer Subgraph significant_strides_equal
        torch._inductor.ir.FallbackKernel tensor_to_layout
        torch._inductor.ir.InvokeSubgraph create
        torch._inductor.ir.TensorBox create
        torch._inductor.utils IndentedBuffer ValueWithLineMap
        torch._inductor.virtualized.V graph set_graph_handler
    """,
    "stored programs that are not plain text cannot be loaded": """
        torch._inductor.codecache.CppCodeCache _load_library
        torch._inductor.standalone_compile.AOTCompiledArtifact deserialize
    """,
    "`engine.compile()` with Inductor fails": """
        torch._inductor.compile_fx compile_fx compile_fx_inner
        torch._inductor.config get_config_copy patch
        torch._inductor.custom_graph_pass CustomGraphPass CustomPartitionerFn get_hash_for_files
    """,
    "`torchloom doctor` and `torchloom.bisect` fail": """
        torch._inductor.compiler_bisector.CompilerBisector get_dir
    """,
    "the compile report, cost tables and `torchloom doctor` fail": """
        torch._inductor.runtime.cache_dir_utils cache_dir
    """,
    "programs of plain text fail": """
        torch._C._dynamo.guards _torchinductor_pyobject_tensor_data_ptr assert_size_stride
    """,
    "`torchloom.backends` fails": """
        torch._dynamo.backends.registry _BACKENDS _COMPILER_FNS _lazy_import register_backend
        torch._dynamo.exc InvalidBackend
    """,
    "modules with hooks cannot be served": """
        torch._dynamo.convert_frame get_traced_fn
    """,
    "floats of a contract cannot vary": """
        torch._dynamo.pgo FrameStateSizeEntry auto_dynamic get_code_state
        torch._dynamo.pgo.CodeId make
        torch._dynamo.symbolic_convert.TensorifyState clear
    """,
    "on torch 2.11 parameters that are unfrozen after a compile are not trained": """
        torch._dynamo reset
    """,
    "`entries`, `explain` and `explain_call` fail": """
        torch._C._dynamo.eval_frame._CacheEntry backend code compile_id guard_manager
        torch._dynamo.eval_frame _debug_get_cache_entry_list innermost_backend innermost_fn
    """,
    "`explain_call` fails": """
        torch._dynamo.cache_size _has_same_id_matched_objs
        torch._dynamo.config disable suppress_errors
        torch._dynamo.external_utils wrap_inline
        torch._dynamo.guards get_guard_fail_reason_helper
        torch._dynamo.trace_rules check
    """,
    "`watch` and eager parts at stage 3 fail": """
        torch._dynamo.callback.callback_handler end_callbacks register_end_callback register_start_callback
        torch._dynamo.callback.callback_handler remove_end_callback start_callbacks
    """,
    "under `jit` the error of a compile is raised, and the function does not run eagerly": """
        torch._dynamo.convert_frame compile_lock
    """,
    "`watch` fails": """
        torch._dynamo.convert_frame register_bytecode_hook
    """,
    "`explain_call` fails, and served calls do not hear `force_eager`": """
        torch._dynamo.eval_frame _stance
    """,
    "`jit` fails behind a recompile limit": """
        torch._dynamo run
    """,
}
"""Without these, what the line above a name says fails."""

USEFUL = {
    "stored programs do not notice that a decomposition was edited": """
        torch._decomp decomposition_table
    """,
    "stored programs do not notice that a custom operator was edited": """
        torch._library.custom_ops OPDEFS
        torch._library.custom_ops: _abstract_fn _backward_fn _setup_context_fn _torch_dispatch_fns _vmap_fn
    """,
    "stored programs do not notice that a fake was edited": """
        torch._library.fake_impl.FakeImplHolder kernel
        torch._library.simple_registry.singleton _data
        torch._library.simple_registry: fake_impl torch_dispatch_rules
    """,
    "buffers count as activations in plans, and programs for exact sizes copy them": """
        torch._dynamo.variables.builder: _dynamo_static_input_type
    """,
    "HuggingFaceStorageWriter writes parts of shards alone, without an error": """
        torch.distributed.checkpoint.state_dict_saver: storage_writer
    """,
    "lists of inputs are taken apart twice": """
        torch._functorch.aot_autograd: _boxed_call
    """,
    "values that torch would save are computed again if the plan says so": """
        torch._functorch.partitioners force_save_bw_mutation_src force_save_collectives
        torch._functorch.partitioners force_save_effectful_ops
    """,
    "graphs that draw random numbers inside of a graph fail": """
        torch._functorch.partitioners thread_graphsafe_rng_from_hops
    """,
    "programs run with torch's wrappers: slower, and loads import the compiler": """
        torch._functorch._aot_autograd.aot_autograd_result.GenericAOTAutogradResult compiled_bw compiled_fw
        torch._functorch._aot_autograd.aot_autograd_result.GenericAOTAutogradResult dispatch_wrappers
        torch._functorch._aot_autograd.aot_autograd_result.GenericAOTAutogradResult maybe_subclass_meta
        torch._functorch._aot_autograd.aot_autograd_result.GenericAOTAutogradResult runtime_metadata
        torch._functorch._aot_autograd.schemas: grad_enabled_mutation is_rng_op_functionalized
        torch._functorch._aot_autograd.schemas: mutated_graph_handled_indices_seen_by_autograd
        torch._functorch._aot_autograd.schemas: num_intermediate_bases num_mutated_inp_runtime_indices
        torch._functorch._aot_autograd.schemas: output_info tokens
    """,
    "conditions on sizes are shown without their line": """
        torch._guards.SLoc framework_loc maybe_user_loc
    """,
    "builds of sizes that cannot be served take as long as others before they are refused": """
        torch._inductor.compile_fx _recursive_joint_graph_passes
        torch._inductor.decomposition select_decomp_table
    """,
    "values that move to the host may be laid out in other strides": """
        torch._inductor.graph: inductor_realize_to_strides
    """,
    "programs run with torch's wrappers; plans keep the peak of the graph": """
        torch._inductor.output_code.CompiledFxGraph constants frozen_param_names inputs_to_check source_code
        torch._inductor.output_code.CompiledFxGraph torchbind_constants
    """,
    "Dynamo compiles functions of torchloom that run behind graph breaks": """
        torch._C._dynamo.eval_frame _FrameAction _FrameExecStrategy set_code_exec_strategy
    """,
    "backends have no tags": """
        torch._dynamo.backends.registry: _BACKEND_TAGS|_tags
    """,
    "bytecode that uses globals of other functions than the model's fails where it is loaded": """
        torch._dynamo.convert_frame.GraphRuntimeEnv used_globals
    """,
    "the module is imported where bytecode asks for another name, a second and a half": """
        torch._dynamo.utils call_size call_storage_offset call_stride
    """,
    "guards are missing from `entries`, and why a call recompiles is not said": """
        torch._C._dynamo.guards.DictGuardManager get_key_value_managers
        torch._C._dynamo.guards.GuardAccessor repr
        torch._C._dynamo.guards.GuardManager fail_count get_accessors get_child_managers get_leaf_guards
        torch._C._dynamo.guards.GuardManager get_source
        torch._C._dynamo.guards.LeafGuard verbose_code_parts
        torch._C._dynamo.guards.RootGuardManager check check_verbose get_epilogue_lambda_guards
    """,
    "`watch` and `explain` show less": """
        torch._dynamo.config _config codegen_config
        torch._dynamo.convert_frame: _compile _compile_inner|compile_inner closure limit_type traced_code
        torch._dynamo.convert_frame: tracer_output
        torch._dynamo.guards: closure_vars global_scope guard_manager invalidation_reason local_scope
    """,
    "`watch` counts no hits": """
        torch._C._dynamo.eval_frame set_guard_complete_hook
    """,
    "torch has no such option either: nothing is missing": """
        torch._C._dynamo.eval_frame set_fullgraph_compiled_frame_count since=2.12
        torch._C._dynamo.eval_frame._CacheEntry isolate_recompiles_id since=2.13
        torch._dynamo.convert_frame: _recompile_limit since=2.12
        torch._dynamo.eval_frame: _isolate_recompiles_id since=2.13
    """,
    "compiled functions are taken for plain ones": """
        torch._dynamo.eval_frame: _orig_mod _torchdynamo_orig_backend callback compile_wrapper
        torch._dynamo.eval_frame: skip_guard_eval_unsafe
    """,
    "`explain_call` takes a disabled function for a compiled one": """
        torch._dynamo.eval_frame: _torchdynamo_disable _torchdynamo_wrapper_id
    """,
    "continuations stand in records by torch's names for them": """
        torch._dynamo.resume_execution.ContinueExecutionCache generated_code_metadata
    """,
    "`jit` does not say why Dynamo gave a function up": """
        torch._dynamo.utils _compilation_metrics
        torch._dynamo.utils.CompilationMetrics fail_reason fail_type
    """,
}
"""Without these, the same is done in another way, or less is done."""
