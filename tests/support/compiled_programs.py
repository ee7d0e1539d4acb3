"""Small programs that torch.compile meets in different ways; each gets a `compile` with a counting backend."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Compile = Callable[..., Any]
X, Y, Z = torch.ones(2), torch.ones(3), torch.ones(4)
OPTIONS = {"mode": "a"}


class Layer(nn.Module):
    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), scale

    def forward(self, x):
        return self.linear(x) * self.scale


class Noisy(nn.Module):
    def forward(self, x):
        x = x + 1
        print(end="")
        return x * 2


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Noisy()

    def forward(self, x):
        return self.second(self.first(x))


class Callee:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __call__(self, x):
        return x * self.scale


def add(x, y=1):
    return x + y


def one(compile: Compile) -> None:
    compile(add)(X)


def twice_the_same(compile: Compile) -> None:
    fn = compile(add)
    fn(X), fn(X)


def sizes(compile: Compile) -> None:
    fn = compile(add)
    fn(X), fn(Y), fn(Z)


def static_sizes(compile: Compile) -> None:
    fn = compile(add, dynamic=False)
    fn(X), fn(Y), fn(Z)


def always_dynamic(compile: Compile) -> None:
    fn = compile(add, dynamic=True)
    fn(X), fn(Y), fn(torch.ones(1)), fn(torch.ones(0))


def marked(compile: Compile) -> None:
    x = torch.ones(5)
    torch._dynamo.mark_dynamic(x, 0)
    fn = compile(add)
    fn(x), fn(Y)


def dtypes(compile: Compile) -> None:
    fn = compile(add)
    fn(X), fn(X.double()), fn(X.int())


def ranks(compile: Compile) -> None:
    fn = compile(add)
    fn(X), fn(torch.ones(2, 2)), fn(torch.ones(2, 2, 2))


def grads(compile: Compile) -> None:
    fn = compile(add)
    fn(X), fn(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        fn(X)


def numbers(compile: Compile) -> None:
    fn = compile(add)
    fn(X, 1), fn(X, 2), fn(X, 3), fn(X, 2.5), fn(X, True)


def words(compile: Compile) -> None:
    fn = compile(lambda x, mode: x + len(mode))
    fn(X, "a"), fn(X, "bb"), fn(X, "a")


def lists(compile: Compile) -> None:
    fn = compile(lambda xs: sum(x * 2 for x in xs))
    fn([X]), fn([X, X]), fn([X, X, X])


def a_global(compile: Compile) -> None:
    names = {"SCALE": 2}
    exec("def scaled(x):\n    return x * SCALE", names)
    fn = compile(names["scaled"])
    for names["SCALE"] in (3, 4, 5):
        fn(X)


def a_dict(compile: Compile) -> None:
    fn = compile(lambda x: x + 1 if OPTIONS["mode"] == "a" else x - 1)
    try:
        for OPTIONS["mode"] in ("a", "b"):
            fn(X)
    finally:
        OPTIONS["mode"] = "a"


def a_closure(compile: Compile) -> None:
    def make(scale):
        return lambda x: x * scale

    compile(make(2))(X), compile(make(3))(X)


def functions_as_arguments(compile: Compile) -> None:
    fn = compile(lambda x, op: op(x) + 1)
    fn(X, torch.sin), fn(X, torch.cos), fn(X, torch.sin)


def no_operators(compile: Compile) -> None:
    fn = compile(lambda x: x)
    fn(X), fn(Y)


def no_tensors(compile: Compile) -> None:
    fn = compile(lambda n: n + 1)
    fn(1), fn(2)


def only_shapes(compile: Compile) -> None:
    fn = compile(lambda x: x.shape[0] * 2)
    fn(X), fn(Y), fn(Z)


def break_at_the_top(compile: Compile) -> None:
    def fn(x):
        torch._dynamo.graph_break()
        return x + 1

    compiled = compile(fn)
    compiled(X), compiled(Y)


def break_in_the_middle(compile: Compile) -> None:
    def fn(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    compiled = compile(fn)
    compiled(X), compiled(Y)


def break_at_the_end(compile: Compile) -> None:
    def fn(x):
        x = x + 1
        print(end="")
        return x

    compiled = compile(fn)
    compiled(X), compiled(Y)


def three_breaks(compile: Compile) -> None:
    def fn(x):
        for _ in (1,):
            x = x + 1
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        x = x - 3
        print(end="")
        return x / 4

    compile(fn)(X)


def break_in_a_loop(compile: Compile) -> None:
    def fn(x):
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    compiled = compile(fn)
    compiled(X), compiled(X)


def break_in_a_call(compile: Compile) -> None:
    def inner(x):
        x = x + 1
        print(end="")
        return x * 2

    compile(lambda x: inner(x) - 1)(X)


def break_two_calls_deep(compile: Compile) -> None:
    def innermost(x):
        print(end="")
        return x + 1

    def inner(x):
        return innermost(x * 2) * 3

    def fn(x):
        return inner(x + 1) - 1

    compile(fn)(X)


def break_in_try(compile: Compile) -> None:
    def fn(x):
        try:
            x = x + 1
            torch._dynamo.graph_break()
            return x * 2
        finally:
            x = x - 1

    compiled = compile(fn)
    compiled(X), compiled(Y)


def break_in_with(compile: Compile) -> None:
    def fn(x):
        with torch.no_grad():
            x = x + 1
            torch._dynamo.graph_break()
            return x * 2

    compile(fn)(X)


def branch_on_data(compile: Compile) -> None:
    def fn(x):
        x = x * 2
        if x.sum() > 0:
            return x + 1
        return x - 1

    compiled = compile(fn)
    compiled(X), compiled(-X), compiled(Y)


def branch_one_side(compile: Compile) -> None:
    def fn(x):
        if x.sum() > 0:
            x = x + 1
        return x * 2

    compile(fn)(X)


def loop_on_data(compile: Compile) -> None:
    def fn(x):
        while x.sum() < 10:
            x = x * 2
        return x

    compiled = compile(fn)
    compiled(X), compiled(X)


def item(compile: Compile) -> None:
    compile(lambda x: x + x.sum().item())(X)


def item_in_a_branch(compile: Compile) -> None:
    def fn(x):
        if x.sum().item() > 0:
            return x + 1
        return x - 1

    compile(fn)(X)


def numpy_and_math(compile: Compile) -> None:
    compile(lambda x: x * math.sqrt(2) + math.pi)(X)


def disabled_call(compile: Compile) -> None:
    @torch.compiler.disable
    def eager(x):
        return x + 1

    compile(lambda x: eager(x * 2) * 3)(X)


def limit(compile: Compile) -> None:
    fn = compile(lambda x, mode: x + len(mode), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for mode in ("a", "bb", "ccc", "dddd", "a", "ccc"):
            fn(X, mode)


def limit_of_its_own(compile: Compile) -> None:
    fn = compile(lambda x, mode: x + len(mode), recompile_limit=1)
    for mode in ("a", "bb", "ccc"):
        fn(X, mode)


def limit_behind_a_break(compile: Compile) -> None:
    def fn(x, mode):
        x = x + 1
        torch._dynamo.graph_break()
        return x + len(mode)

    compiled = compile(fn)
    with torch._dynamo.config.patch(recompile_limit=2):
        for mode in ("a", "bb", "ccc", "dddd"):
            compiled(X, mode)


def limit_of_a_module(compile: Compile) -> None:
    module = Layer()
    compiled = compile(module)
    with torch._dynamo.config.patch(recompile_limit=2):
        for scale in (0.5, 1.5, 2.5, 3.5):
            module.scale = str(scale).count("5") and scale
            compiled(X)


def a_module(compile: Compile) -> None:
    compiled = compile(Layer())
    compiled(X), compiled(torch.ones(3, 2))


def two_modules_of_a_class(compile: Compile) -> None:
    compile(Layer())(X), compile(Layer(2))(X)


def a_module_of_modules(compile: Compile) -> None:
    compile(Both())(X)


def a_sequential(compile: Compile) -> None:
    compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))(X)


def a_module_in_two_modes(compile: Compile) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    compiled = compile(module)
    compiled(X)
    module.eval()
    compiled(X)


def a_partial(compile: Compile) -> None:
    compile(functools.partial(add, y=3))(X)


def a_method(compile: Compile) -> None:
    compile(Callee(2).__call__)(X)


def objects_as_arguments(compile: Compile) -> None:
    fn = compile(lambda x, callee: callee(x) + 1)
    fn(X, Callee(2)), fn(X, Callee(3))


def two_backends(compile: Compile) -> None:
    compile(add)(X), torch.compile(add, backend="eager")(X)


def isolated(compile: Compile) -> None:
    compile(add, isolate_recompiles=True)(X), compile(add, isolate_recompiles=True)(X)


def raises_while_traced(compile: Compile) -> None:
    def fn(x):
        x = x + 1
        raise ValueError("on purpose")

    with contextlib.suppress(ValueError):
        compile(fn)(X)


def a_generator(compile: Compile) -> None:
    def steps(x):
        yield x + 1
        yield x * 2

    compile(lambda x: sum(steps(x)))(X)


def backward(compile: Compile) -> None:
    x = torch.ones(2, requires_grad=True)
    compile(lambda x: (x * x).sum())(x).backward()


def reset_between(compile: Compile) -> None:
    fn = compile(add)
    fn(X), fn(Y)
    torch._dynamo.reset()
    fn(X), fn(X)


def warm(compile: Compile) -> None:
    """The harness calls it once before the watch, with other sizes."""
    compile(add)(torch.ones(len(compile.sizes) + 7))
    compile.sizes.append(1)


def force_eager(compile: Compile) -> None:
    fn = compile(add)
    with torch.compiler.set_stance("force_eager"):
        fn(X)
    fn(X)


PROGRAMS = [
    value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and getattr(value, "__annotations__", {}).get("compile") == "Compile"
]
