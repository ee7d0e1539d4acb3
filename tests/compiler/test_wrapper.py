"""The wrapper is the module, compiled once at its first call."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from torchloom.compiler import CompileConfig, CompiledModuleWrapper
from torchloom.errors import CompileError, ConfigError

ENABLED = {"enabled": True, "backend": "eager"}


class Model(nn.Module):
    class_level = "class"

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 2.0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.value = 7

    def get_v(self) -> int:
        return self.value

    @property
    def doubled(self) -> int:
        return 2 * self.value

    def forward(self, x, *, shift=0.0):
        return torch.relu(self.linear(x)) * self.scale + shift

    def twin(self):
        return type(self)(3)


class Counting:
    """A backend that counts its compiles and runs."""

    def __init__(self) -> None:
        self.compiles = self.runs = 0

    def __call__(self, gm, example_inputs):
        self.compiles += 1

        def run(*args):
            self.runs += 1
            return gm.forward(*args)

        return run


def wrap(model=None, **changes):
    torch.manual_seed(0)
    model = model or Model()
    return CompiledModuleWrapper(model, CompileConfig(**{**ENABLED, **changes})), model


def test_it_compiles_at_the_first_call_and_once() -> None:  # D8, D10, D15
    counting = Counting()
    wrapped, model = wrap(backend=counting)
    assert not wrapped.is_compiled
    assert counting.compiles == 0
    x = torch.randn(2, 4)
    for _ in range(3):
        assert torch.equal(wrapped(x, shift=1.0), model(x, shift=1.0))
    assert wrapped.is_compiled
    assert (counting.compiles, counting.runs) == (1, 3)  # the original stays uncompiled
    assert type(model) is Model


def test_it_is_the_module_to_everyone_who_looks() -> None:
    wrapped, model = wrap()
    assert isinstance(wrapped, Model)
    assert isinstance(wrapped, CompiledModuleWrapper)
    assert list(wrapped.state_dict()) == ["scale", "steps", "linear.weight", "linear.bias"]
    assert [n for n, _ in wrapped.named_modules()] == [n for n, _ in model.named_modules()]
    assert [n for n, _ in wrapped.named_parameters()] == ["scale", "linear.weight", "linear.bias"]
    assert all(a is b for a, b in zip(wrapped.parameters(), model.parameters(), strict=True))
    assert repr(wrapped) == repr(model)
    assert wrapped.linear is model.linear
    assert type(wrapped.twin()) is Model


def test_attributes_get_set_del_both_ways() -> None:  # D11
    wrapped, model = wrap()
    assert (wrapped.get_v(), wrapped.doubled, wrapped.class_level) == (7, 14, "class")
    wrapped.value = 8
    assert model.value == 8
    model.fresh = "new"
    assert wrapped.fresh == "new"
    del wrapped.fresh
    assert not hasattr(model, "fresh")
    wrapped.linear = nn.Linear(4, 4, bias=False)
    assert model.linear.bias is None
    wrapped.extra = nn.Parameter(torch.ones(1))
    assert "extra" in dict(model.named_parameters())
    del wrapped.extra
    assert "extra" not in dict(model.named_parameters())
    with pytest.raises(AttributeError, match="missing"):
        _ = wrapped.missing
    wrapped(torch.ones(1, 4))
    assert wrapped.get_v() == 8


def test_state_dicts_travel_both_ways() -> None:
    wrapped, model = wrap()
    other = Model()
    other.load_state_dict(wrapped.state_dict())
    assert torch.equal(other.linear.weight, model.linear.weight)
    wrapped.load_state_dict(Model().state_dict())
    assert not torch.equal(other.linear.weight, model.linear.weight)


def test_hooks_run_once() -> None:
    wrapped, model = wrap()
    calls = []
    wrapped.register_forward_hook(lambda module, args, output: calls.append("after"))
    model.register_forward_pre_hook(lambda module, args: calls.append("before"))
    wrapped(torch.ones(1, 4))
    assert calls == ["before", "after"]


def test_training_through_it() -> None:
    wrapped, _ = wrap(backend="aot_eager")
    reference = Model()
    reference.load_state_dict(wrapped.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapped, reference)]
    for step in range(5):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip((wrapped, reference), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for left, right in zip(wrapped.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left, right)
    wrapped.eval()
    assert not wrapped.linear.training


def test_settings_after_the_first_call_are_refused() -> None:  # D9: once a silent no-op
    wrapped, _ = wrap()
    wrapped(torch.ones(1, 4))
    for change in (
        lambda: wrapped.set_backend("aot_eager"),
        lambda: wrapped.set_torch_compile_kwargs({"dynamic": True}),
        lambda: wrapped.set_compiler_fn(lambda module: module),
    ):
        with pytest.raises(CompileError, match="compiled with backend 'eager' already"):
            change()
    assert wrapped.backend == "eager"


def test_bad_settings() -> None:
    wrapped, _ = wrap()
    with pytest.raises(ConfigError, match="set_backend"):
        wrapped.set_torch_compile_kwargs({"backend": "eager"})
    with pytest.raises(ConfigError, match="did you mean"):
        wrapped.set_backend("aot_eagre")
    with pytest.raises(ConfigError, match="compiler_fn is a int"):
        wrapped.set_compiler_fn(3)
    with pytest.raises(ConfigError, match="did you mean 'inductor'"):
        wrap(backend="inducter")
    wrapped.set_compiler_fn(lambda module: 3)
    with pytest.raises(CompileError, match="returned a int"):
        wrapped(torch.ones(1, 4))


def test_compiler_fn_takes_precedence() -> None:  # D9
    counting = Counting()
    wrapped, model = wrap(backend=counting)
    seen = []

    def own(module):
        seen.append(module)
        return lambda x: module.forward(x) * 0

    wrapped.set_compiler_fn(own)
    assert wrapped(torch.ones(1, 4)).abs().sum() == 0
    assert seen == [model]
    assert wrapped.is_compiled
    assert counting.compiles == 0


def test_never_compiled_twice() -> None:
    wrapped, model = wrap()
    with pytest.raises(CompileError, match="wrapped already"):
        CompiledModuleWrapper(wrapped, CompileConfig(enabled=True))
    with pytest.raises(CompileError, match="compiled already"):
        CompiledModuleWrapper(torch.compile(Model(), backend="eager"))
    in_place = Model()
    in_place.compile(backend="eager")
    with pytest.raises(CompileError, match="compiled already"):
        CompiledModuleWrapper(in_place)
    with pytest.raises(CompileError, match=r"takes a torch.nn.Module, not a function"):
        CompiledModuleWrapper(lambda x: x)
    assert model is not wrapped


def test_inside_a_compiled_parent_it_is_compiled_with_the_parent() -> None:
    inner, outer = Counting(), Counting()
    wrapped, _ = wrap(backend=inner)
    parent = nn.Sequential(wrapped, nn.ReLU())
    assert "0.linear.weight" in parent.state_dict()
    x = torch.randn(2, 4)
    expected = parent(x)
    runs = inner.runs
    got = torch.compile(lambda x: parent(x), backend=outer, fullgraph=True)(x)
    torch.testing.assert_close(got, expected)
    assert outer.compiles == 1
    assert inner.runs == runs


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("was_called", [False, True])
def test_copies_compile_again(how, was_called: bool) -> None:
    wrapped, model = wrap(kwargs={"dynamic": True})
    wrapped.value = 9
    if was_called:
        wrapped(torch.ones(1, 4))
    twin = how(wrapped)
    assert type(twin) is type(wrapped)
    assert not twin.is_compiled
    assert (twin.backend, twin.torch_compile_kwargs, twin.value) == ("eager", {"dynamic": True}, 9)
    x = torch.randn(3, 4)
    assert torch.equal(twin(x), model(x))
    assert twin.is_compiled
    twin.value = 1
    assert wrapped.value == 9


def test_torch_save_and_load() -> None:
    wrapped, model = wrap()
    buffer = io.BytesIO()
    torch.save(wrapped, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    assert isinstance(twin, Model)
    assert torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))


class OwnNames(nn.Module):
    """A module whose attributes have the names of the wrapper's own."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = "gloo"
        self.is_compiled = nn.Linear(2, 2)

    def set_backend(self, name):
        self.backend = name

    def forward(self, x):
        return self.is_compiled(x)


def test_a_modules_own_names_win() -> None:
    wrapped, model = wrap(OwnNames())
    assert wrapped.backend == "gloo"
    wrapped.backend = "nccl"
    wrapped.set_backend("mpi")
    assert model.backend == "mpi"
    assert wrapped.is_compiled is model.is_compiled
    counting = Counting()
    CompiledModuleWrapper.set_backend(wrapped, counting)
    wrapped(torch.ones(1, 2))
    assert counting.compiles == 1


class Slotted(nn.Module):
    __slots__ = ("hidden",)

    def forward(self, x):
        return x


def test_slots_are_refused() -> None:
    with pytest.raises(CompileError, match="__slots__"):
        CompiledModuleWrapper(Slotted())


def test_an_error_of_the_backend_is_not_hidden() -> None:
    def broken(gm, example_inputs):
        raise RuntimeError("no luck")

    wrapped, _ = wrap(backend=broken)
    with pytest.raises(Exception, match="no luck"):
        wrapped(torch.ones(1, 4))
