"""More small programs that torch.compile meets in different ways: contexts, operators, objects, nesting."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import namedtuple

import torch
from torch import nn

from support.compiled_programs import Compile, X, Y

Pair = namedtuple("Pair", "left right")  # noqa: PYI024


@dataclasses.dataclass
class Options:
    scale: int = 2


def nested_loops_with_breaks(compile: Compile) -> None:
    def step(x):
        x = x + 1
        print(end="")
        return x * 2

    def fn(x):
        for _ in range(3):
            x = step(x)
        return x

    compile(fn)(X)


def break_in_a_comprehension(compile: Compile) -> None:
    compiled = compile(lambda xs: [x.item() for x in xs])
    compiled(X), compiled(Y)


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


def a_caught_exception(compile: Compile) -> None:
    def fn(x):
        try:
            raise KeyError("a")
        except KeyError:
            return x + 1

    compile(fn)(X)


def autocast_and_inference(compile: Compile) -> None:
    compiled = compile(lambda x: x @ x)
    x = torch.ones(2, 2)
    compiled(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(x)
    with torch.inference_mode():
        compiled(x)


def default_dtype(compile: Compile) -> None:
    compiled = compile(lambda x: x + torch.ones(2))
    compiled(X)
    torch.set_default_dtype(torch.float64)
    try:
        compiled(X)
    finally:
        torch.set_default_dtype(torch.float32)


def views_and_strides(compile: Compile) -> None:
    compiled = compile(lambda x: x * 2)
    x = torch.ones(4, 4)
    compiled(x), compiled(x.t()), compiled(x[:, :2])


def the_same_tensor_twice(compile: Compile) -> None:
    compiled = compile(lambda x, y: x.add_(1) + y)
    x = torch.ones(2)
    compiled(torch.ones(2), torch.ones(2)), compiled(x, x)


def named_tuples_and_dataclasses(compile: Compile) -> None:
    compiled = compile(lambda pair, options: pair.left * options.scale + pair.right)
    compiled(Pair(X, X), Options()), compiled(Pair(X, X), Options(3))


def an_autograd_function(compile: Compile) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Dynamo makes an instance of it
        compile(lambda x: Double.apply(x) + 1)(x).sum().backward()


def cond(compile: Compile) -> None:
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    compile(fn)(X)


def vmap_and_grad(compile: Compile) -> None:
    compile(torch.vmap(lambda x: x.sum()))(torch.ones(2, 2))
    compile(torch.func.grad(lambda x: (x * x).sum()))(X)


def hooks_on_modules(compile: Compile) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    compile(model)(X)


def modules_in_a_list(compile: Compile) -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def fn(x):
        for layer in layers:
            x = layer(x)
        return x

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


def unique_shapes(compile: Compile) -> None:
    compiled = compile(lambda x: torch.nonzero(x) * 2)
    compiled(X)


def attributes_are_set(compile: Compile) -> None:
    options = Options()

    def fn(x):
        options.scale += 1
        return x * options.scale

    compiled = compile(fn)
    compiled(X), compiled(X), compiled(X)


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


def tensors_to_lists(compile: Compile) -> None:
    compiled = compile(lambda x: x + len(x.tolist()))
    compiled(X)


def random_and_dropout(compile: Compile) -> None:
    compiled = compile(lambda x: nn.functional.dropout(x + torch.rand_like(x)))
    compiled(X), compiled(X)


def keywords(compile: Compile) -> None:
    compiled = compile(lambda x, **named: x + sum(named.values()))
    compiled(X), compiled(X, y=X), compiled(X, z=X)


def checkpointed(compile: Compile) -> None:
    from torch.utils.checkpoint import checkpoint

    def fn(x):
        return checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False)

    compile(fn)(torch.ones(2, requires_grad=True)).sum().backward()


MORE_PROGRAMS = [
    value
    for value in list(globals().values())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and getattr(value, "__annotations__", {}).get("compile") == "Compile"
]
