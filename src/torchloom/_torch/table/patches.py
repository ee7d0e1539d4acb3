"""What torchloom replaces or works around in torch, and what differs between its versions."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class _Ranged:
    """A row with the versions of torch that it holds for: from the first to the last, "" for no bound."""

    since: str = ""
    until: str = ""

    def holds_on(self, version: str) -> bool:
        """Return whether the row is about a version of torch, such as "2.13.0+cpu".

        Example:
            >>> _Ranged(since="2.12", until="2.13").holds_on("2.13.1+cpu")
            True
        """
        number = _number(version)
        is_late = not self.since or number >= _number(self.since)
        return is_late and (not self.until or number <= _number(self.until))

    @property
    def versions(self) -> str:
        """The range in words."""
        if not self.since:
            return f"up to {self.until}" if self.until else "all"
        return f"{self.since} to {self.until}" if self.until else f"since {self.since}"


def _number(version: str) -> tuple[int, ...]:
    """Return the first two parts of a version: nightly builds count as the release that they lead to."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


@dataclass(frozen=True, kw_only=True)
class PrivateName(_Ranged):
    """A private name of torch that torchloom uses.

    Args:
        name: the path to it. After a colon stands a word of a module's source; "|" stands before another name
            that serves in its place.
        without: what happens where it is missing.
        is_needed: whether what needs it fails without it.
    """

    name: str
    without: str
    is_needed: bool = True


@dataclass(frozen=True, kw_only=True)
class Patch(_Ranged):
    """A place where torchloom replaces or wraps something of torch's, or works around what torch does.

    Args:
        name: what of torch's is changed or worked around.
        where: the function of torchloom that does it.
        because: what torch does by itself.
        issue: the issue or change upstream; "" where none is known.
        reproduction: one line that shows what torch does, where there is no issue.
        without: what happens without it.
    """

    name: str
    where: str
    because: str
    without: str
    issue: str = ""
    reproduction: str = ""


@dataclass(frozen=True, kw_only=True)
class Fact(_Ranged):
    """Something that differs between versions of torch though no name does.

    Args:
        name: the function of torchloom that tells; it returns True for the versions of the row.
        differs: what is so in these versions, and what in others.
    """

    name: str
    differs: str


PATCHES = (
    Patch(
        name="torch.cuda.get_device_properties",
        where="torchloom._torch.no_driver.answer_for",
        because="it, the other questions of torch.cuda and Dynamo's CudaInterface, AsyncCompile.triton, Triton's driver,"
        " and CompiledFxGraph.__call__ ask or load a driver, even for tensors without data",
        reproduction="torch.compile of a function of fake CUDA tensors where no driver is: RuntimeError, no NVIDIA driver",
        without="`torchloom plan simulate --lower` needs a GPU",
    ),
    Patch(
        name="torch.ops.aten.scaled_dot_product_attention",
        where="torchloom._torch.attention.attention_of_gpus",
        because="it chooses among kernels of the device where tensors are, which for a simulated GPU is a processor, and"
        " on CUDA asks the driver",
        reproduction="F.scaled_dot_product_attention(q, q, q, dropout_p=0.1) of CPU tensors computes all scores",
        without="simulated attention with dropout keeps and computes a matrix of scores that GPUs never have",
    ),
    Patch(
        name="torch.nn.Module.compile",
        where="torchloom._torch.module_calls.compile_in_place",
        because="it hands `_call_impl` to Dynamo, which skips frames of torch.nn: a root such as"
        " nn.Linear is not captured",
        issue="pytorch/pytorch#150915",
        until="2.13",
        without="models whose root is one of torch's own modules run eagerly",
    ),
    Patch(
        name="torch.nn.utils.clip_grad._get_total_norm",
        where="torchloom._torch.autograd.replace_total_norm",
        because="`clip_grad_norm_` takes a shard's gradient for the whole one; frameworks call it, and nothing"
        " in it asks a tensor that is no subclass",
        reproduction="clip the gradients of a model that shard_model sharded with torch.nn.utils: each rank"
        " returns another norm, and weights that are kept whole drift apart",
        without="ranks that clip with torch's function train to different weights",
    ),
    Patch(
        name="torch.distributed.ProcessGroup",
        where="torchloom._torch.distributed.watch_collectives",
        because="a broadcast or an average of a parameter that holds a shard mixes unlike parts of the weight, and nothing"
        " in torch asks a tensor before it communicates",
        reproduction="Lightning's Trainer.validate after fit broadcasts the module's parameters: rank 1 has rank 0's shards",
        without="frameworks and users that broadcast parameters break the weights of other ranks",
    ),
    Patch(
        name="torch.autograd._engine_run_backward",
        where="torchloom._torch.autograd.replace_backward",
        because="a parameter that a loss uses beside its module gets this rank's gradient alone, and no hook on the"
        " parameter can tell that from the rest; the graph can, before it runs; and `loss.backward()` is to scale and"
        " count a loss as `engine.backward(loss)` does",
        reproduction="at stage 1, add (x @ dict(model.named_parameters())['weight']).sum() to the loss: ranks' weights"
        " drift apart",
        without="such weights drift apart, norms of shards in a loss train to other weights, and step() refuses the"
        " gradients of loss.backward()",
    ),
    Patch(
        name="torch._C._autograd._saved_tensors_hooks_disable",
        where="torchloom._torch.autograd.let_transforms_begin",
        because="torch.func.grad refuses to begin inside of hooks of saved tensors, and uncompiled forward passes of stage 3"
        " have such hooks, which may rest: gathered weights are saved whole meanwhile",
        reproduction="with torch.autograd.graph.save_on_cpu(): torch.func.grad(torch.sum)(torch.ones(2))",
        without="at stage 3 torch.func.grad, vjp, jacrev and hessian raise in a forward that is not compiled",
    ),
    Patch(
        name="torch._dynamo.eval_frame.cached_backends",
        where="torchloom._torch.module_calls.compiled_call",
        because="Dynamo keeps each backend for good; it is given a weak reference to ours",
        reproduction="compile a function with a callable object, delete both, gc.collect(): a weakref"
        " to the object still finds it",
        without="engines that have ended keep their graphs and weights in memory",
    ),
    Patch(
        name="torch._dynamo.convert_frame.orig_code_map",
        where="torchloom._torch.module_calls.compiled_call",
        because="the entries of a function outlive it; they are dropped when it ends",
        reproduction="compile a function, delete it, gc.collect(): a weakref to its code still finds it",
        without="compiled code of engines that have ended stays in memory",
    ),
    Patch(
        name="torch._dynamo.config.ignore_logging_functions",
        where="torchloom._torch.module_calls.compiled_call",
        because="a call of a logger's `warning_once`, which transformers adds, breaks the graph",
        issue="pytorch/pytorch#132635",
        without="GPT-2 and others are captured in several graphs",
    ),
    Patch(
        name="torch._dynamo.guards.TENSOR_MATCH",
        where="torchloom._torch.module_calls.compiling_again",
        because="there is no guard on `requires_grad` of a module's parameters",
        issue="pytorch/pytorch#139476",
        until="2.11",
        without="parameters that are unfrozen after a compile are not trained",
    ),
    Patch(
        name="torch._dynamo.backends.registry.register_backend",
        where="torchloom._torch.registry.register_backend",
        because="it asks whether the function, not its name, is a key of `_BACKENDS`; the name is"
        " taken out of both tables first",
        reproduction="register_backend of a name that an entry point has: its entry point is replaced"
        " by None",
        until="2.13",
        without="a backend that replaces an entry point is refused as a duplicate",
    ),
    Patch(
        name="torch._dynamo.eval_frame.compile_wrapper",
        where="torchloom._torch.dispatch.let_fall_back",
        because="`suppress_errors` holds for all that compiles while it is set; the callback of one"
        " function is replaced in its closure",
        reproduction="torch._dynamo.config.patch(suppress_errors=True) around a call, and compile"
        " another function meanwhile: its errors are suppressed, too",
        without="under `torchloom.jit` a function that cannot be compiled raises",
    ),
    Patch(
        name="torch._functorch.partitioners.functionalize_rng_ops",
        where="torchloom._torch.aot.trial_partition",
        because="the partitioner renames nodes that draw random numbers twice; in a trial it is"
        " replaced by a function that leaves them",
        reproduction="min_cut_rematerialization_partition of a joint graph with dropout that is"
        " computed again: names of its nodes are not those of the joint graph",
        without="plans do not find the nodes of models with dropout",
    ),
    Patch(
        name="torch._inductor.codecache.CppCodeCache.load_async",
        where="torchloom._torch.standalone.watched_libraries",
        because="an artifact holds sources, which are built again where it is loaded; libraries are"
        " noted while it is made, and given while it is loaded",
        reproduction="standalone_compile(..., aot=True).serialize(), then deserialize it with an empty"
        " TORCHINDUCTOR_CACHE_DIR and no C++ compiler: CppCompileError",
        without="a process that loads programs needs a C++ compiler, and seconds for each kernel",
    ),
    Patch(
        name="torch._inductor.compile_fx._recursive_joint_graph_passes",
        where="torchloom._torch.standalone.before_codegen",
        because="there is no hook between AOTAutograd and Inductor's code generation",
        reproduction="raise from any hook of Inductor's config: AOTAutograd has not traced yet, or code"
        " is generated already",
        without="builds of sizes that cannot be served take as long as others",
    ),
    Patch(
        name="torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symbol",
        where="torchloom._torch.shapes.symbol_ranges",
        because="marks of sizes that share a symbol take no range, and whole numbers take no mark",
        reproduction="maybe_mark_dynamic(x, 0, min=1, max=8): it takes no range",
        without="slices that always lie within a tensor are compiled as if they might not",
    ),
    Patch(
        name="torch._subclasses.fake_tensor.FakeTensorConverter.from_real_tensor",
        where="torchloom._torch.shapes.unknown_values",
        because="Dynamo makes a symbol of the number that a CPU tensor without dims holds, and guards what a model"
        " asks of it; no size of a contract is that number",
        reproduction="mode = FakeTensorMode(shape_env=ShapeEnv());"
        " mode.from_tensor(torch.tensor(3), source=ConstantSource('x')).item() is a symbol with the value 3",
        without="a model that branches on `position.item()` goes the way of the trace in every call",
    ),
    Patch(
        name="torch._inductor.sizevars.SizeVarAllocator.evaluate_min",
        where="torchloom._torch.standalone.symbolic_minimum",
        because="with backed_size_oblivious it raises where no range tells which of two is less",
        reproduction="with backed_size_oblivious, compile y = x.sin(); y[:2] += 1 for a varying size:"
        " TypeError: evaluate_min(2, s77) with unbacked symints",
        without="writes to slices along sizes that vary cannot be compiled",
    ),
    Patch(
        name="c10::FLAGS_caffe2_log_level",
        where="torchloom._torch.distributed.hushed_store",
        because="c10 prints a stack of C++ for each request to a store that has gone, and raises an"
        " error as well; its level of warnings is raised meanwhile",
        reproduction="make two TCPStores, delete the server, call check on the client: stderr has a"
        " stack of C++",
        without="each rank that loses another one prints a page of C++ before the sentence that says so",
    ),
    Patch(
        name="torch._subclasses.fake_tensor.log",
        where="torchloom.last_words.show_last_words",
        because="it logs the stack of an error that is then raised; a filter takes the stack off",
        reproduction="torch.compile a product of tensors whose sizes do not fit: the stack is printed"
        " twice",
        without="the sentence that a rank ends with stands between two stacks",
    ),
)

FACTS = (
    Fact(
        name="torchloom._torch.dynamo.keeps_tangents",
        differs="`backward(ctx, *flat_args)` of AOTAutograd holds the gradients of results through the"
        " whole of backward; later it hands them on in a list that it empties",
        until="2.12",
    ),
    Fact(
        name="torchloom._torch.dynamo.guards_requires_grad",
        differs="Dynamo puts guards on `requires_grad` of a module's parameters; before, a model is"
        " compiled anew where one changes",
        since="2.12",
    ),
    Fact(
        name="torchloom._torch.shapes.takes_bounds",
        differs="`mark_unbacked` takes bounds of a size; before, less can be proven of sizes that"
        " nothing may branch on",
        since="2.12",
    ),
    Fact(
        name="torchloom._torch.full_capture.keeps_floats_by_closure",
        differs="Dynamo keeps what it knows of floats by code and closure; before, by code alone",
        since="2.12",
    ),
    Fact(
        name="torchloom._torch.dispatch.counts_whole_graphs",
        differs="a whole graph (`fullgraph=True`) in whose call nothing compiled runs raises"
        " (pytorch/pytorch#177809)",
        since="2.12",
    ),
    Fact(
        name="torchloom._torch.registry.keeps_tags_by_name",
        differs="tags of backends are kept by name; before, as an attribute of the function",
        since="2.14",
    ),
    Fact(
        name="torchloom._torch.distributed.has_single_names",
        differs="collectives on single tensors have names of their own (`all_gather_single`), and the"
        " older ones warn",
        since="2.13",
    ),
)
