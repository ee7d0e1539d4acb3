"""Names of Dynamo that compiling and capturing need."""

from __future__ import annotations

from torchloom._torch.table.records import PrivateName, each

_NO_SERVING = "serving cannot build programs"
_NO_COMPILE = "`engine.compile()` and `torchloom.compile` fail"
_NO_REGISTRY = "`torchloom.backends` fails"
_NO_FLOATS = "floats of a contract cannot vary"
_NOT_STORED = "programs whose bytecode refers to more than plain data are not stored"

DYNAMO = (
    *each(
        "torch._C._dynamo.eval_frame",
        "_FrameAction _FrameExecStrategy set_code_exec_strategy",
        "let Dynamo run our own functions as they are",
        "Dynamo compiles functions of torchloom that run behind graph breaks",
        is_needed=False,
    ),
    PrivateName(
        name="torch._C._dynamo.eval_frame.reset_code",
        used_for="drop the entries of a function that is gone",
        without=_NO_COMPILE,
    ),
    PrivateName(
        name="torch._C._dynamo.guards.TensorGuards",
        used_for="compare tensors of a served call with those of its build",
        without="served calls fail",
    ),
    *each(
        "torch._dynamo.aot_compile",
        "AOTCompilePickler AOTCompileUnpickler",
        "store bytecode that refers to more than plain data",
        _NOT_STORED,
    ),
    *each(
        "torch._dynamo.package.SerializedCode",
        "from_code_object to_code_object",
        "store bytecode that refers to more than plain data",
        _NOT_STORED,
    ),
    *each(
        "torch._dynamo.backends.registry",
        "_BACKENDS _COMPILER_FNS _lazy_import register_backend",
        "keep our registry of backends and torch's in step",
        _NO_REGISTRY,
    ),
    PrivateName(
        name="torch._dynamo.backends.registry._BACKEND_TAGS",
        used_for="read the tags of a backend",
        without="they are read from the backend's function",
        since="2.14",
        is_needed=False,
        instead="torch._dynamo.backends.registry:_tags",
    ),
    PrivateName(
        name="torch._dynamo.backends.registry:_tags",
        used_for="read the tags of a backend",
        without="backends have no tags",
        until="2.13",
        is_needed=False,
        instead="torch._dynamo.backends.registry._BACKEND_TAGS",
    ),
    *each(
        "torch._dynamo.config",
        "automatic_dynamic_shapes specialize_float assume_static_by_default"
        " record_runtime_overhead patch",
        "capture a call with the sizes that a contract lets vary",
        _NO_SERVING,
    ),
    PrivateName(
        name="torch._dynamo.config.ignore_logging_functions",
        used_for="let log calls be no graph breaks",
        without=_NO_COMPILE,
    ),
    PrivateName(
        name="torch._dynamo.config.recompile_limit",
        used_for="raise torch's default limit, and warn of a rank that is about to run eagerly alone",
        without=_NO_COMPILE,
    ),
    *each(
        "torch._dynamo.convert_frame",
        "fullgraph_capture",
        "capture a call as one graph, with its bytecode and guards",
        _NO_SERVING,
    ),
    *each(
        "torch._dynamo.convert_frame.BackendInput",
        "backend_id example_inputs fake_mode graph_module",
        "read the graph that was captured",
        _NO_SERVING,
    ),
    *each(
        "torch._dynamo.convert_frame.GraphRuntimeEnv",
        "bytecode external_refs import_sources",
        "read the bytecode around it",
        _NO_SERVING,
    ),
    PrivateName(
        name="torch._dynamo.convert_frame.GraphRuntimeEnv.used_globals",
        used_for="read globals that the bytecode uses",
        without="bytecode that uses globals of other functions than the model's fails where it is loaded",
        is_needed=False,
    ),
    PrivateName(
        name="torch._dynamo.convert_frame.get_traced_fn",
        used_for="find the function that Dynamo traces for a module with hooks",
        without="modules with hooks cannot be served",
    ),
    *each(
        "torch._dynamo.decorators",
        "mark_unbacked maybe_mark_dynamic",
        "let sizes of a contract be symbols",
        _NO_SERVING,
    ),
    *each(
        "torch._dynamo.eval_frame",
        "OptimizedModule",
        "know what is compiled already",
        _NO_COMPILE,
    ),
    PrivateName(
        name="torch._dynamo.eval_frame.check_if_dynamo_supported",
        used_for="say why torch.compile does not work on a Python",
        without=_NO_COMPILE,
    ),
    PrivateName(
        name="torch._dynamo.exc.InvalidBackend",
        used_for="raise what torch raises for an unknown backend",
        without=_NO_REGISTRY,
    ),
    PrivateName(
        name="torch._dynamo.exc.RestartAnalysis",
        used_for="let Dynamo capture again when it has learnt something",
        without=_NO_COMPILE,
    ),
    PrivateName(
        name="torch._dynamo.exc.TensorifyScalarRestartAnalysis",
        used_for="say that a float may not vary",
        without=_NO_SERVING,
    ),
    PrivateName(
        name="torch._dynamo.exc.TorchDynamoException",
        used_for="tell what cannot be one graph from other errors",
        without=_NO_SERVING,
    ),
    *each(
        "torch._dynamo.pgo",
        "CodeId.make FrameStateSizeEntry auto_dynamic get_code_state",
        "let floats of a contract be symbols",
        _NO_FLOATS,
    ),
    PrivateName(
        name="torch._dynamo.symbolic_convert.TensorifyState.clear",
        used_for="forget which floats an earlier build wanted as constants",
        without=_NO_FLOATS,
    ),
    PrivateName(
        name="torch._dynamo.reset",
        used_for="compile anew for parameters that were unfrozen, and in simulations one after the other",
        without="on torch 2.11 they are not trained",
    ),
    PrivateName(
        name="torch._dynamo.source.ConstantSource",
        used_for="find what a fake of a custom operator assumes of sizes",
        without="`torchloom.check_op` fails",
    ),
    *each(
        "torch._dynamo.utils",
        "call_size call_stride call_storage_offset",
        "run bytecode without importing Dynamo",
        "the module is imported where bytecode asks for another name, a second and a half",
        is_needed=False,
    ),
    PrivateName(
        name="torch._dynamo.utils.counters",
        used_for="tell whether a graph came from a cache",
        without=_NO_COMPILE,
    ),
    PrivateName(
        name="torch._dynamo.utils.get_metrics_context",
        used_for="capture outside of a compile",
        without=_NO_SERVING,
    ),
)
