"""A model that branches on its batch size: refused, split into two programs, or hidden in an operator.

python examples/serve_hidden_branch.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torchloom
from torchloom.errors import ProofError
from torchloom.serve import Contract, Dim, build


@torchloom.custom_op("examples::scaled", fake=torch.empty_like)
def scaled(x: Tensor) -> Tensor:
    """Scale small batches differently."""
    return x * 2 if x.shape[0] >= 4 else x * 100


class Branching(nn.Module):
    """Branches on its batch size in `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return torch.relu(x * 2 if x.shape[0] >= 4 else x * 100)


class Hiding(nn.Module):
    """Decides in an operator, which compilers call and do not look into."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return torch.relu(scaled(x))


def main() -> None:
    """Serve both models for batches of 1 to 64."""
    contract = Contract({"x": (Dim("batch", 1, 64), 8)})
    open_model, hiding_model = Branching().eval(), Hiding().eval()
    try:
        build(open_model, contract, shapes="prove")
    except ProofError as error:
        print(f"refused:\n{error}\n")
    split = build(open_model, contract, shapes="split")
    hidden = build(hiding_model, contract)
    for name, program in (("split", split), ("hidden", hidden)):
        print(f"{name}: programs for {'; '.join(str(each.box) for each in program.variants)}")
        with torch.no_grad():
            for size in (1, 3, 4, 64):
                x = torch.randn(size, 8)
                torch.testing.assert_close(program(x), open_model(x))
    torchloom.check_op(scaled, [(torch.randn(4, 8),)])
    print("the operator keeps what it promises")


if __name__ == "__main__":
    main()
