"""Sizes in steps, sizes that follow from others, and numbers that vary."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from serve.models import Blocks
from torchloom.errors import ContractError, ProofError, ServeError
from torchloom.serve import Contract, Dim, build, load, number, tensor
from torchloom.serve.contract.box import Box

SMALL = Dim("batch", 1, 8)
LENGTH = Dim("length", 1, 100, multiple_of=8)


BLOCKS = Contract({"x": (SMALL, LENGTH), "pairs": (2 * SMALL, LENGTH)})


def test_steps_round_inwards_and_say_where_they_are_empty():
    assert Dim("length", 8, 96, multiple_of=8) == LENGTH
    assert list(LENGTH.sizes)[:2] == [8, 16]
    assert 12 not in LENGTH
    assert str(LENGTH) == "length 8 to 96 in multiples of 8"
    with pytest.raises(ContractError, match="in multiples of 8: there is none"):
        Dim("n", 1, 7, multiple_of=8)
    with pytest.raises(ContractError, match="give whole numbers"):
        Dim("n", 1, 7.0)
    parts = Box.of([LENGTH]).cut("length", [9, 50])
    assert [str(part) for part in parts] == [
        "length 8",
        "length 16 to 48 in multiples of 8",
        "length 56 to 96 in multiples of 8",
    ]
    assert all(size in LENGTH for sizes in Box.of([LENGTH]).edges() for size in sizes.values())


def test_sizes_that_follow_are_whole_numbers_times_and_plus():
    size = 2 * (SMALL + 3) - 1
    assert (size.text, size.of(4), size.value_at(13), size.value_at(14)) == (
        "2*batch+5",
        13,
        4,
        None,
    )
    assert SMALL * 2 == 2 * SMALL
    for wrong in (lambda: SMALL * 0, lambda: SMALL * 1.5, lambda: SMALL + 0.5):
        with pytest.raises(ContractError, match="is a whole number times it"):
            wrong()
    with pytest.raises(ContractError, match="it may be -1"):
        tensor(SMALL - 2)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_blocks_of_eight_and_pairs_of_rows(backend, tmp_path):
    model = Blocks().eval()
    with torch.no_grad():
        built = build(
            *(model, BLOCKS),
            shapes="split",
            backend=backend,
            sizes={"length": [16]},
            store=tmp_path,
        )
        for program in (built, load(tmp_path, model), load(tmp_path, model, BLOCKS)):
            assert program.contract.to_json() == BLOCKS.to_json()
            for rows, length in ((1, 8), (3, 16), (8, 96), (5, 40)):
                args = torch.randn(rows, length), torch.randn(2 * rows, length)
                torch.testing.assert_close(program(*args), model(*args))
            for shape, other, text in (
                (
                    (2, 12),
                    (4, 12),
                    r"length\) is 12, the contract allows 8 to 96 in multiples of 8",
                ),
                (
                    (2, 8),
                    (5, 8),
                    r"size 0 of 'pairs' \(2\*batch\) is 5, the contract allows it for batch 1",
                ),
                ((2, 8), (6, 8), r"\(2\*batch\) is 6, elsewhere in the call it is 4"),
                ((2, 8), (18, 8), r"\(2\*batch\) is 18"),
            ):
                with pytest.raises(ContractError, match=text):
                    program(torch.randn(shape), torch.randn(other))


def test_a_model_that_asserts_divisibility_is_told_how_to_promise_it():
    free = Dim("length", 1, 100)
    with torch.no_grad(), pytest.raises(ServeError, match=r"Dim\(\.\.\., multiple_of=8\)"):
        build(Blocks().eval(), Contract({"x": (SMALL, free), "pairs": (2 * SMALL, free)}))


def test_a_size_may_be_given_by_what_follows_from_it():
    blocks = Dim("blocks", 1, 12)

    class Double(nn.Module):
        def forward(self, x):
            return x.unflatten(0, (-1, 8)).sum(1)

    model = Double().eval()
    with torch.no_grad():
        program = build(model, Contract({"x": (8 * blocks, 3)}), backend="eager")
        for n in (1, 5, 12):
            x = torch.randn(8 * n, 3)
            assert torch.equal(program(x), model(x))
        with pytest.raises(ContractError, match=r"\(8\*blocks\) is 12, the contract allows it for"):
            program(torch.randn(12, 3))


class Shifted(nn.Module):
    """Takes a whole number and a float."""

    def forward(self, x, n: int, scale: float):
        rows = torch.arange(n, n + x.shape[0]).unsqueeze(1)
        return torch.softmax(x * scale + n, -1) * (n + 1) + rows * scale**2


NUMBERS = Contract({"x": (SMALL, 7), "n": Dim("n", 0, 50), "scale": number(0.0, 2.0)})


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_numbers_that_vary(backend, tmp_path):
    model = Shifted().eval()
    with torch.no_grad():
        built = build(model, NUMBERS, shapes="split", backend=backend, store=tmp_path)
        for program in (built, load(tmp_path, model)):
            for rows, n, scale in ((1, 0, 0.0), (3, 1, 1.0), (8, 50, 2.0), (5, 33, 0.7)):
                x = torch.randn(rows, 7)
                torch.testing.assert_close(program(x, n, scale), model(x, n, scale))
                torch.testing.assert_close(program(x, n=n, scale=scale), model(x, n, scale))
            x = torch.randn(2, 7)
            for n, scale, text in (
                (51, 1.0, r"'n' \(n\) is 51, the contract allows 0 to 50"),
                (-1, 1.0, "'n'"),
                (True, 1.0, "'n' is True, the contract wants int n"),
                (2.0, 1.0, "'n' is 2.0"),
                (2, 1, "'scale' is 1, the contract wants float 0.0 to 2.0"),
                (2, 2.5, "the contract allows 0.0 to 2.0"),
                (2, float("nan"), "'scale' is nan"),
            ):
                with pytest.raises(ContractError, match=text):
                    program(x, n, scale)


class Loops(nn.Module):
    def forward(self, x, n: int):
        for _ in range(n):
            x = x * 2
        return x


class Decides(nn.Module):
    def forward(self, x, scale: float):
        return x * scale if scale > 0.5 else x - scale


def test_what_decides_by_a_number_is_cut_or_refused():
    x = torch.randn(3, 7)
    with torch.no_grad():
        contract = Contract({"x": (SMALL, 7), "n": Dim("n", 0, 3)})
        program = build(Loops().eval(), contract, backend="eager", shapes="split")
        assert len(program.variants) == 4
        for n in range(4):
            assert torch.equal(program(x, n), x * 2**n)
        decides = Decides().eval()
        for low in (0.0, 0.5):
            contract = Contract({"x": (SMALL, 7), "scale": number(low, 2.0)})
            with pytest.raises(ProofError, match=r"scale > 0\.5"):
                build(decides, contract, backend="eager", shapes="split")
        contract = Contract({"x": (SMALL, 7), "scale": number(0.6, 2.0)})
        program = build(decides, contract, backend="eager")
        for scale in (0.6, 1.0, 2.0):
            assert torch.equal(program(x, scale), x * scale)
        assert (
            "n_scale > 0.5" in program.entry.source
        )  # tried for some values, so asked at each call


def test_what_a_float_decides_somewhere_between_is_asked_at_each_call(tmp_path):
    class Special(nn.Module):
        def forward(self, x, scale: float):
            return x * scale if scale != 1.25 else x - scale

    model = Special().eval()
    contract = Contract({"x": (SMALL, 7), "scale": number(0.0, 2.0)})
    x = torch.randn(3, 7)
    with torch.no_grad():
        build(model, contract, backend="eager", store=tmp_path)
        program = load(tmp_path, model)
        assert torch.equal(program(x, 1.0), model(x, 1.0))
        with pytest.raises(ContractError, match=r"scale 1\.25"):
            program(x, 1.25)
        relaxed = load(tmp_path, model, out_of_range="eager")
        assert torch.equal(relaxed(x, 1.25), model(x, 1.25))


def test_what_holds_for_all_sizes_that_were_tried_is_asked_at_each_call(tmp_path):
    class Odd(nn.Module):
        """Does something else for one pair of sizes out of nine millions."""

        def forward(self, x, y):
            if x.shape[0] * 5000 + y.shape[0] == 1234 * 5000 + 567:
                return x.sum() - y.sum()
            return x.sum() + y.sum()

    contract = Contract({"x": (Dim("a", 2, 3000), 1), "y": (Dim("b", 2, 3000), 1)})
    model = Odd().eval()
    with torch.no_grad():
        built = build(model, contract, backend="eager", store=tmp_path)
        assert any("asked at each call" in text for text in built.variants[0].assumed)
        for program in (built, load(tmp_path, model)):
            x, y = torch.ones(1234, 1), torch.ones(567, 1)
            assert program(x, y[:-1]) == 1234 + 566
            with pytest.raises(ContractError, match="held for all sizes that were tried"):
                program(x, y)


def test_a_scan_over_many_sizes_is_refused_with_its_line(monkeypatch):
    class Scans(nn.Module):
        def forward(self, x):
            state = x[:, 0]
            for step in range(1, x.shape[1]):
                state = state * 0.5 + x[:, step]
            return state

    monkeypatch.setattr("torchloom.serve.builder.builder._MOST_BOXES", 4)
    contract = Contract({"x": (2, Dim("steps", 1, 40))})
    with torch.no_grad(), pytest.raises(ProofError, match="more than 4 ways") as error:
        build(Scans().eval(), contract, backend="eager", shapes="split")
    assert "test_dims.py" in str(error.value)
    assert "such as a scan" in str(error.value)


def test_a_float_that_inductor_wants_as_a_constant_is_refused_and_forgotten():
    class Returns(nn.Module):
        def forward(self, x, scale: float):
            return x + 1, scale * 2.0

    class Multiplies(nn.Module):
        def forward(self, x, scale: float):
            return x * scale

    contract = Contract({"x": (SMALL, 7), "scale": number(0.1, 2.0)})
    with torch.no_grad():
        try:
            returning = build(Returns().eval(), contract, shapes="split")
        except ServeError as error:  # up to torch 2.14
            assert "Give it as `fixed`, or as a tensor of one number" in str(error)
        else:
            for scale in (0.1, 0.7, 2.0):
                assert returning(torch.zeros(3, 7), scale)[1] == scale * 2.0
        program = build(Multiplies().eval(), contract, shapes="split")
        x = torch.randn(3, 7)
        for scale in (0.1, 0.7, 2.0):
            torch.testing.assert_close(program(x, scale), x * scale)
