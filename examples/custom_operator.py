"""An operator of one's own, with its backward, in a model that is sharded and compiled.

    torchrun --nproc-per-node 2 examples/custom_operator.py
    torchrun --nproc-per-node 8 examples/custom_operator.py --dim 4096 --steps 100 --backend inductor

A compiler calls an operator and does not look into it, so its body may be a kernel of yours, a library, a branch on data.
`check_op` tries what the operator promises: shapes, strides, what it writes, its derivative. Prints how many inputs
that took, and that losses are those of the same formula written in PyTorch.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchloom


@torchloom.custom_op("examples::swiglu", fake=lambda gate, up: gate.new_empty(gate.shape))
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate) * up).contiguous()  # your kernel


@torchloom.custom_op(
    "examples::swiglu_backward",
    fake=lambda grad, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = gate.sigmoid()
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return (grad * up * slope).contiguous(), (grad * gate * sigmoid).contiguous()


swiglu.register_autograd(
    lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Mlp(nn.Module):
    def __init__(self, dim: int, act) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, 4 * dim), nn.Linear(dim, 4 * dim)
        self.down, self.act = nn.Linear(4 * dim, dim), act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.gate(x), self.up(x)))


def train(act, options: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp(options.dim, act) for _ in range(2)))
    torchloom.shard_model(model, stage=3, persistence_threshold=1000)
    torchloom.compile(model, backend=options.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(options.steps):
        x = torch.randn(16, options.dim, generator=data).to(next(model.parameters()).device)
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with an operator of your own.")
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--backend", default="aot_eager", help="any torch.compile backend")
    options = parser.parse_args()
    own, plain = train(swiglu, options), train(lambda gate, up: F.silu(gate) * up, options)
    torch.testing.assert_close(own, plain)
    if dist.get_rank() == 0:
        report = torchloom.check_op(swiglu, [(torch.randn(4, 8), torch.randn(4, 8))])
        print(report)
        print(f"loss {own[0]:.3f} -> {own[-1]:.3f}, equal to the formula's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
