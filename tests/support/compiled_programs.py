"""Small programs that torch.compile meets in different ways; each gets a `compile` with a counting backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Compile = Callable[..., Any]
X, Y, Z = torch.ones(2), torch.ones(3), torch.ones(4)


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


def add(x, y=1):
    return x + y


def sizes(compile: Compile) -> None:
    fn = compile(add)
    fn(X), fn(Y), fn(Z)


def dtypes(compile: Compile) -> None:
    fn = compile(add)
    fn(X), fn(X.double()), fn(X.int())


def grads(compile: Compile) -> None:
    fn = compile(add)
    fn(X), fn(torch.ones(2, requires_grad=True))
    with torch.no_grad():
        fn(X)


def numbers(compile: Compile) -> None:
    fn = compile(add)
    fn(X, 1), fn(X, 2), fn(X, 3), fn(X, 2.5), fn(X, True)


def a_global(compile: Compile) -> None:
    names = {"SCALE": 2}
    exec("def scaled(x):\n    return x * SCALE", names)
    fn = compile(names["scaled"])
    for names["SCALE"] in (3, 4, 5):
        fn(X)


def no_operators(compile: Compile) -> None:
    fn = compile(lambda x: x)
    fn(X), fn(Y)


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


def break_two_calls_deep(compile: Compile) -> None:
    def innermost(x):
        print(end="")
        return x + 1

    def inner(x):
        return innermost(x * 2) * 3

    def fn(x):
        return inner(x + 1) - 1

    compile(fn)(X)


def branch_on_data(compile: Compile) -> None:
    def fn(x):
        x = x * 2
        if x.sum() > 0:
            return x + 1
        return x - 1

    compiled = compile(fn)
    compiled(X), compiled(-X), compiled(Y)


def loop_on_data(compile: Compile) -> None:
    def fn(x):
        while x.sum() < 10:
            x = x * 2
        return x

    compiled = compile(fn)
    compiled(X), compiled(X)


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


def a_module_of_modules(compile: Compile) -> None:
    compile(Both())(X)


def a_module_in_two_modes(compile: Compile) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    compiled = compile(module)
    compiled(X)
    module.eval()
    compiled(X)


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


def break_in_a_context_of_ones_own(compile: Compile) -> None:
    @contextlib.contextmanager
    def context():
        yield 1

    def fn(x):
        with context():
            x = x + 1
            if x.sum() > 0:
                x = x * 2
        return x - 1

    compile(fn)(X)


def two_breaks_on_a_line(compile: Compile) -> None:
    def fn(x):
        print(end=""), print(end="")
        return x + 1

    compile(fn)(X)


def cond(compile: Compile) -> None:
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    compile(fn)(X)


def a_lazy_module(compile: Compile) -> None:
    compiled = compile(nn.Sequential(nn.LazyLinear(2), nn.ReLU()))
    compiled(X), compiled(X)


def an_optimizer(compile: Compile) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(X).sum().backward()
    compile(optimizer.step)()


def compiled_in_compiled(compile: Compile) -> None:
    inner = compile(lambda x: x + 1)
    compile(lambda x: inner(x) * 2)(X)


def a_global_limit(compile: Compile) -> None:
    compiled = compile(lambda x, word: x + len(word), dynamic=False)
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        for word in ("a", "bb", "ccc"):
            compiled(X, word)


def eager_on_recompile(compile: Compile) -> None:
    compiled = compile(lambda x: x + 1)
    compiled(X)
    with torch.compiler.set_stance("eager_on_recompile"):
        compiled(Y), compiled(X)


def checkpointed(compile: Compile) -> None:
    from torch.utils.checkpoint import checkpoint

    def fn(x):
        return checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False)

    compile(fn)(torch.ones(2, requires_grad=True)).sum().backward()


PROGRAMS = [
    value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and getattr(value, "__annotations__", {}).get("compile") == "Compile"
]
