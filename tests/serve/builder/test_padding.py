"""Padding: results do not depend on what is in it, and models whose rows see one another are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from serve.models import Of, Plain, made, rows
from torchloom.errors import ProofError
from torchloom.serve import Dim, build, counter, load

BUCKETS = {"shapes": "bucket", "sizes": [4, 16, 64], "backend": "eager"}


def test_each_call_runs_in_the_next_bucket_and_returns_its_own_rows(tmp_path):
    model = made(Plain)
    with counter.expect(num_compiles=3):
        program = build(model, rows(), **BUCKETS, store=tmp_path)
    assert [str(each.box) for each in program.variants] == [
        "batch 1 to 4",
        "batch 5 to 16",
        "batch 17 to 64",
    ]
    for each in (program, load(tmp_path, model)):
        with torch.no_grad():
            for n in (1, 3, 4, 5, 16, 17, 63, 64):
                x = torch.randn(n, 16)
                torch.testing.assert_close(each(x), model(x))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_what_is_in_the_padding_does_not_reach_results(poison, monkeypatch):
    model = made(Plain)
    program = build(model, rows(), **BUCKETS)
    monkeypatch.setattr(Tensor, "new_zeros", lambda like, shape: like.new_full(shape, poison))
    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x))


SEES_OTHERS = {
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "norm": nn.BatchNorm1d(16, track_running_stats=False),
    "sort": lambda x: x.sort(0)[0],
    "number of rows": lambda x: x + (x == x).sum(),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", SEES_OTHERS)
def test_operators_over_rows_are_refused_with_size_padding_and_result(name):
    with pytest.raises(ProofError) as caught:
        build(Of(SEES_OTHERS[name]).eval(), rows(Dim("batch", 2, 64)), **BUCKETS)
    assert caught.match(
        r"cannot be padded to 4, because at batch 2, with [\w, ]+ in the padding, result: "
    )


class OnlyAt(nn.Module):
    """Leaks at one size alone, where no trace looks."""

    def forward(self, x: Tensor) -> Tensor:
        return leak_at_three(x)


@torch.library.custom_op("serve_padding::leak_at_three", mutates_args=())
def leak_at_three(x: Tensor) -> Tensor:
    """Return the rows, those of three another way."""
    return x * 5 if len(x) == 3 else x.clone()


leak_at_three.register_fake(torch.empty_like)


def test_few_sizes_are_all_tried():
    with pytest.raises(ProofError, match="because at batch 3, "):
        build(made(OnlyAt), rows(), **BUCKETS)


class Growing(nn.Module):
    """Returns rows in several places, and something that does not vary."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"flat": x.reshape(-1, 4), "columns": x.t(), "fixed": torch.ones(3)}


def test_rows_are_cut_wherever_they_are():
    program = build(made(Growing), rows(), **BUCKETS)
    x = torch.randn(5, 16)
    with torch.no_grad():
        found, wanted = program(x), made(Growing)(x)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_operator_that_fails_on_padding_is_refused_in_a_sentence():
    model = Of(lambda x: x.abs().softmax(-1).multinomial(1)).eval()
    with pytest.raises(ProofError, match=r"NaN in the padding, result: .* RuntimeError"):
        build(model, rows(Dim("batch", 1, 64)), **BUCKETS)
