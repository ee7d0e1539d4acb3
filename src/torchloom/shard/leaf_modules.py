"""Modules of which a rank may use any part: all ranks gather all of their weights, and reduce all of their gradients.

    forward    every weight is gathered when the module is called; what its code reads are these
    backward   before its first operator every weight is gathered again (stage 3), and behind its last one every
               gradient is reduced: zeros for a weight that this rank has not used

So ranks communicate alike whichever experts their tokens choose and whichever branch they take, as long as each calls
the module and uses its result in the loss. DeepSpeed calls such modules leaf modules, as its hooks do not look inside
(`deepspeed/runtime/zero/parameter_offload.py`, `deepspeed/utils/z3_leaf_module.py`).

Autograd runs the nodes of a backward pass in the opposite order of their making, those that are reached. The nodes that
communicate are made before and behind the module's own code, on all ranks in one order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torchloom._torch import modes
from torchloom._torch.untraced import leave_alone
from torchloom.config.model import LeafConfig
from torchloom.errors import ShardError
from torchloom.log import get_logger
from torchloom.shard.layout import Layout
from torchloom.shard.nested import map_tensors
from torchloom.shard.regather import AHEAD, LIVE, GatherCall

logger = get_logger(__name__)

MARK = "_z3_leaf"
"""The attribute by which DeepSpeed's functions mark a module, so that models that they marked need nothing."""


def leaf(*modules: nn.Module) -> None:
    """Mark modules of which each rank may use another part: experts, branches by data, heads of several tasks.

    Call it before the model is sharded. Every rank then gathers all weights of such a module when it is called, and
    reduces all of their gradients behind it in backward; a rank that has not used one adds zeros. A weight that no rank
    used has no gradient in the optimizer's step, as with `DistributedDataParallel(find_unused_parameters=True)`. Compiled
    models run these modules in Python. Every rank must call the module, and its loss must depend on the result.

    Experts of transformers that run with `experts_implementation="eager"` and `nn.AdaptiveLogSoftmaxWithLoss` need no mark.

    Args:
        modules: of one or more models that are not sharded yet. Modules inside of them are part of them. For a
            `ModuleList` or another container that nobody calls stands the module around it.

    Raises:
        ShardError: one is not a module, or is sharded already.

    Example:
        >>> class Experts(torch.nn.ModuleList):
        ...     def forward(self, x, chosen):
        ...         return torch.stack([self[int(i)](row) for i, row in zip(chosen, x)])
        >>> experts = Experts([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        >>> leaf(experts)
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ShardError(f"leaf() marks modules, and was given {module!r}")
        if "_loom_layout" in module.__dict__:
            raise ShardError("leaf() was given a module that is sharded: mark it before")
        setattr(module, MARK, True)


def mark_leaves(model: nn.Module, config: LeafConfig) -> None:
    """Mark the modules that a config names; warn of a name that no module has.

    Args:
        model: not sharded yet.
        config: the section `zero_optimization.leaf_module`.
    """
    found: set[str] = set()
    for path, module in model.named_modules():
        kind = type(module)
        fitting = {
            *({kind.__name__, f"{kind.__module__}.{kind.__qualname__}"} & {*config.classes}),
            *({path} & {*config.names}),
            *(each for each in config.name_suffixes if path.endswith(each)),
        }
        if fitting:
            leaf(module)
            found |= fitting
    for each in (*config.classes, *config.names, *config.name_suffixes):
        if each not in found:
            logger.warning("zero_optimization.leaf_module: no module of the model is %r", each)


def is_leaf(module: nn.Module) -> bool:
    """Say whether a module is marked, or is known to use other parts on each rank."""
    mark = getattr(module, MARK, None)
    if mark is not None:
        return bool(mark)
    # transformers.integrations.moe.use_experts_implementation gives modules of experts the attribute.
    is_of_experts = hasattr(module, "is_concatenated")
    config = getattr(module, "config", None)
    return isinstance(module, nn.AdaptiveLogSoftmaxWithLoss) or (
        is_of_experts and getattr(config, "_experts_implementation", None) == "eager"
    )


def leaves_of(model: nn.Module) -> list[str]:
    """Return the path of each leaf module that lies in no other one.

    Raises:
        ShardError: a container is marked that no module of the model calls.
    """
    modules = dict(model.named_modules())
    marked = {_called(path, modules) for path, module in modules.items() if is_leaf(module)}
    return [path for path in modules if path in marked and marked.isdisjoint(_around(path))]


def _around(path: str) -> list[str]:
    """Return the paths of the modules around one, the closest first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in reversed(range(len(parts)))]


def _called(path: str, modules: dict[str, nn.Module]) -> str:
    """Return the path of a module, or of the closest one around it whose forward reaches a container's parts."""
    for each in (path, *_around(path)):
        if type(modules[each]).forward is not nn.Module.forward:
            return each
    raise ShardError(
        f"{path or 'the model'} is marked as a leaf module, a {type(modules[path]).__name__} that nobody calls: mark "
        "the module whose forward chooses among its parts"
    )


class Weight(NamedTuple):
    """Where a weight of a leaf module is read."""

    module: nn.Module
    attr: str
    param: nn.Parameter
    handle: str
    """Of the communicator over which it is gathered."""
    num_bytes: int
    """Of the whole weight, and of its whole gradient."""


def weights_of(path: str, modules: dict[str, nn.Module], layout: Layout) -> list[Weight]:
    """Return the weights below a module that ranks gather or whose gradients are averaged in backward."""
    found: list[Weight] = []
    inside = {*modules[path].modules()}  # not by paths: a module may be in several
    for spec in layout:
        for owner in spec.owners if spec.mode != "whole" else ():
            module = modules[owner.module]
            if module in inside:
                param = module._parameters[owner.attr]
                assert param is not None
                copies = 2 if spec.requires_grad else 1
                num_bytes = copies * spec.numel * spec.compute_dtype.itemsize
                found.append(Weight(module, owner.attr, param, layout.handle, num_bytes))
                break
    return found


def leaf_bytes(model: nn.Module) -> int:
    """Return the bytes that the largest leaf module gathers, with gradients; one runs at a time."""
    leaves = [vars(each).get("_loom_leaf", ()) for each in model.modules()]
    return max((sum(weight.num_bytes for weight in each) for each in leaves), default=0)


HELD: dict[int, Tensor] = {}
"""What modules hand out for parameters, by id: gathered weights of leaf modules that run now, and parameters that owners step."""

_USED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> its communicator's handle, and whether this rank has used it in a leaf module since the last step."""


def leaf_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `forward` of a leaf module's class; the module has its weights in `_loom_leaf`."""

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights: list[Weight] = self._loom_leaf
        is_open = any(id(each.param) in HELD for each in weights)  # inside of itself
        if not weights or is_open or modes.transform_level() is not None:
            return forward(self, *args, **kwargs)
        call = _Call(weights)
        made = [getattr(each.module, each.attr) for each in weights]
        token = None
        if torch.is_grad_enabled():
            _forget_thrown_away(weights)
            call.again = LIVE.ways_to(made)
            anchor = torch.zeros((), device=made[0].device, requires_grad=True)
            token, *made = _Entry.apply(call, anchor, *made)
        held = {id(each.param): weight for each, weight in zip(weights, made, strict=True)}
        HELD.update(held)
        try:
            result = forward(self, *args, **kwargs)
        finally:
            for key in held:
                del HELD[key]
        if token is None:
            return result

        def behind(output: Tensor) -> Tensor | None:
            is_plain = output.is_floating_point() or output.is_complex()
            return _Exit.apply(call, token, output) if is_plain else None

        return map_tensors(result, behind)

    leave_alone(run, "each rank may use another part of a leaf module")  # type: ignore[arg-type]
    return run


class _Call:
    """One call of a leaf module, from its forward to the end of its backward."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = weights
        self.again: list[GatherCall | Tensor] = []
        """How to have each weight in backward; empty where a checkpoint around the module calls it again there."""

    def gather_ahead(self) -> None:
        """Gather weights again on all ranks, before those that this rank's operators saved are asked for.

        What a checkpoint inside of the module computes again reads them, too; one that is reentrant sends them gradients.
        """
        if self in _OPEN:  # another result of the module
            return
        _OPEN.append(self)
        for weight, each in zip(self.weights, self.again, strict=False):
            if isinstance(each, GatherCall):
                each = AHEAD.setdefault(each.key, each.gathered())
            HELD[id(weight.param)] = each.detach().requires_grad_(weight.param.requires_grad)

    def let_go(self) -> list[Tensor | None]:
        """Let go of weights that were gathered ahead; return the gradients that were sent to them."""
        if self in _OPEN:
            _OPEN.remove(self)
        for each in self.again:
            if isinstance(each, GatherCall):
                AHEAD.pop(each.key, None)
        held = [HELD.pop(id(each.param), None) for each in self.weights]
        return [None if each is None else each.grad for each in held]

    def close(self, grads: Iterable[Tensor | None]) -> list[Tensor | None]:
        """End the call's backward: return the gradients of its weights, and note which have one."""
        pairs = zip(grads, self.let_go(), strict=True)
        found = [
            a + b if a is not None and b is not None else a if b is None else b for a, b in pairs
        ]
        for weight, grad in zip(self.weights, found, strict=True):
            _, was_used = _USED.get(weight.param, ("", False))
            _USED[weight.param] = (weight.handle, was_used or grad is not None)
        return found


_OPEN: list[_Call] = []
"""Calls whose backward has begun, and has not ended."""


def let_go_of_weights() -> None:
    """Let go of what leaf modules gathered in a backward pass that has failed."""
    for call in [*_OPEN]:
        call.let_go()


class _Entry(torch.autograd.Function):
    """Hands the weights to the module; its backward runs on every rank, as the token asks for it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.device = call, anchor.device
        ctx.metas = [(each.shape, each.dtype) for each in weights]
        ctx.set_materialize_grads(False)
        handed = [each.detach() for each in weights]
        frozen = [h for h, each in zip(handed, weights, strict=True) if not each.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return (anchor.detach(), *handed)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        _token, *grads = grad_outputs
        found = [
            torch.zeros(shape, dtype=dtype, device=ctx.device)
            if grad is None and is_asked
            else grad
            for grad, (shape, dtype), is_asked in zip(
                ctx.call.close(grads), ctx.metas, ctx.needs_input_grad[2:], strict=True
            )
        ]
        return (None, None, *found)


class _Exit(torch.autograd.Function):
    """Hands on a result of the module; its backward runs before that of the module's own operators."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor, output: Tensor) -> Tensor:
        ctx.call = call
        # A checkpoint around the module is computed again when a saved tensor is asked for: on all ranks here.
        ctx.save_for_backward(token)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (token,) = ctx.saved_tensors
        ctx.call.gather_ahead()
        return None, torch.zeros_like(token), *grad_outputs


def _forget_thrown_away(weights: Iterable[Weight]) -> None:
    """Forget what a backward pass has used whose gradients nobody keeps."""
    for each in weights:
        if each.param.grad is None:
            _USED.pop(each.param, None)


def used_params(params: Iterable[nn.Parameter]) -> dict[str, dict[nn.Parameter, bool]]:
    """Return which parameters of leaf modules this rank has used, by handle, and forget it.

    A parameter that leaf modules do not use, and something else does, has a gradient other than zeros.

    Args:
        params: about to be stepped, in the same order on all ranks; those without a gradient are left out.
    """
    found: dict[str, dict[nn.Parameter, bool]] = {}
    for param in params:
        if param in _USED and param.grad is not None:
            handle, is_used = _USED.pop(param)
            found.setdefault(handle, {})[param] = is_used or bool(param.grad.any())
    return found
