"""Calls that are no calls of a contract though their types say so, and models that torch fails to trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from serve.models import BATCH, Of
from torchloom.errors import ArtifactError, ContractError, ProofError, ServeError
from torchloom.serve import Contract, build, load

X = torch.randn(5, 16)
CONTRACT = Contract({"x": (BATCH, 16)})


@pytest.fixture(scope="module")
def program():
    with torch.no_grad():
        return build(Of(lambda x: (x * 2).relu() + 1).eval(), CONTRACT)


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning"
)
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (torch.Tensor.to_sparse, "sparse_coo"),
        (lambda x: torch.nested.nested_tensor([x, x[:3]]), "nested"),
    ],
)
def test_tensors_of_other_layouts_are_refused(program, change, kind):
    with torch.no_grad(), pytest.raises(ContractError, match=rf"of another layout \({kind}\)"):
        program(change(X))


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.functionalize,  # ended the process
        torch.vmap,
        lambda call: torch.func.grad(lambda x: call(x).sum()),
    ],
)
@pytest.mark.parametrize("grad", ["no_grad", "grad"])
def test_transforms_are_refused(transform, grad):
    contract = Contract({"x": (BATCH, 16)}, grad=grad)
    call = build(Of(torch.sin).eval(), contract, backend="eager")
    with torch.set_grad_enabled(grad == "grad"):
        with pytest.raises(ContractError, match=r"inside of a transform of torch\.func"):
            transform(call)(X)
        torch.testing.assert_close(call(X), X.sin())


def test_traces_of_jit_are_refused(program):
    with torch.no_grad(), pytest.raises(ContractError, match=r"inside of torch\.jit\.trace"):
        torch.jit.trace(lambda x: program(x) * 2, (X,), check_trace=False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_calls_programs(program, backend):
    around = torch.compile(lambda x: program(x + 1) * 2, backend=backend)
    with torch.no_grad():
        for x in (X, X[:3]):
            torch.testing.assert_close(around(x), program(x + 1) * 2)
    whole = torch.compile(lambda x: program(x), backend=backend, fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="compiled already"):
        whole(X)


def asks_for_gradients(tensor):
    return tensor * (2 if tensor.requires_grad else 3)


def asks_for_its_base(tensor):
    return tensor * (2 if tensor._base is None else 3)


def reads_memory(tensor):
    return tensor.as_strided((4,), (1,), 0) * 2


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (asks_for_gradients, X.clone().requires_grad_()),
        (asks_for_its_base, torch.randn(7, 16)[2:]),
        (reads_memory, torch.randn(7, 16)[2:]),
    ],
)
def test_what_helpers_ask_of_tensors_is_asked_of_calls(function, other):
    with torch.no_grad():
        served = build(Of(function).eval(), CONTRACT, backend="eager")
        torch.testing.assert_close(served(X), function(X))
        with pytest.raises(ContractError, match="forward asks"):
            served(other)


def test_sizes_beside_floats():
    model = Of(lambda x: x * 5 if x.shape[0] ** 0.5 > 6 else x).eval()
    with torch.no_grad():
        with pytest.raises(ProofError, match="not true for batch"):
            build(model, CONTRACT, shapes="prove", backend="eager")
        served = build(model, CONTRACT, shapes="split", backend="eager")
        for size in range(1, 65):
            x = torch.randn(size, 16)
            torch.testing.assert_close(served(x), model(x))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: x * (5.0 if not (x.shape[0] - 37) else 1.0), "unbacked"),
        (lambda x: x * (5.0 if x.shape[0] in range(37, 40) else 1.0), "prove"),
    ],
)
def test_what_torch_cannot_trace_is_a_sentence(function, shapes):
    with (
        torch.no_grad(),
        pytest.raises(ServeError, match=r"cannot be compiled|is not the same program"),
    ):
        build(Of(function).eval(), CONTRACT, shapes=shapes, backend="eager")


def test_a_program_that_cannot_be_made_here_is_a_miss(tmp_path, monkeypatch):
    def gone(*_args, **_kwargs):
        raise AttributeError("module has no attribute 'gone'")

    with torch.no_grad():
        model = Of(torch.sin).eval()
        build(model, CONTRACT, backend="eager", store=tmp_path)
        monkeypatch.setattr("torchloom.serve.store.entries.loaded_piece", gone)
        with pytest.raises(
            ArtifactError, match=r"cannot be made in this process .*'gone'.*build it again"
        ):
            load(tmp_path, model)
        torch.testing.assert_close(
            build(model, CONTRACT, backend="eager", store=tmp_path)(X), X.sin()
        )


class Flagged(nn.Module):
    """Takes what contracts fix before, between and behind what calls pass."""

    def forward(self, x, flag, y, scale=2.0, *, sign, shift=0.5, z):
        return (x + y * scale + z * sign + shift) if flag else x - y


class ByAnyPlace(nn.Module):
    """Takes further arguments that are in no contract."""

    def forward(self, x, flag, y, *rest, **more):
        return x + y if flag else x - y


def test_what_is_fixed_may_stand_before_what_is_passed():
    y, z = torch.randn(5, 16), torch.randn(5, 16)
    rows, fixed = (BATCH, 16), {"flag": True}
    with torch.no_grad():
        contract = Contract({"x": rows, "y": rows, "z": rows}, fixed={**fixed, "sign": -1})
        program = build(Flagged().eval(), contract, backend="eager")
        wanted = X + y * 2 - z + 0.5
        for found in (program(X, y=y, z=z), program(X, True, y, z=z), program(z=z, y=y, x=X)):
            torch.testing.assert_close(found, wanted)
        with pytest.raises(TypeError, match="missing argument: 'y'"):
            program(X, z=z)
        with pytest.raises(ContractError, match="flag"):
            program(X, y, y, z=z)
        contract = Contract({"x": rows, "y": rows}, fixed=fixed)
        made = build(ByAnyPlace().eval(), contract, backend="eager")
        torch.testing.assert_close(made(X, True, y), X + y)
