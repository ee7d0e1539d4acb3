"""Names of torch itself: autograd, modes, operators, tensors, modules."""

from __future__ import annotations

from torchloom._torch.table.records import PrivateName, each

_NO_IMPORT = "`import torchloom._torch` fails"
_EAGER = "training at stage 3 fails: backward cannot gather saved weights again"
_TRACED = "custom operators and stored programs fail: what a trace goes through is not known"

CORE = (
    *each(
        "torch._C._autograd",
        "_top_saved_tensors_default_hooks _pop_saved_tensors_default_hooks"
        " _push_saved_tensors_default_hooks",
        "put hooks of saved tensors under those of the program",
        _EAGER,
    ),
    *each(
        "torch._C._autograd",
        "_saved_tensors_hooks_disable _saved_tensors_hooks_is_enabled",
        "let transforms of torch.func begin inside of hooks of ours",
        _EAGER,
    ),
    PrivateName(
        name="torch._C._autograd._get_current_graph_task_keep_graph",
        used_for="know whether a backward pass may free what it read",
        without="compiled backward fails",
    ),
    PrivateName(
        name="torch.autograd._engine_run_backward",
        used_for="look at the graph of a loss before its backward",
        without="no model can be sharded",
    ),
    *each(
        "torch._subclasses",
        "fake_tensor.FakeTensor functional_tensor.FunctionalTensor",
        "leave the backward that a compiler traces alone",
        "training fails",
    ),
    PrivateName(
        name="torch.distributed._broadcast_coalesced",
        used_for="refuse broadcasts of shards, as by DistributedDataParallel",
        without="no model can be sharded",
    ),
    PrivateName(
        name="torch._C._dispatch_has_kernel_for_dispatch_key",
        used_for="know whether an operator has a backward of its own",
        without="`torchloom.check_op` fails",
    ),
    *each(
        "torch._C",
        "_len_torch_function_stack _len_torch_dispatch_stack _is_tracing",
        "refuse served calls inside of modes that programs do not know",
        "serving cannot be imported",
    ),
    *each(
        "torch._C._functorch",
        "maybe_current_level is_functorch_wrapped_tensor get_unwrapped",
        "see through the wrappers of torch.func",
        "serving cannot be imported",
    ),
    PrivateName(
        name="torch._C._disabled_torch_function_impl",
        used_for="let what is computed with a shard of a state dict be a plain tensor",
        without="`import torchloom.shard` fails",
    ),
    PrivateName(
        name="torch._C.DisableTorchFunctionSubclass",
        used_for="call operators on weights that were looked up outside of forward",
        without="looking up a weight of a sharded module between two steps fails",
    ),
    PrivateName(
        name="torch.Tensor._make_wrapper_subclass",
        used_for="tell torch.distributed.checkpoint which part of a whole tensor a shard is",
        without="`torchloom.shard.sharded_state_dict` fails",
    ),
    PrivateName(
        name="torch._C._is_any_autocast_enabled",
        used_for="keep torch's own wrappers around code that was built under autocast",
        without="serving cannot build programs",
    ),
    PrivateName(
        name="torch._decomp.decomposition_table",
        used_for="know a decomposition that stands for an operator during a trace",
        without="stored programs do not notice that a decomposition was edited",
        is_needed=False,
    ),
    *each(
        "torch._higher_order_ops.effects",
        "_EffectType.ORDERED _register_effectful_op",
        "let compilers keep each call of an operator, in order",
        "`import torchloom.ops` fails",
    ),
    PrivateName(
        name="torch._library.custom_ops.OPDEFS",
        used_for="find the functions of `torch.library.custom_op`",
        without="stored programs do not notice that a custom operator was edited",
        is_needed=False,
    ),
    *each(
        "torch._library.custom_ops:",
        "_abstract_fn _backward_fn _setup_context_fn _vmap_fn _torch_dispatch_fns",
        "read what `torch.library.custom_op` was given",
        "stored programs do not notice that a custom operator was edited",
        is_needed=False,
    ),
    *each(
        "torch._library.simple_registry",
        "singleton._data",
        "find fakes that were registered with `torch.library.register_fake`",
        "stored programs do not notice that a fake was edited",
        is_needed=False,
    ),
    *each(
        "torch._library.simple_registry:",
        "fake_impl torch_dispatch_rules",
        "find fakes and rules that were registered with torch.library",
        "stored programs do not notice that a fake was edited",
        is_needed=False,
    ),
    PrivateName(
        name="torch._library.fake_impl.FakeImplHolder.kernel",
        used_for="find the fake of an operator",
        without="stored programs do not notice that a fake was edited",
        is_needed=False,
    ),
    PrivateName(
        name="torch._logging.structured.INTERN_TABLE",
        used_for="name the files of torch's trace records",
        without="`torchloom.watch` fails",
    ),
    PrivateName(
        name="torch._neg_view",
        used_for="make again a view of a negated tensor",
        without="negated views that backward needs cannot be saved at stage 3",
    ),
    *each("torch._ops", "OpOverload OpOverloadPacket", "find operators in graphs", _NO_IMPORT),
    *each(
        "torch._ops:",
        "_qualified_op_name _schema",
        "compare operators with what they were",
        _TRACED,
    ),
    PrivateName(
        name="torch._subclasses.FakeTensorMode",
        used_for="load stored graphs",
        without="programs whose parts run as graphs are built again",
    ),
    PrivateName(
        name="torch._subclasses.fake_tensor.FakeTensorMode",
        used_for="run operators without data",
        without="plans and serving fail",
    ),
    PrivateName(
        name="torch.autograd._profiler_enabled",
        used_for="leave a profiler of the program's alone while workspaces are measured",
        without="plans fail",
    ),
    PrivateName(
        name="torch.autograd.forward_ad._current_level",
        used_for="refuse served calls that are differentiated forwards",
        without="served calls fail",
    ),
    PrivateName(
        name="torch.nn.utils.clip_grad._get_total_norm",
        used_for="let torch's clipping take the norm over all ranks",
        without="`shard_model` fails",
    ),
    PrivateName(
        name="torch.overrides._get_current_function_mode_stack",
        used_for="name the modes that a served call is refused for",
        without="serving cannot be imported",
    ),
    *each(
        "torch.utils._device",
        "CURRENT_DEVICE DeviceContext",
        "know the default device, which is a mode",
        "serving cannot be imported",
    ),
    *each(
        "torch.utils._python_dispatch",
        "TorchDispatchMode _disable_current_modes _get_current_dispatch_mode_stack",
        "see operators below autograd; run some for real inside of a compiler",
        _NO_IMPORT,
    ),
    PrivateName(
        name="torch.UntypedStorage._cdata",
        used_for="tell whether two tensors share memory",
        without="served calls fail",
    ),
    PrivateName(
        name="torch.Tensor._version",
        used_for="tell whether a tensor was written",
        without="served calls fail",
    ),
    PrivateName(
        name="torch._dynamo.variables.builder:_dynamo_static_input_type",
        used_for="tell parameters and buffers from other inputs of a graph",
        without="buffers count as activations in plans, and programs for exact sizes copy them",
        is_needed=False,
    ),
    *each(
        "torch.nn.Module",
        "_call_impl _compiled_call_impl",
        "let calls of a module run compiled, under the same object",
        "`engine.compile()` and `torchloom.compile` fail",
    ),
    *each(
        "torch.nn.Module",
        "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks",
        "know whether a call of a module is a call of its forward",
        "serving fails for modules",
    ),
    *each(
        "torch.nn.modules.module",
        "_global_forward_hooks _global_forward_pre_hooks _global_backward_hooks"
        " _global_backward_pre_hooks",
        "know whether hooks are registered for all modules",
        "serving fails for modules",
    ),
    *each(
        "torch._C",
        "_PreserveDispatchKeyGuard _is_fwd_grad_enabled _set_fwd_grad_enabled"
        " _autograd._saved_tensors_hooks_enable _autograd._saved_tensors_hooks_get_disabled_error_message"
        " _functorch.get_dynamic_layer_stack_depth _functorch.pop_dynamic_layer_stack_and_undo_to_depth"
        " _functorch.get_inplace_requires_grad_allowed _functorch.set_inplace_requires_grad_allowed",
        "leave the modes that a build entered",
        "serving cannot build programs",
    ),
)
