"""The decorator: one compile at the first call, dims from annotations, and every reason to do nothing."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from torchloom.errors import ContractError, ServeError
from torchloom.serve import (
    Contract,
    Dim,
    counter,
    eager,
    freeze,
    ignore_torch_compile,
    served,
    support_torch_compile,
    warm_up,
)


@support_torch_compile(backend="eager")
class Double(nn.Module):
    """The least that can be decorated."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.inner(x)
        return y * 2 if mask is None else y * mask


def test_the_first_call_compiles_for_all_sizes_below_it():
    model = Double().eval()
    with torch.no_grad():
        with counter.expect(num_compiles=1):
            model(torch.ones(8, 4))
        with counter.expect(num_compiles=0, num_eager_calls=0):
            for n in (1, 7, 8):
                x = torch.randn(n, 4)
                torch.testing.assert_close(model(x), model.inner(x) * 2)
        with pytest.raises(ContractError, match="1 to 8"):
            model(torch.ones(9, 4))


def test_a_copy_has_a_program_and_weights_of_its_own(tmp_path):
    model = Double().eval()
    with torch.no_grad():
        model(torch.ones(8, 4))
        copied = copy.deepcopy(model)
        copied.inner.weight.zero_()
        with counter.expect(num_compiles=1):
            assert torch.equal(copied(torch.ones(3, 4)), copied.inner.bias.expand(3, 4) * 2)
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        torch.testing.assert_close(again(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert type(again) is Double


def test_dims_may_be_named_and_bounded():
    @support_torch_compile(
        backend="eager", dynamic_arg_dims={"x": {0: Dim("rows", 1, 100)}, "y": {-1: "columns"}}
    )
    class Named(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sum() + y

    model = Named().eval()
    with torch.no_grad():
        model(torch.ones(8, 4), torch.ones(3, 8))
        model(torch.ones(100, 4), torch.ones(3, 5))
    assert served(model).program.contract.dims == {
        "rows": Dim("rows", 1, 100),
        "columns": Dim("columns", 1, 8),
    }


@dataclass
class Batch:
    """Tensors by name."""

    ids: Tensor
    weights: Tensor


def test_dims_are_inferred_from_dicts_dataclasses_and_text():
    @support_torch_compile(backend="eager")
    class Inferred(nn.Module):
        def forward(
            self,
            batch: Batch,
            more: dict[str, Tensor],
            x: Tensor | None,
            ids: torch.LongTensor | None = None,
        ) -> Tensor:
            return batch.ids * batch.weights + more["bias"] + x * ids

    model = Inferred().eval()
    with torch.no_grad():
        for n in (6, 2):
            like = torch.ones(n, 2)
            found = model(Batch(like, like), {"bias": like}, like, like.long())
            assert torch.equal(found, torch.full((n, 2), 3.0))


@pytest.mark.parametrize(
    ("dims", "text"), [({"z": 0}, "'z' is no argument"), ({"x": None}, "give a number")]
)
def test_wrong_dims_are_refused_where_they_are_written(dims, text):
    with pytest.raises(ServeError, match=text):

        @support_torch_compile(dynamic_arg_dims=dims)
        class Wrong(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x


def eager_reason(model: nn.Module) -> str:
    """Call a model, and return why it ran as it is."""
    with counter.expect(num_compiles=0), torch.no_grad():
        model(torch.ones(2, 4))
    return served(model).why_eager


def test_every_reason_to_run_as_it_is_has_a_name(monkeypatch):
    @support_torch_compile(backend="eager", enforce_eager=True)
    class Enforced(Double):
        def forward(self, x: Tensor) -> Tensor:
            return x

    @support_torch_compile(backend="eager", enable_if=lambda model: model.inner.in_features > 4)
    class Enabled(Double):
        def forward(self, x: Tensor) -> Tensor:
            return x

    @ignore_torch_compile
    class Ignored(Double):
        pass

    assert eager_reason(Enforced().eval()) == "enforce_eager=True"
    assert eager_reason(Enabled().eval()) == "enable_if returned False"
    assert eager_reason(Ignored().eval()) == "@ignore_torch_compile on Ignored"
    monkeypatch.setenv("TORCHLOOM_ENFORCE_EAGER", "1")
    assert eager_reason(Double().eval()) == "TORCHLOOM_ENFORCE_EAGER=1"


def test_a_decorated_module_inside_another_is_part_of_its_graph():
    @support_torch_compile(backend="eager")
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Double()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) + 1

    model = Outer().eval()
    with torch.no_grad(), counter.expect(num_compiles=1):
        model(torch.ones(3, 4))
    assert served(model.part).program is None


def test_a_warm_up_compiles_before_the_first_call_and_measures():
    contract = Contract({"x": (Dim("batch", 1, 64), 4)})

    @support_torch_compile(contract=contract, backend="eager", check="off")
    class Declared(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).sin()

    model = Declared().eval()
    with counter.expect(num_compiles=1):
        done = warm_up(model)
    assert done.num_programs == 1
    assert done.peak_bytes == 2 * 64 * 4 * 4
    with counter.expect(num_compiles=0), torch.no_grad():
        model(torch.ones(64, 4))


def test_nothing_compiles_after_the_first_call():
    model = Double().eval()
    with pytest.raises(ServeError, match="has not been compiled"):
        freeze(model)
    with torch.no_grad():
        model(torch.ones(8, 4))
        freeze(model)
        for call in (torch.ones(9, 4), torch.ones(8, 4, dtype=torch.float64), torch.ones(4, 8).t()):
            with counter.expect(num_compiles=0, num_refused_calls=1), pytest.raises(ContractError):
                model(call)


class Inherited(nn.Module):
    """Defines what others decorate."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_class_without_a_forward_of_its_own_is_compiled_with_what_it_inherits():
    decorated = support_torch_compile(backend="eager")(type("Below", (Inherited,), {}))
    again = support_torch_compile(backend="eager")(type("Again", (decorated,), {}))
    with torch.no_grad():
        for kind in (decorated, again):
            model = kind().eval()
            x = torch.randn(5, 4)
            assert torch.equal(model(x), model.inner(x))
            with counter.expect(num_traces=0):
                assert torch.equal(model(x[:2]), model.inner(x[:2]))
            assert served(model).program is not None
    assert "_torchloom_plan" not in vars(Inherited.forward)  # the base is as it was
    with pytest.raises(ServeError, match="has no forward"):
        support_torch_compile(type("Empty", (nn.Module,), {}))


def test_a_shallow_copy_has_a_program_of_its_own():
    model = support_torch_compile(backend="eager")(type("Copied", (Inherited,), {}))().eval()
    x = torch.randn(5, 4)
    with torch.no_grad():
        model(x)
        shallow = copy.copy(model)
        shallow._modules = {"inner": nn.Linear(4, 4)}
        assert torch.equal(shallow(x), shallow.inner(x))
        assert torch.equal(model(x), model.inner(x))
        with counter.expect(num_traces=0):
            shallow(x), model(x)
        replica = model._replicate_for_data_parallel()
        replica._modules = dict(shallow._modules)
        with counter.expect(num_traces=0):
            assert torch.equal(replica(x), shallow.inner(x))
        assert "DataParallel" in served(replica).why_eager


def related(x: Tensor, y: Tensor) -> None:
    torch._check(x.size(0) == y.size(0))
    torch._check(x.size(1) <= 64)


class Related(nn.Module):
    """Would branch on whether two sizes are one, which nothing may ask of unbacked ones."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if x.shape[0] == y.shape[0] else x * 2


def test_invariants_of_sizes_are_traced_before_the_forward():
    dims = {"x": 0, "y": 0}
    make = support_torch_compile(backend="eager", mark_unbacked_dims=dims, shape_invariants=related)
    model = make(type("Checked", (Related,), {}))().eval()
    with torch.no_grad():
        for rows in (8, 3, 1):
            x, y = torch.randn(rows, 4), torch.randn(rows, 4)
            torch.testing.assert_close(model(x, y), x + y)
    assert served(model).program is not None
    without = support_torch_compile(backend="eager", mark_unbacked_dims=dims)
    other = without(type("Unchecked", (Related,), {}))().eval()
    with torch.no_grad(), pytest.raises(ServeError, match=r"test_decorate\.py"):
        other(torch.ones(8, 4), torch.ones(8, 4))
    with pytest.raises(ServeError, match="other arguments than"):
        support_torch_compile(dynamic_arg_dims=dims, shape_invariants=lambda a: None)(Related)


def test_an_argument_that_is_left_out_has_its_own_default_whatever_the_first_call_passed():
    @support_torch_compile(backend="eager")
    class Masked(nn.Module):
        def forward(self, x: Tensor, causal: bool = False) -> Tensor:
            return x * 2 if causal else x * 3

    model, x = Masked().eval(), torch.ones(4, 2)
    with torch.no_grad():
        assert torch.equal(model(x, causal=True), x * 2)
        with pytest.raises(ContractError, match="'causal' is False, the contract fixes it to True"):
            model(x)
        with eager():
            assert torch.equal(model(x), x * 3)
        assert torch.equal(model(x, True), x * 2)
