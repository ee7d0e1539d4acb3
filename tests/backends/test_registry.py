"""Registering, finding, listing: torch's behaviours, and where torch is wrong, the right ones."""

from __future__ import annotations

import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.exc import InvalidBackend

from torchloom import backends
from torchloom._torch.registry import forget_backend
from torchloom.backends import (
    list_backends,
    lookup_backend,
    register_backend,
    register_debug_backend,
    register_experimental_backend,
    temporary_backend,
    unregister_backend,
)
from torchloom.errors import BackendConflictError, BackendError


def forward_of(gm, example_inputs):
    return gm.forward


def counting():
    calls = []

    def backend(gm, example_inputs):
        calls.append(len(gm.graph.nodes))
        return gm.forward

    return backend, calls


def fn(x):
    return torch.relu(x) * 2 + 1


def assert_runs(name: str) -> None:
    x = torch.randn(5)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(fn, backend=name)(x), fn(x))


def test_a_registered_name_works_in_torch_compile() -> None:  # B8
    backend, calls = counting()
    assert register_backend(backend, name="counted") is backend
    assert lookup_backend("counted") is backend
    assert_runs("counted")
    assert calls


def test_the_three_ways_to_register() -> None:
    @register_backend
    def plain(gm, example_inputs):
        return gm.forward

    @register_backend(name="with_arguments", tags=("debug",))
    def other(gm, example_inputs):
        return gm.forward

    register_backend(forward_of, "called")
    register_debug_backend(forward_of, "for_debugging")

    @register_experimental_backend
    def an_experiment(gm, example_inputs):
        return gm.forward

    assert {"plain", "called"} <= set(list_backends())
    hidden = {"with_arguments", "for_debugging", "an_experiment"}
    assert not hidden & set(list_backends())
    assert hidden <= set(list_backends(None))
    assert "for_debugging" not in torch._dynamo.list_backends()  # tags belong to the name
    assert not hasattr(forward_of, "_tags")
    assert hidden - {"an_experiment"} <= set(list_backends(exclude_tags=["experimental"]))


def test_the_list_holds_what_torch_and_others_registered() -> None:
    from torch._dynamo import register_backend as torchs

    torchs(lambda gm, inputs: gm.forward, name="registered_with_torch")
    try:
        assert "registered_with_torch" in list_backends()
        assert callable(lookup_backend("registered_with_torch"))
        row = next(r for r in backends.describe_backends() if r.name == "registered_with_torch")
        assert row.origin.kind == "this process"
        with pytest.raises(BackendConflictError, match="registered_with_torch"):
            register_backend(forward_of, "registered_with_torch")
    finally:
        forget_backend("registered_with_torch", None)


def test_tags_of_the_built_ins() -> None:  # B5
    assert "inductor" in list_backends()
    assert "inductor" in list_backends(exclude_tags=None)
    assert "eager" not in list_backends()
    assert "eager" not in list_backends(exclude_tags=["debug"])
    assert "eager" in list_backends(exclude_tags=[])
    assert "torchloom" in list_backends()
    assert list_backends(None) == sorted(list_backends(None))


class Slotted:
    __slots__ = ()

    def __call__(self, gm, example_inputs):
        return gm.forward


class Method:
    def compile(self, gm, example_inputs):
        return gm.forward


class Unhashable:
    __hash__ = None

    def __call__(self, gm, example_inputs):
        return gm.forward


class CallableName(str):
    __slots__ = ()

    def __call__(self, gm, example_inputs):
        return gm.forward


@pytest.mark.parametrize(
    "backend",
    [
        Slotted(),
        Method().compile,
        Unhashable(),
        CallableName("eager"),
        functools.partial(forward_of),
    ],
    ids=["slots", "bound method", "unhashable", "callable string", "partial"],
)
def test_odd_callables_are_accepted(backend) -> None:  # R1, R2, R3
    register_backend(backend, name="odd")
    assert "odd" in list_backends()
    assert "odd" in torch._dynamo.list_backends()
    assert_runs("odd")


@pytest.mark.parametrize("name", ["eager", "inductor", "torchloom"])
def test_a_built_in_keeps_its_name(name: str) -> None:  # R5
    with pytest.raises(BackendConflictError, match=f"{name!r} is taken by built-in, torch"):
        register_backend(forward_of, name)
    assert name in list_backends(None)
    if name != "torchloom":
        assert_runs(name)


def test_registering_before_torchs_lazy_import_poisons_nothing() -> None:  # R5
    code = (
        "from torchloom.backends import register_backend, list_backends\n"
        "from torchloom.errors import BackendConflictError\n"
        "try: register_backend(lambda gm, i: gm.forward, name='eager')\n"
        "except BackendConflictError: print('refused')\n"
        "register_backend(lambda gm, i: gm.forward, name='mine')\n"
        "import torch\n"
        "print(torch.compile(lambda x: x + 1, backend='mine')(torch.ones(1)).item())\n"
        "print('eager' in torch._dynamo.list_backends(None), 'mine' in list_backends())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused", "2.0", "True", "True"]


def test_a_name_is_given_once() -> None:
    register_backend(forward_of, "once")
    register_backend(forward_of, "once")  # the same again changes nothing
    with pytest.raises(BackendConflictError, match=r"'once' is taken by this process, .*py:\d+"):
        register_backend(counting()[0], "once")
    with pytest.raises(BackendConflictError):
        register_backend(forward_of, "once", tags=("debug",))
    assert lookup_backend("once") is forward_of
    assert "once" in list_backends()


@pytest.mark.parametrize(
    ("backend", "name", "words"),
    [
        (42, "number", "not a int"),
        ("text", "text", "not a str"),
        (None, None, None),
        (functools.partial(forward_of), None, "has no name"),
        (functools.partial(forward_of), "", "has no name"),
        (forward_of, 3, "not a int"),
    ],
)
def test_what_cannot_be_registered(backend, name, words) -> None:
    before = list_backends(None)
    if words is None:
        assert callable(register_backend(backend, name))  # a decorator still to be used
    else:
        with pytest.raises(BackendError, match=words):
            register_backend(backend, name)
    with pytest.raises(BackendError, match=r"write \('debug',\)"):
        register_backend(forward_of, "one_tag", tags="debug")
    assert list_backends(None) == before
    assert torch._dynamo.list_backends(None)


def test_names_are_those_that_torch_gives() -> None:
    def named(gm, inputs):
        return gm.forward

    def nameless(gm, inputs):
        return gm.forward

    nameless.__name__ = "<lambda>"
    assert register_backend(named, name="") is named  # an empty name is none
    assert lookup_backend("named") is named
    register_backend(nameless)
    assert lookup_backend("<lambda>") is nameless
    with pytest.raises(BackendConflictError):
        register_backend(lambda gm, inputs: gm.forward)
    with pytest.raises(AttributeError):  # torch's answer to what has no name
        register_backend(functools.partial(forward_of))
    for name in ("", "no such backend"):
        with pytest.raises(InvalidBackend):
            lookup_backend(name)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(BackendError, match="did you mean 'inductor'") as caught:
        lookup_backend("inducter")
    assert isinstance(caught.value, InvalidBackend)
    with pytest.raises(BackendError, match="did you mean 'my_backend'"):
        register_backend(forward_of, "my_backend")
        lookup_backend("my_backnd")


def test_unregister() -> None:  # R12
    register_backend(forward_of, "for_now")
    compiled = torch.compile(fn, backend="for_now")
    compiled(torch.ones(2))
    assert unregister_backend("for_now") is forward_of
    assert "for_now" not in list_backends()
    assert "for_now" not in torch._dynamo.list_backends()
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    with pytest.raises(BackendError, match="not known at all"):
        unregister_backend("for_now")
    with pytest.raises(BackendError, match="built-in, torch"):
        unregister_backend("inductor")


def test_temporary_backends_nest_and_restore() -> None:  # R12
    with temporary_backend(forward_of, name="for_a_while") as name:
        assert lookup_backend(name) is forward_of
        other = counting()[0]
        with pytest.raises(BackendConflictError), temporary_backend(other, name=name):
            pass
        with temporary_backend(other, name=name, override=True):
            assert lookup_backend(name) is other
            assert_runs(name)
        assert lookup_backend(name) is forward_of
        assert_runs(name)
    assert "for_a_while" not in list_backends(None)
    with pytest.raises(ValueError, match="inside"), temporary_backend(forward_of, name="broken"):
        raise ValueError("inside")
    assert "broken" not in list_backends(None)


def test_one_name_is_one_backend_to_dynamo() -> None:  # R11
    register_backend(lambda gm, inputs: gm.forward, name="stable")
    x = torch.randn(3)

    def many(x):
        return x.sin()

    for _ in range(4):
        torch.compile(many, backend="stable")(x)
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    assert len(_debug_get_cache_entry_list(many.__code__)) == 1


def test_options_reach_a_backend_that_takes_them() -> None:
    seen = {}

    def with_options(gm, example_inputs, **options):
        seen.update(options)
        return gm.forward

    register_backend(with_options)
    torch.compile(fn, backend="with_options", options={"a": 1})(torch.ones(2))
    assert seen == {"options": {"a": 1}}


def test_many_threads_register_look_up_and_list() -> None:
    def work(thread: int) -> None:
        for i in range(50):
            name = f"thread{thread}_{i}"
            register_backend(forward_of, name)
            assert lookup_backend(name) is forward_of
            assert name in list_backends()
            unregister_backend(name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not [name for name in list_backends(None) if name.startswith("thread")]
