"""One compile for every size; what decides by size is refused with line and sizes, or split."""

from __future__ import annotations

import random

import pytest
import torch

from serve.models import Branching, Pinned, Plain, Squeezing, Striding, Viewed, made, rows
from torchloom.errors import ContractError, ProofError, ServeError
from torchloom.events import ProgramReady, Recorder
from torchloom.serve import Contract, Dim, build, counter, tensor


def shuffled(low: int, high: int) -> list[int]:
    sizes = list(range(low, high + 1))
    random.Random(0).shuffle(sizes)
    return sizes


def test_one_compile_serves_every_size_in_any_order():
    model = made(Plain)
    with counter.expect(num_compiles=1, num_pieces=1, num_traces=1):
        program = build(model, rows())
    with counter.expect(num_compiles=0, num_traces=0, num_eager_calls=0), torch.no_grad():
        for n in shuffled(1, 64):
            x = torch.randn(n, 16)
            torch.testing.assert_close(program(x), model(x))


def test_a_branch_on_the_size_is_refused_with_line_and_sizes():
    with pytest.raises(ProofError, match=r"batch 1 to 3") as caught:
        build(made(Branching), rows(), shapes="prove", backend="eager")
    assert "models.py" in str(caught.value)
    assert "shapes='split'" in str(caught.value)


def test_a_branch_is_split_into_programs_that_are_each_right():
    program = build(made(Branching), rows(), shapes="split", backend="eager")
    assert [str(each.box) for each in program.variants] == ["batch 1 to 3", "batch 4 to 64"]
    with torch.no_grad():
        for n in shuffled(1, 64):
            x = torch.randn(n, 16)
            assert torch.equal(program(x), made(Branching)(x)), n


def test_what_changes_at_one_row_without_a_guard_is_found_by_running_it():
    with pytest.raises(ProofError, match=r"at batch 1.*sizes \[16\], compiled \[1, 16\]"):
        build(made(Squeezing), rows(), shapes="prove")
    program = build(made(Squeezing), rows(), shapes="split")
    assert [str(each.box) for each in program.variants] == ["batch 1", "batch 2 to 64"]
    with torch.no_grad():
        for n in (1, 2, 64):
            x = torch.randn(n, 16)
            torch.testing.assert_close(program(x), made(Squeezing)(x))


def test_a_property_of_strides_is_never_silently_wrong():
    program = build(made(Striding), rows(), shapes="split", backend="eager")
    with torch.no_grad():
        for n in (1, 2, 3, 64):
            x = torch.randn(n, 16)
            assert torch.equal(program(x), made(Striding)(x)), n


@pytest.mark.parametrize(
    ("kind", "sizes", "text"),
    [
        (Pinned, (2, 8), "not true for batch 2 to 7"),
        (Viewed, (1, 9), "not true for batch 1 to 2, 4 to 5"),
    ],
)
def test_a_hidden_size_is_reported_with_the_sizes_that_it_forbids(kind, sizes, text):
    with pytest.raises(ProofError, match=text):
        build(made(kind), rows(Dim("batch", *sizes)), backend="eager")


@pytest.mark.parametrize("n", [0, 65])
def test_a_call_outside_of_the_range_names_argument_dim_value_and_range(n):
    program = build(made(Plain), rows(), backend="eager")
    with torch.no_grad(), pytest.raises(ContractError) as caught:
        program(torch.zeros(n, 16))
    assert str(caught.value) == f"size 0 of 'x' (batch) is {n}, the contract allows 1 to 64"


def test_a_call_outside_of_the_range_runs_eagerly_where_that_is_wanted():
    model = made(Plain)
    program = build(model, rows(), backend="eager", out_of_range="eager")
    x = torch.randn(65, 16)
    with torch.no_grad(), counter.expect(num_eager_calls=1, num_compiles=0):
        assert torch.equal(program(x), model(x))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: p(torch.zeros(4, 16, dtype=torch.float64)), "float64, the contract wants"),
        (lambda p: p(torch.zeros(16, 4).t()), "not contiguous"),
        (lambda p: p(torch.zeros(4, 15)), "size 1 of 'x' is 15"),
    ],
)
def test_a_call_that_breaks_the_contract_says_how(call, text):
    program = build(made(Plain), rows(), backend="eager")
    with torch.no_grad(), pytest.raises(ContractError, match=text):
        call(program)


def test_gradients_and_training_mode_are_part_of_the_contract():
    model = made(Plain)
    program = build(model, rows(), backend="eager")
    with pytest.raises(ContractError, match="no_grad"):
        program(torch.zeros(4, 16))
    with torch.inference_mode():
        program(torch.zeros(4, 16))
    model.train()
    with torch.no_grad(), pytest.raises(ContractError, match="eval"):
        program(torch.zeros(4, 16))


def test_two_sizes_vary_independently():
    class Scores(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.softmax(a @ b.transpose(1, 2), -1)

    batch, one, other = Dim("batch", 1, 5), Dim("one", 1, 9), Dim("other", 2, 9)
    contract = Contract({"a": (batch, one, 4), "b": (batch, other, 4)})
    program = build(made(Scores), contract, shapes="split", backend="eager")
    with torch.no_grad():
        for sizes in ((1, 1, 2), (5, 9, 9), (2, 9, 3), (3, 3, 3)):
            a, b = torch.randn(sizes[0], sizes[1], 4), torch.randn(sizes[0], sizes[2], 4)
            torch.testing.assert_close(program(a, b), made(Scores)(a, b))
        with pytest.raises(ContractError, match="elsewhere in the call it is 2"):
            program(torch.zeros(2, 3, 4), torch.zeros(3, 3, 4))


def test_builds_and_loads_are_events_for_the_record(tmp_path):
    with Recorder() as heard:
        build(made(Branching), rows(), shapes="split", backend="eager", store=tmp_path)
        build(made(Branching), rows(), shapes="split", backend="eager", store=tmp_path)
    built, loaded = (event for event in heard.events if isinstance(event, ProgramReady))
    assert (built.origin, loaded.origin) == ("built", "loaded")
    assert built.boxes == ("batch 1 to 3", "batch 4 to 64") == loaded.boxes
    assert any("holds for every size: batch >= 4" in verdict for verdict in built.verdicts)
    assert loaded.verdicts == built.verdicts
    assert built.num_calls == loaded.num_calls == (1, 1)
    assert built.seconds > 0
    assert loaded.seconds > 0
    assert built.contract.startswith("Contract")


def test_what_a_compiler_assumed_of_a_piece_holds_wherever_the_piece_is_used_again():
    def backend(graph_module, inputs):
        for size, least in zip(
            [x for x in inputs if isinstance(x, torch.SymInt)], (3, 5), strict=False
        ):
            bool(size >= least)  # a guard, as heuristics of compilers leave them
        return graph_module.forward

    contract = Contract({"x": (Dim("a", 1, 8), Dim("b", 1, 9), 4)})
    program = build(made(Squeezing), contract, shapes="split", backend=backend, check="off")
    assert [str(each.box) for each in program.variants] == [
        "a 1 to 2, b 1 to 4",
        "a 1 to 2, b 5 to 9",
        "a 3 to 8, b 1 to 4",
        "a 3 to 8, b 5 to 9",
    ]


class ByValue(torch.nn.Module):
    """Reads a number from an argument, or from a buffer."""

    def __init__(self, read) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(2))
        self.read = read

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return self.read(x, at, self.step)


@pytest.mark.parametrize(
    "read",
    [
        lambda x, at, step: x * 2 if at.item() > 3 else x,
        lambda x, at, step: x * 2 if step.item() > 3 else x,
    ],
)
def test_a_branch_on_a_number_that_a_tensor_holds_is_refused(read):
    contract = Contract({"x": (Dim("batch", 1, 4), 8), "at": tensor(dtype=torch.int64, below=8)})
    with pytest.raises(
        ServeError, match=r"decides by a number that a tensor holds at .*test_build.*torch.where"
    ):
        build(made(ByValue, read), contract, backend="eager")


def test_a_number_that_a_tensor_holds_is_another_in_each_call():
    def read(x, at, step):
        number = at.item()
        torch._check(number >= 0)
        torch._check(number < 8)
        return x[:, : number + 1].sum(1) * number + step.item()

    contract = Contract({"x": (Dim("batch", 1, 4), 8), "at": tensor(dtype=torch.int64, below=8)})
    model = made(ByValue, read)
    program, x = build(model, contract, backend="eager"), torch.randn(3, 8)
    with torch.no_grad():
        for number in range(8):
            model.step.fill_(number)
            at = torch.tensor(number)
            torch.testing.assert_close(program(x, at), model(x, at))


def test_cuts_are_bounded_and_told_early(monkeypatch, caplog):
    monkeypatch.setattr("torchloom.serve.builder.builder._MOST_SECONDS", 0)
    with (
        caplog.at_level("INFO", "torchloom"),
        pytest.raises(ProofError, match="half an hour for batch 1 to 64 allows"),
    ):
        build(made(Branching), rows(), backend="eager")
    assert "batch 1 to 64 is cut at [4]; each part is a program, of at most 32" in caplog.text
