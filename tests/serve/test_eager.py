"""Eager as a switch: for a block, a call, the process, or by the environment; what is compiled stays."""

from __future__ import annotations

import asyncio
import copy
import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from serve.models import Plain, made, rows
from torchloom.errors import ContractError, ServeError
from torchloom.serve import (
    Contract,
    Dim,
    Program,
    build,
    counter,
    eager,
    load,
    served,
    support_torch_compile,
    warm_up,
)

ENFORCE = "TORCHLOOM_ENFORCE_EAGER"
STANCE = 'torch.compiler.set_stance("force_eager")'
X = torch.randn(4, 16)


class Spy:
    """A backend that counts runs of what it compiled."""

    def __init__(self) -> None:
        self.num_runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.num_runs += 1
            return graph(*args)

        return run


@pytest.fixture(autouse=True)
def no_grad(monkeypatch):
    monkeypatch.delenv(ENFORCE, raising=False)
    with torch.no_grad():
        yield


def spied(model: nn.Module | None = None) -> tuple[nn.Module, Program, Spy]:
    """Return a model, its program, and what counts the runs of its compiled code."""
    model, spy = model or made(Plain), Spy()
    program = build(model, rows(), backend=spy)
    spy.num_runs = 0
    return model, program, spy


def test_a_block_a_call_and_the_stance_run_the_model_and_leave_the_program():
    model, program, spy = spied()
    wanted = model(X)
    with counter.expect(num_traces=0, num_compiles=0, num_eager_calls=4, num_refused_calls=0):
        with eager():
            assert program.why_eager == "torchloom.serve.eager()"
            assert torch.equal(program(X), wanted)
            assert program(torch.randn(70, 16)).shape == (70, 16)  # no program is for this size
        assert torch.equal(program.eager(X), wanted)
        with torch.compiler.set_stance("force_eager"):
            assert program.why_eager == STANCE
            assert torch.equal(program(X), wanted)
    assert spy.num_runs == 0
    assert program.why_eager == ""
    with counter.expect(num_eager_calls=0):
        torch.testing.assert_close(program(X), wanted)
    assert spy.num_runs == 1
    with pytest.raises(ContractError), eager():  # the switch ends with an error, too
        with pytest.raises(RuntimeError):
            program(torch.randn(4, 15))
        raise ContractError("of the user's")
    program(X)
    assert spy.num_runs == 2


def test_a_loaded_program_and_a_copy_hear_the_switch(tmp_path, monkeypatch):
    model = made(Plain)
    build(model, rows(), backend="eager", store=tmp_path)
    program = load(tmp_path, model)
    for each in (program, copy.deepcopy(program)):
        with counter.expect(num_eager_calls=3):
            assert torch.equal(each.eager(X), model(X))
            with eager():
                assert torch.equal(each(X), model(X))
            with torch.compiler.set_stance("force_eager"):
                assert torch.equal(each(X), model(X))
        with counter.expect(num_eager_calls=0):
            each(X)
    monkeypatch.setenv(ENFORCE, "1")
    with counter.expect(num_loads=0, num_eager_calls=1):
        assert torch.equal(load(tmp_path, model)(X), model(X))


@pytest.mark.parametrize("switch", [eager, lambda: torch.compiler.set_stance("force_eager")])
def test_a_build_compiles_nothing_while_the_switch_is_on(switch, tmp_path):
    model = made(Plain)
    with switch(), counter.expect(num_traces=0, num_compiles=0, num_saves=0):
        program = build(model, rows(), backend="eager", store=tmp_path)
    assert program.why_eager in ("torchloom.serve.eager()", STANCE)
    assert "not compiled" in repr(program)
    with counter.expect(num_eager_calls=2):
        assert torch.equal(program(X), model(X))
        assert torch.equal(copy.deepcopy(program)(x=X), model(X))
    program.warm_up()
    assert build(model, rows(), backend="eager", store=tmp_path).why_eager == ""


def test_the_environment_is_read_by_each_build(monkeypatch):
    model, program, spy = spied()
    monkeypatch.setenv(ENFORCE, "1")
    with counter.expect(num_traces=0, num_compiles=0):
        as_it_is = build(model, rows())
    assert as_it_is.why_eager == f"{ENFORCE}=1"
    program(X)
    assert spy.num_runs == 1  # it was built before
    decorated = Decorated().eval()
    with counter.expect(num_traces=0):
        decorated(X)
    assert served(decorated).why_eager == f"{ENFORCE}=1"
    monkeypatch.delenv(ENFORCE)
    with counter.expect(num_compiles=2, num_eager_calls=0):
        build(model, rows(), backend="eager")(X)
        decorated(X)
    assert served(decorated).why_eager == ""


@support_torch_compile(backend="eager")
class Decorated(nn.Module):
    """Counts its own eager runs, which no trace does."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            RUNS.put(len(x))
        return x * 2


RUNS: queue.SimpleQueue[int] = queue.SimpleQueue()
"""Building refuses a forward that it sees write to a global; it does not see into this one."""


def drained() -> list[int]:
    return [RUNS.get() for _ in range(RUNS.qsize())]


def test_a_decorated_model_hears_the_switch_before_and_after_it_is_compiled():
    model = Decorated().eval()
    for _ in range(2):
        for switch in (eager, lambda: torch.compiler.set_stance("force_eager")):
            drained()
            with switch(), counter.expect(num_traces=0, num_compiles=0):
                assert torch.equal(model(X), X * 2)
                assert torch.equal(model(x=torch.ones(99, 16)), torch.full((99, 16), 2.0))
                assert served(model).why_eager
                with pytest.raises(ServeError, match="is not compiled: "):
                    warm_up(model)
            assert drained() == [4, 99]
            assert served(model).why_eager == ""
        model(X)
        drained()
        with counter.expect(num_traces=0, num_compiles=0, num_eager_calls=0):
            model(X)
        assert drained() == []


def test_threads_and_tasks_have_switches_of_their_own_and_the_stance_is_the_process_s():
    _, program, spy = spied()
    is_inside, is_done = threading.Event(), threading.Event()

    def inside() -> None:
        with torch.no_grad(), eager():
            program(X)
            is_inside.set()
            is_done.wait(30)
            program(X)

    thread = threading.Thread(target=inside)
    thread.start()
    is_inside.wait(30)
    program(X)
    is_done.set()
    thread.join()
    assert spy.num_runs == 1

    async def task(is_eager: bool) -> None:
        for _ in range(3):
            if is_eager:
                with eager():
                    await asyncio.sleep(0)
                    program(X)
            else:
                program(X)
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(task(True), task(False))

    asyncio.run(both())
    assert spy.num_runs == 4
    with torch.compiler.set_stance("force_eager"):
        thread = threading.Thread(target=torch.no_grad()(program), args=(X,))
        thread.start()
        thread.join()
    assert spy.num_runs == 4


def test_inside_of_torch_compile():
    """A decorated model is a part of the outer graph, which torch's stance alone turns off; a program is called by it."""
    _, program, spy = spied()
    decorated = Decorated().eval()

    @torch.compile(backend="eager")
    def outer(x: Tensor) -> Tensor:
        y = decorated(x).sin()
        with eager():
            y = program(y) + 1
        return y + program(y)

    with eager():
        outer(X)
        assert spy.num_runs == 0
    outer(X)
    assert spy.num_runs == 1
    drained()
    with torch.compiler.set_stance("force_eager"):
        outer(X)
    assert drained() == [4]
    assert spy.num_runs == 1


def test_what_the_contract_fixes_need_not_be_passed_and_arguments_keep_their_names():
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float, *more: Any, is_eager: bool = False) -> Tensor:
            return x * scale + len(more) + is_eager

    contract = Contract({"x": (Dim("batch", 1, 8), 16)}, fixed={"scale": 3.0, "is_eager": True})
    for program in (
        build(Scaled().eval(), contract, backend="eager"),
        eager()(build)(Scaled().eval(), contract),
    ):
        assert torch.equal(program.eager(X), X * 3 + 1)
        assert torch.equal(program.eager(X, 2.0, 1, 1, is_eager=False), X * 2 + 2)
