"""What this rank's optimizer steps: shards, slices of whole parameters, or whole parameters.

sharded   the parameter itself, which holds this rank's piece     (stages 2 and 3)
sliced    a leaf that shares memory with its slice of the weight  (stage 1)
whole     the parameter itself, equal on all ranks                (stage 0, small parameters)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchloom.errors import EngineError, ShardError
from torchloom.runtime import Communicator
from torchloom.shard import Layout, ParamSpec, owners_of
from torchloom.shard.pieces import clear_padding_, padded_flat


@dataclass(frozen=True)
class Leaf:
    """One trainable parameter and what the optimizer steps for it."""

    spec: ParamSpec
    param: nn.Parameter
    """The model's parameter."""
    leaf: nn.Parameter
    """What the optimizer holds; the same object unless sliced."""

    @property
    def is_divided(self) -> bool:
        """Whether each rank of the shard group steps a different piece."""
        return self.spec.mode == "sharded" or self.spec.is_sliced


class LocalParams:
    """The trainable parameters of a sharded model, as this rank's optimizer sees them."""

    def __init__(self, model: nn.Module, layout: Layout, comm: Communicator) -> None:
        self._layout, self._comm = layout, comm
        params = owners_of(model)
        self._leaves = [
            Leaf(spec, params[spec.name], self._leaf(spec, params[spec.name]))
            for spec in layout
            if spec.requires_grad
        ]
        self._frozen = [(spec.name, params[spec.name]) for spec in layout if not spec.requires_grad]

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._leaves)

    def check(self, params: Mapping[str, nn.Parameter]) -> None:
        """Raise unless these are the parameters that the optimizer steps.

        Raises:
            ShardError: one has been assigned anew, or was frozen when the model was sharded and is
                trained now; the optimizer would not train it.
        """
        for name, param in self._frozen:
            if param.requires_grad:
                raise ShardError(
                    f"parameter {name!r} was frozen when the model was sharded and requires a gradient "
                    "now: its gradient would be lost. Leave all parameters that will be trained "
                    "unfrozen until torchloom.initialize has returned, and freeze them then"
                )
        for each in self._leaves:
            if params[each.spec.name] is not each.param:
                raise ShardError(
                    f"parameter {each.spec.name!r} is assigned anew after the model was sharded: "
                    "the optimizer would not train the new one; write values into it inside "
                    "torchloom.shard.gathered(..., modifier_rank=0), or compute the weight in forward "
                    "as a plain tensor"
                )

    def _leaf(self, spec: ParamSpec, param: nn.Parameter) -> nn.Parameter:
        if not spec.is_sliced:
            return param
        return nn.Parameter(self._slice(param.data))

    def _slice(self, whole: Tensor) -> Tensor:
        """View this rank's slice of a weight in padded storage."""
        flat = padded_flat(whole, self._layout.world_size)
        return flat.view(self._layout.world_size, -1)[self._layout.rank]

    def collect_gradients(self, *, reduce: bool, bucket_bytes: int) -> None:
        """Give every leaf the gradient that its optimizer steps with.

        Args:
            reduce: gradients have accumulated locally and are averaged now; otherwise the backward
                pass has averaged them.
            bucket_bytes: how much is averaged at a time.
        """
        present = self._agree_on_used() if reduce else self._with_gradient()
        if reduce and self._layout.num_ranks > 1:
            self._average(present, bucket_bytes)
        for each in present:
            if each.leaf is each.param:
                continue
            if each.param.grad is not None:
                each.leaf.grad = _slice_of_gradient(each, self._layout)
                each.param.grad = None
        for each in self._leaves:  # hooks and noise of users may have written there
            if each.is_divided and each.leaf.grad is not None:
                clear_padding_(each.leaf.grad, each.spec.numel, self._layout.rank)

    def _with_gradient(self) -> list[Leaf]:
        return [each for each in self._leaves if each.param.grad is not None]

    def _agree_on_used(self) -> list[Leaf]:
        """Return the leaves that any rank has a gradient for; the others contribute zeros."""
        if self._layout.num_ranks == 1:
            return self._with_gradient()
        used = torch.tensor(
            [each.param.grad is not None for each in self._leaves], dtype=torch.int32
        )
        if self._leaves:
            used = used.to(self._leaves[0].param.device)
        total = self._comm.begin_sync(
            [used.float()], torch.float32, torch.float32, ("which parameters have a gradient",)
        )
        self._comm.wait(total)
        chosen = [e for e, share in zip(self._leaves, total[0].tolist(), strict=True) if share > 0]
        for each in chosen:
            if each.param.grad is None:
                each.param.grad = torch.zeros_like(each.param)
        return chosen

    def _average(self, leaves: list[Leaf], bucket_bytes: int) -> None:
        """Average in buckets; one bucket is on the wire while the next one is packed."""
        previous: tuple[list[Leaf], list[Tensor]] | None = None
        for bucket in _buckets(leaves, bucket_bytes):
            started = (bucket, self._begin(bucket))
            if previous is not None:
                self._finish(*previous)
            previous = started
        if previous is not None:
            self._finish(*previous)

    def _begin(self, bucket: list[Leaf]) -> list[Tensor]:
        spec, names = bucket[0].spec, [each.spec.name for each in bucket]
        grads = [_gradient(each) for each in bucket]
        if not spec.is_sliced:
            return self._comm.begin_sync(grads, spec.dtype, spec.wire_dtype, names)
        numels = [each.leaf.numel() for each in bucket]
        return self._comm.begin_reduce(grads, numels, spec.dtype, spec.wire_dtype, names)

    def _finish(self, bucket: list[Leaf], results: list[Tensor]) -> None:
        self._comm.wait(results)
        for each, mean in zip(bucket, results, strict=True):
            each.param.grad = None
            each.leaf.grad = mean

    def publish(self) -> None:
        """After a step, give all ranks the slices that each rank has stepped (stage 1)."""
        sliced = [each for each in self._leaves if each.spec.is_sliced]
        shards = [each.leaf.detach() for each in sliced]
        fulls = [padded_flat(each.param.data, self._layout.world_size) for each in sliced]
        if shards:
            self._comm.gather_into(shards, fulls, [each.spec.name for each in sliced])

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of divided and of whole leaves."""
        divided = [e.leaf.grad for e in self._leaves if e.is_divided and e.leaf.grad is not None]
        whole = [e.leaf.grad for e in self._leaves if not e.is_divided and e.leaf.grad is not None]
        return divided, whole

    def divided(self) -> dict[int, ParamSpec]:
        """Return the facts about the leaves that are pieces, by the leaf's id."""
        return {id(each.leaf): each.spec for each in self._leaves if each.is_divided}

    def named_gradients(self) -> tuple[list[str], list[Tensor | None]]:
        """Return the names of all leaves and their gradients, in the model's order."""
        return [e.spec.name for e in self._leaves], [e.leaf.grad for e in self._leaves]

    def versions(self) -> list[tuple[int, int] | None]:
        """Return what tells whether a backward pass has added to a gradient since, for each leaf."""
        grads = (each.param.grad for each in self._leaves)
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for each in self._leaves:
            each.param.grad = None
            each.leaf.grad = None

    def replace_in(self, groups: Iterable[dict[str, list[nn.Parameter]]]) -> None:
        """Let an optimizer's groups step this rank's leaves instead of the model's parameters.

        Raises:
            EngineError: a group holds a parameter that the model does not own.
        """
        leaf_of = {id(each.param): each.leaf for each in self._leaves}
        known = leaf_of | {id(each.leaf): each.leaf for each in self._leaves}
        for index, group in enumerate(groups):
            for param in group["params"]:
                if id(param) not in known and param.requires_grad:
                    raise EngineError(
                        f"the optimizer's group {index} holds a parameter of shape "
                        f"{tuple(param.shape)} that is not one of the model's trainable "
                        "parameters: build the optimizer from model.parameters() of the model "
                        "that you pass to torchloom.initialize"
                    )
            group["params"] = [known[id(p)] for p in group["params"] if id(p) in known]


def _gradient(each: Leaf) -> Tensor:
    grad = each.param.grad
    assert grad is not None, each.spec.name
    return grad


def _slice_of_gradient(each: Leaf, layout: Layout) -> Tensor:
    """Cut this rank's slice out of a gradient whose own slice is averaged."""
    numel = each.leaf.numel()
    flat = _gradient(each).reshape(-1)[layout.rank * numel : (layout.rank + 1) * numel]
    if flat.numel() == numel:
        return flat
    return torch.nn.functional.pad(flat, (0, numel - flat.numel()))


def _buckets(leaves: list[Leaf], bucket_bytes: int) -> Iterator[list[Leaf]]:
    """Group leaves of one kind, in order, until their gradients reach `bucket_bytes`."""
    groups: dict[tuple[object, ...], list[Leaf]] = {}
    for each in leaves:
        key = (each.spec.is_sliced, each.spec.dtype, each.spec.wire_dtype)
        group = groups.setdefault(key, [])
        group.append(each)
        if sum(g.spec.numel * g.spec.dtype.itemsize for g in group) >= bucket_bytes:
            yield groups.pop(key)
    yield from groups.values()
