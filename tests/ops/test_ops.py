"""Operators: the fakes tell the truth, the gradients are each other's transposes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from support.pool import run_ranks
from torchloom import ops
from torchloom.runtime import get_communicator

F32, BF16 = torch.float32, torch.bfloat16


def calls(handle: str) -> list[tuple[object, tuple[object, ...]]]:
    """Every operator with arguments that exercise casts and padding."""
    shard, grad = torch.randn(11), torch.randn(3, 7)
    return [
        (ops.gather, (shard, [3, 7], BF16, F32, handle, "p")),
        (ops.reduce, (grad, 11, F32, BF16, handle, "p")),
        (ops.replicate, (grad.t(), BF16, F32, handle, "p")),
        (ops.sync, (grad.to(BF16), F32, F32, False, handle, "p")),
        (ops.sync, (grad, F32, F32, True, handle, "p")),
        (ops.gather_start, ([shard, shard[:4].clone()], ["a", "b"], F32, 2, handle)),
        (ops.reduce_start, ([grad, grad.t()], ["a", "b"], [11, 11], F32, F32, handle)),
        (ops.sync_start, ([grad, grad[0]], ["a", "b"], F32, F32, False, handle)),
    ]


def described(value: object) -> list[tuple[object, ...]]:
    tensors = value if isinstance(value, list) else [value]
    return [(tuple(t.shape), t.stride(), t.dtype, t.storage_offset()) for t in tensors]


def test_fakes_tell_the_truth() -> None:
    def fn(rank):
        comm = get_communicator(dist.group.WORLD)
        differing = []
        for op, args in calls(comm.handle):
            real = op(*args)
            if op in (ops.gather_start, ops.reduce_start, ops.sync_start):
                ops.wait_(real, args[0], comm.handle)
            with FakeTensorMode() as mode:
                to_fake = lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a  # noqa: E731
                fakes = [
                    [to_fake(i) for i in a] if isinstance(a, list) else to_fake(a) for a in args
                ]
                fake = op(*fakes)
            if described(real) != described(fake):
                differing.append((str(op), described(real), described(fake)))
        return differing

    assert run_ranks(2, fn)[0] == []


def test_gradient_of_a_gather_is_the_mean_shard() -> None:
    def fn(rank):
        handle = get_communicator(dist.group.WORLD).handle
        shard = torch.randn(11, requires_grad=True)
        weight = ops.gather(shard, [3, 7], F32, F32, handle, "p")
        (weight * (rank + 1)).sum().backward()
        return shard.grad

    first, second = run_ranks(2, fn)
    assert torch.equal(first, torch.full((11,), 1.5))
    assert torch.equal(second, torch.tensor([1.5] * 10 + [0.0]))  # the last is padding


def test_gradient_of_a_copy_is_the_mean() -> None:
    def fn(rank):
        handle = get_communicator(dist.group.WORLD).handle
        whole = torch.ones(5, requires_grad=True)
        (ops.replicate(whole, F32, F32, handle, "p") * (rank + 1)).sum().backward()
        return whole.grad

    assert all(torch.equal(grad, torch.full((5,), 1.5)) for grad in run_ranks(2, fn))
