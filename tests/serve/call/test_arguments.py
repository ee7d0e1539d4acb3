"""What forward reads of its arguments beside their tensors: each call is asked, or the build refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from torchloom.errors import ContractError
from torchloom.serve import Contract, Dim, build, load, record

ROWS = Dim("rows", 1, 8)


@dataclass
class Options:
    factor: float = 2.0


@dataclass
class Batch:
    x: Tensor
    causal: bool = False
    times: int = 3
    options: Options = field(default_factory=Options)


class OfFlags(nn.Module):
    def forward(self, batch):
        y = batch.x * batch.times * batch.options.factor
        return y + 100 if batch.causal else y


class OfKeys(nn.Module):
    def forward(self, parts):
        return sum(part * (place + 1) for place, part in enumerate(parts.values()))


class OfOne(nn.Module):
    def forward(self, x, y):
        return x * 100 if x is y else x + y


class OfAttributes(nn.Module):
    def forward(self, x):
        return x * getattr(x, "scale", 1.0)


class OfGradients(nn.Module):
    def forward(self, x):
        return x * 2 if x.requires_grad else x * 3


class OfKinds(nn.Module):
    def forward(self, x):
        return x * 2 if isinstance(x, nn.Parameter) else x * 3


class OfStrides(nn.Module):
    def forward(self, x):
        return x * x.stride(0)


def programs(model, contract, folder):
    built = build(model.eval(), contract, backend="eager", store=folder)
    return built, load(folder, model, contract)


def scaled(x, scale):
    x.scale = scale
    return x


X = torch.arange(12.0).reshape(3, 4)
CASES = {
    "a flag of a dataclass": (
        OfFlags(),
        Contract({"batch": record(Batch, x=(ROWS, 4))}),
        lambda: (Batch(X),),
        lambda: (Batch(X, causal=True),),
        r"batch\.causal is True, the program was made for False",
    ),
    "the order of keys": (
        OfKeys(),
        Contract({"parts": {"a": (ROWS, 4), "b": (ROWS, 4)}}),
        lambda: ({"a": X, "b": 2 * X},),
        lambda: ({"b": 2 * X, "a": X},),
        "in this order",
    ),
    "one tensor twice": (
        OfOne(),
        Contract({"x": (ROWS, 4), "y": (ROWS, 4)}),
        lambda: (X, X.clone()),
        lambda: (X, X),
        "are one tensor, and forward tells its arguments apart",
    ),
    "an attribute of a tensor": (
        OfAttributes(),
        Contract({"x": (ROWS, 4)}),
        lambda: (X,),
        lambda: (scaled(X.clone(), 7.0),),
        "x has an attribute 'scale'",
    ),
    "whether it is a parameter": (
        OfKinds(),
        Contract({"x": (ROWS, 4)}),
        lambda: (X,),
        lambda: (nn.Parameter(X.clone()),),
        "'x' is a Parameter, and forward asks for types",
    ),
    "strides of a size of 1": (
        OfStrides(),
        Contract({"x": (ROWS, 4)}),
        lambda: (X[:1],),
        lambda: (torch.ones(100, 4).view(1, 100, 4)[:, 5],),
        r"has strides \(400, 1\) for sizes \(1, 4\)",
    ),
    "whether it requires gradients": (
        OfGradients(),
        Contract({"x": (ROWS, 4)}),
        lambda: (X,),
        lambda: (X.clone().requires_grad_(),),
        r"pass x\.detach\(\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_asked(case, tmp_path):
    model, contract, right, wrong, text = CASES[case]
    with torch.no_grad():
        for program in programs(model, contract, tmp_path):
            torch.testing.assert_close(program(*right()), model(*right()))
            with pytest.raises(ContractError, match=text):
                program(*wrong())
        eager = load(tmp_path, model, contract, out_of_range="eager")
        torch.testing.assert_close(eager(*wrong()), model(*wrong()))


class Named(nn.Module):
    """Takes arguments by names that an entry could use itself."""

    def forward(self, type, len, n_n, s_type, len__x, *, same=2.0, math=None, **float):
        return type * len["x"] + n_n * s_type - len__x * same


def test_names_of_arguments_are_free():
    names = ("type", "n_n", "s_type", "len__x")
    rows = Dim("n", 1, 8)
    contract = Contract({**dict.fromkeys(names, (rows, 4)), "len": {"x": (rows, 4)}})
    model = Named().eval()
    given = {name: torch.randn(3, 4) for name in names} | {"len": {"x": torch.randn(3, 4)}}
    with torch.no_grad():
        program = build(model, contract, backend="eager")
        assert torch.equal(program(**given), model(**given))
        assert torch.equal(program(**given, same=2.0, math=None), model(**given))
        for more in ({"same": 3.0}, {"math": 1}, {"other": 1}):
            with pytest.raises(ContractError):
                program(**given, **more)


class Constant(nn.Module):
    def forward(self, x, value=None):
        if isinstance(value, slice):
            return x[:, value]
        if isinstance(value, (float, tuple)):
            return torch.copysign(
                x, torch.full((), value if isinstance(value, float) else value[0])
            )
        return x + 1


@pytest.mark.parametrize(
    ("fixed", "equal", "other"),
    [
        (0.0, 0.0, -0.0),
        (float("nan"), float("nan"), 1.0),
        (torch.device("cpu"), torch.device("cpu"), "cpu"),
    ],
)
def test_constants_are_equal_as_a_trace_tells_them(fixed, equal, other):
    x, model = torch.randn(3, 4), Constant().eval()
    contract = Contract({"x": (Dim("n", 1, 8), 4)}, fixed={"value": fixed})
    with torch.no_grad():
        program = build(model, contract, backend="eager")
        wanted = model(x, fixed)
        assert torch.equal(program(x), wanted)
        assert torch.equal(program(x, fixed if equal is None else equal), wanted)
        with pytest.raises(ContractError, match="'value' is"):
            program(x, other)


def several(x, *more):
    return x + sum(more)


def by_position(x, /):
    return x + 1


def of_two(x, y):
    return x + y


@pytest.mark.parametrize(
    ("function", "names", "text"),
    [
        (several, ("x", "more"), r"takes as \*more"),
        (by_position, ("x",), "'x' by position only"),
        (of_two, ("x",), "'y', which has no default"),
    ],
)
def test_parameters_that_no_contract_can_name(function, names, text):
    with pytest.raises(ContractError, match=text):
        build(function, Contract(dict.fromkeys(names, (Dim("n", 1, 8), 4))), backend="eager")


def test_further_keyword_arguments_may_come_in_any_order():
    class Names(nn.Module):
        def forward(self, x, **more):
            return x + 2 * more["a"] - more["b"]

    rows = Dim("rows", 2, 8)
    contract = Contract({"x": (rows,), "a": (rows,), "b": (rows,)})
    with torch.no_grad():
        model = Names().eval()
        program = build(model, contract, backend="eager")
        x, a, b = torch.randn(3, 3)
        assert torch.equal(program(b=b, x=x, a=a), model(x, a=a, b=b))
