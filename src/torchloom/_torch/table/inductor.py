"""Names of Inductor."""

from __future__ import annotations

from torchloom._torch.table.records import PrivateName, each

_NO_INDUCTOR = "`engine.compile()` with Inductor fails"
_NO_SERVING = "serving cannot build programs"
_SLOW_LOAD = "loads of programs that are not plain text fail"

INDUCTOR = (
    PrivateName(
        name="torch._inductor.codecache.CppCodeCache.load_async",
        used_for="keep the shared objects that a build made, and load them again",
        without=_NO_SERVING,
    ),
    PrivateName(
        name="torch._inductor.codecache.CppCodeCache._load_library",
        used_for="load a shared object that is built already",
        without="stored programs that are not plain text cannot be loaded",
    ),
    *each(
        "torch._inductor.compile_fx",
        "compile_fx compile_fx_inner",
        "compile woven graphs",
        _NO_INDUCTOR,
    ),
    PrivateName(
        name="torch._inductor.compile_fx._recursive_joint_graph_passes",
        used_for="end the build of a program early whose sizes cannot be served",
        without="such builds take as long as others before they are refused",
        is_needed=False,
    ),
    PrivateName(
        name="torch._inductor.compiler_bisector.CompilerBisector.get_dir",
        used_for="find an unfinished bisection, which every compile obeys",
        without="`torchloom doctor` and `torchloom.bisect` fail",
    ),
    *each(
        "torch._inductor.config",
        "get_config_copy patch",
        "read and set options",
        _NO_INDUCTOR,
    ),
    PrivateName(
        name="torch._inductor.config.cpp.vec_isa_ok",
        used_for="learn vector instructions from the processor's flags",
        without=_NO_SERVING,
    ),
    *each(
        "torch._inductor.custom_graph_pass",
        "CustomGraphPass CustomPartitionerFn get_hash_for_files",
        "run our passes inside of Inductor, under a key of their sources",
        _NO_INDUCTOR,
    ),
    *each(
        "torch._inductor.fx_passes.reinplace",
        "inplaceable_foreach_ops inplaceable_ops",
        "know which operators may write their input",
        "plans under a memory budget fail",
    ),
    PrivateName(
        name="torch._inductor.graph:inductor_realize_to_strides",
        used_for="keep the strides that an operator's fake promised",
        without="values that move to the host may be laid out in other strides",
        is_needed=False,
    ),
    *each(
        "torch._inductor.output_code.CompiledFxGraph",
        "source_code constants inputs_to_check frozen_param_names torchbind_constants",
        "take the text of a graph out of what Inductor stores",
        "programs run with torch's wrappers; plans keep the peak of the graph",
        is_needed=False,
    ),
    PrivateName(
        name="torch._inductor.runtime.cache_dir_utils.cache_dir",
        used_for="find the folder of compiled code",
        without="the compile report, cost tables and `torchloom doctor` fail",
    ),
    *each(
        "torch._inductor.sizevars.SizeVarAllocator",
        "evaluate_min evaluate_max",
        "clamp slices along sizes that vary",
        _NO_SERVING,
    ),
    *each(
        "torch._inductor",
        "standalone_compile",
        "build code ahead of its calls",
        _NO_SERVING,
    ),
    *each(
        "torch._inductor.standalone_compile",
        "AOTCompiledArtifact.deserialize",
        "load code that is not plain text",
        "stored programs that are not plain text cannot be loaded",
    ),
    *each(
        "torch._inductor.standalone_compile:",
        "inner_fn compiled_fn",
        "call code without the wrapper of the artifact",
        _NO_SERVING,
    ),
    PrivateName(
        name="torch._inductor.select_algorithm.extern_kernels",
        used_for="load code without the lowerings that it imports with this name",
        without=_SLOW_LOAD,
    ),
    PrivateName(
        name="torch._inductor.codegen.memory_planning._align",
        used_for="load code without the module that it imports with this name",
        without=_SLOW_LOAD,
    ),
    PrivateName(
        name="torch._inductor.graph.GraphLowering.save_output_code",
        used_for="load code without the module that it imports with this name",
        without=_SLOW_LOAD,
    ),
    PrivateName(
        name="torch._inductor.decomposition.select_decomp_table",
        used_for="load code without the module that it imports with this name",
        without=_SLOW_LOAD,
    ),
    PrivateName(
        name="torch._inductor.debug.RECORD_GRAPH_EXECUTION",
        used_for="call loaded code without the module that it reads",
        without=_SLOW_LOAD,
        is_needed=False,
    ),
    *each(
        "torch._C._dynamo.guards",
        "assert_size_stride _torchinductor_pyobject_tensor_data_ptr",
        "run generated text by itself",
        "programs of plain text fail",
    ),
)
