"""Names of Dynamo's live state, which `explain`, `explain_call`, `watch` and `jit` read."""

from __future__ import annotations

from torchloom._torch.table.records import PrivateName, each

_NO_ENTRIES = "`entries`, `explain` and `explain_call` fail"
_NO_CALLS = "`explain_call` fails"
_NO_WATCH = "`watch` fails"
_LESS = "`watch` and `explain` show less"
_RAISED = "under `jit` the error of a compile is raised, and the function does not run eagerly"

INSPECTION = (
    PrivateName(
        name="torch._dynamo.eval_frame._debug_get_cache_entry_list",
        used_for="list the entries of a function",
        without=_NO_ENTRIES,
    ),
    *each(
        "torch._C._dynamo.eval_frame._CacheEntry",
        "backend code compile_id guard_manager",
        "read an entry",
        _NO_ENTRIES,
    ),
    PrivateName(
        name="torch._C._dynamo.eval_frame._CacheEntry.isolate_recompiles_id",
        used_for="tell apart entries of `isolate_recompiles=True`",
        without="there is no such option, so that no entries are apart",
        since="2.13",
        is_needed=False,
    ),
    *each(
        "torch._C._dynamo.guards",
        "RootGuardManager.check_verbose RootGuardManager.check"
        " RootGuardManager.get_epilogue_lambda_guards GuardManager.get_child_managers"
        " GuardManager.get_accessors GuardManager.get_leaf_guards GuardManager.get_source"
        " GuardManager.fail_count DictGuardManager.get_key_value_managers"
        " LeafGuard.verbose_code_parts GuardAccessor.repr",
        "list the checks of an entry",
        "guards are missing from `entries`, and why a call recompiles is not said",
        is_needed=False,
    ),
    PrivateName(
        name="torch._dynamo.guards.get_guard_fail_reason_helper",
        used_for="say which guard fails, in torch's words",
        without=_NO_CALLS,
    ),
    *each(
        "torch._dynamo.guards:",
        "invalidation_reason closure_vars global_scope guard_manager local_scope",
        "read what guards look at",
        _LESS,
        is_needed=False,
    ),
    PrivateName(
        name="torch._C._dynamo.eval_frame.set_guard_complete_hook",
        used_for="count lookups that hit",
        without="`watch` counts no hits",
        is_needed=False,
    ),
    PrivateName(
        name="torch._C._dynamo.eval_frame.set_fullgraph_compiled_frame_count",
        used_for="know that a whole graph which compiles nothing raises",
        without="it does not raise",
        since="2.12",
        is_needed=False,
    ),
    *each(
        "torch._dynamo.cache_size",
        "_has_same_id_matched_objs",
        "count entries against the recompile limit",
        _NO_CALLS,
    ),
    *each(
        "torch._dynamo.callback.callback_handler",
        "start_callbacks end_callbacks register_start_callback register_end_callback"
        " remove_end_callback",
        "learn that a compile begins and ends",
        "`watch` and eager parts at stage 3 fail",
    ),
    *each(
        "torch._dynamo.config",
        "disable suppress_errors",
        "know that Dynamo is disabled; let one function fall back",
        _NO_CALLS,
    ),
    *each(
        "torch._dynamo.config",
        "codegen_config _config",
        "list settings that were changed",
        _LESS,
        is_needed=False,
    ),
    PrivateName(
        name="torch._dynamo.convert_frame.compile_lock",
        used_for="let one function fall back, and no other",
        without=_RAISED,
    ),
    PrivateName(
        name="torch._dynamo.convert_frame.register_bytecode_hook",
        used_for="see the bytecode that Dynamo writes",
        without=_NO_WATCH,
    ),
    *each(
        "torch._dynamo.convert_frame:",
        "_compile compile_inner limit_type closure tracer_output traced_code",
        "know what a thread compiles, from the frame that does",
        _LESS,
        is_needed=False,
    ),
    PrivateName(
        name="torch._dynamo.convert_frame:_compile_inner",
        used_for="know which functions a compile has traced",
        without="the older name is used",
        is_needed=False,
        instead="torch._dynamo.convert_frame:compile_inner",
    ),
    PrivateName(
        name="torch._dynamo.convert_frame:_recompile_limit",
        used_for="read `recompile_limit=` of a function",
        without="there is no such option",
        since="2.12",
        is_needed=False,
    ),
    *each(
        "torch._dynamo.eval_frame",
        "innermost_backend innermost_fn",
        "find what was given to torch.compile",
        _NO_ENTRIES,
    ),
    PrivateName(
        name="torch._dynamo.eval_frame._stance",
        used_for="know what `torch.compiler.set_stance` asks for",
        without="`explain_call` fails, and served calls do not hear `force_eager`",
    ),
    *each(
        "torch._dynamo.eval_frame:",
        "_orig_mod compile_wrapper callback _torchdynamo_orig_backend skip_guard_eval_unsafe",
        "find what stands behind a compiled function",
        "compiled functions are taken for plain ones",
        is_needed=False,
    ),
    PrivateName(
        name="torch._dynamo.eval_frame:_isolate_recompiles_id",
        used_for="read the region of a compiled function",
        without="there are no such regions",
        since="2.13",
        is_needed=False,
    ),
    *each(
        "torch._dynamo.eval_frame:",
        "_torchdynamo_disable _torchdynamo_wrapper_id",
        "know that `torch.compiler.disable` stands in front",
        "`explain_call` takes a disabled function for a compiled one",
        is_needed=False,
    ),
    *each(
        "torch._dynamo.external_utils",
        "wrap_inline",
        "find callables without code of their own: partials, objects",
        _NO_CALLS,
    ),
    *each(
        "torch._dynamo.resume_execution",
        "ContinueExecutionCache.generated_code_metadata",
        "name the function that a continuation goes on with",
        "continuations stand in records by torch's names for them",
        is_needed=False,
    ),
    PrivateName(
        name="torch._dynamo.run",
        used_for="run a function without compiling",
        without="`jit` fails behind a recompile limit",
    ),
    PrivateName(
        name="torch._dynamo.trace_rules.check",
        used_for="know which functions Dynamo leaves alone",
        without=_NO_CALLS,
    ),
    PrivateName(
        name="torch._dynamo.utils._compilation_metrics",
        used_for="read what Dynamo noted of its last compiles",
        without="`jit` does not say why Dynamo gave a function up",
        is_needed=False,
    ),
    *each(
        "torch._dynamo.utils.CompilationMetrics",
        "fail_type fail_reason",
        "read what Dynamo noted of its last compiles",
        "`jit` does not say why Dynamo gave a function up",
        is_needed=False,
    ),
)
