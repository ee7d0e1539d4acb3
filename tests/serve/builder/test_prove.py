"""Proofs: every size is tried where they are few, and what fails is named and cut."""

from __future__ import annotations

from torchloom.pieces.symbols import SizeGuard, where_of
from torchloom.serve.builder.prove import prove
from torchloom.serve.contract.dims import Dim


def guard(text, holds, *hints):
    """Return a guard over the sizes that were `hints` in the trace."""
    return SizeGuard(
        text, "model.py:3", frozenset(hints), lambda sizes: holds(*(sizes[h] for h in hints))
    )


def test_paths_that_torch_cut_are_whole_again(tmp_path):
    model = tmp_path / "model.py"
    model.write_text("")
    line = "if rows > 3:  # {}:13 in forward".format
    # What a file shares with torch's folder is left out, and a letter more where that is the root.
    assert where_of(line(str(model)[2:])) == line(model)
    known = "_dynamo/guards.py"
    assert where_of(line(known)) == line(known)
    assert where_of(line("nowhere/model.py")) == line("nowhere/model.py")


def test_many_combinations_are_sampled_and_the_verdict_says_so():
    dims = [Dim("a", 1, 3000), Dim("b", 1, 3000)]
    found = prove(
        [
            guard("a != 777", lambda a, b: a != 777, 8, 9),
            guard("a + b > 1", lambda a, b: a + b > 1, 8, 9),
        ],
        dims,
        {"a": 8, "b": 9},
    )
    assert not any(verdict.is_exhaustive for verdict in found)
    assert not found[0].holds  # each size alone is tried in full
    assert found[1].holds
    assert "wherever it was tried" in str(found[1])


def test_a_fixed_size_that_is_equal_hides_nothing():
    dims = [Dim("fixed", 9, 9), Dim("n", 1, 9), Dim("other", 9, 9)]
    (verdict,) = prove(
        [guard("<size 9> >= 3", lambda n: n >= 3, 9)], dims, {"fixed": 9, "n": 9, "other": 9}
    )
    assert [sizes["n"] for sizes in verdict.failing] == [1, 2]
