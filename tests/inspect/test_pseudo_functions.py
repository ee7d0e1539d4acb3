"""Nested functions, cells, generators and classes, run from their pseudo-source."""
# ruff: noqa: B006, B008, B023, C416, E731, I002, PIE804, PLW0603, PTH118, PTH119, UP008
# ruff: noqa: UP050

import functools

import pytest

from support.pseudo import Cases, Noted, assert_same, from_text, say
from torchloom.inspect.pseudo import pseudo_source

case = Cases()
A, B = Noted("a"), Noted("bb")
COUNT = 0
y = "the global"


@case((1,), (5,))
def closures(x):
    y = x + 1

    def inner(v):
        return v * y

    before = inner(2)
    y = 10
    return before, inner(2), y


@case((2,))
def closures_that_store(x):
    def add(by=1):
        nonlocal x
        x += by
        return x

    return add(), add(5), x, (x, add(), x), [x, add(), add()]


@case((2,))
def a_variable_that_a_call_changes(x):
    def change():
        nonlocal x
        x = x * 2
        return x

    first = x + change()
    both = [x, (z := change()), x, z]
    x += change()
    return first, both, x


@case((2,))
def a_global_that_a_call_changes(x):
    global COUNT
    COUNT = x
    return [COUNT, count_up(), COUNT], COUNT + count_up(), (COUNT, (c := count_up()), COUNT, c)


def count_up():
    global COUNT
    COUNT += 1
    return COUNT


@case((1,))
def globals_stored_and_deleted(x):
    global NEW
    NEW = x
    kept = NEW
    NEW += 1
    kept = kept, NEW
    del NEW
    return kept


@case((1,))
def a_global_under_a_local_of_the_same_name(y):
    def inner():
        global y
        return y

    return inner(), y


@case((1, 2))
def defaults_and_annotations(a, b):
    def g(p: int, q: "str" = a, /, *r: list, s: dict = b, t=[], **u: None) -> tuple[int, ...]:
        t.append(p)
        return p, q, r, s, t, u

    return (
        g(1),
        g(1, 2, 3, s=4, v=5),
        sorted(map(str, g.__annotations__.items())),
        g.__name__,
        g.__defaults__,
    )


@case((3,))
def defaults_in_order(a):
    def g(p=say(a), *, k=say(4), m=say(5)):
        return p, k, m

    h = lambda p=say(6), *, q=say(7): (p, q)
    return g(), h(), g.__kwdefaults__


@case((3,), (0,))
def recursion(n):
    def down(k):
        return [k, *down(k - 1)] if k > 0 else []

    even = lambda k: True if k == 0 else odd(k - 1)
    odd = lambda k: False if k == 0 else even(k - 1)
    return down(n), even(n)


@case((2,))
def decorators(a):
    def times(n):
        def wrap(fn):
            @functools.wraps(fn)
            def inner(*args, **kwargs):
                return n * fn(*args, **kwargs)

            return inner

        return wrap

    @times(2)
    @times(a + 1)
    def g(x, y=1):
        return x + y

    return g(3), g.__name__, g(x=1, y=2)


@case(([1, 2, 3],))
def functions_made_in_a_loop(xs):
    fs, gs = [], []
    for x in xs:

        def f():
            return x

        fs.append(f)
        gs.append(lambda x=x: x)
    return [f() for f in fs], [g() for g in gs], fs[0] is fs[1]


@case(([1, 2, 3],))
def one_function_under_two_names(xs):
    f = g = lambda: xs
    f.mark = 1
    return f is g, g.mark, f() is g()


@case((3,), (0,))
def generators(n):
    def count():
        for i in range(n):
            got = yield i
            if got:
                yield got

    def both():
        yield from count()
        x = yield from [9, 8]
        yield x

    def nothing():
        return
        yield

    it = count()
    return list(both()), list(nothing()), next(it, None), it.send("sent") if n else None


@case((3,))
def a_generator(n):
    yield "first"
    for i in range(n):
        yield i, (yield -i)
    yield [i for i in range(n)]


@case((1,))
def a_lambda_that_yields(a):
    return list((lambda: (yield a))()), [*(x for x in (a, 2))]


@case((2,))
def three_levels(a):
    def first(b):
        def second(c):
            nonlocal a
            a += 1
            return a + b + c, [a + b + c + d for d in (1, 2)], (lambda: a * b * c)()

        return second

    return first(1)(2), first(2)(3), a


@case((2,))
def names_of_functions_are_not_taken(a):
    lambda_1 = "user"
    listcomp_1, genexpr_1 = 1, 2
    return [(lambda: x)() for x in [lambda_1]], listcomp_1, genexpr_1, (lambda: lambda_1)()


@case((2,))
def classes(a):
    class Base:
        """Words."""

        kind: int = a
        twice = kind * 2

        def get(self, more=twice):
            return self.kind + more + a

        @property
        def half(self):
            return self.kind / 2

        @staticmethod
        def plain():
            return "plain"

    class Derived(Base, metaclass=type):
        def get(self, more=1):
            return super().get(more) * 10, super(Derived, self).half, __class__.__name__

    d = Derived()
    return d.get(), d.half, Base().get(), Derived.plain(), Derived.__name__, Base.twice


@case((1,))
def imports(a):
    import os.path
    import os.path as p
    from os.path import join
    from os.path import sep as s

    return os.path.join("x", "y"), p.basename("a/b"), join("p", str(a)), s


@case((A, B))
def calls_in_order(a, b):
    return say(a).method(say(1), k=say(2))[say(3)].other(*say((4,)))(say(b))


@case((1,))
def a_call_with_all_kinds(a):
    def g(p, /, q, *r, s, t=5, **u):
        return p, q, r, s, t, u

    return g(a, 2, 3, s=4), g(a, q=2, s=3, z=1), g(*(1, 2), *[3], s=4, **{"t": 6, "w": 7})


@case.each()
def test_a_function_is_what_its_text_says(fn, calls) -> None:
    assert_same(fn, calls)


@pytest.mark.parametrize(
    "fn", [f for f, _ in case.found if f is not classes], ids=lambda f: f.__name__
)
def test_the_text_of_the_text_does_the_same(fn) -> None:
    calls = next(calls for each, calls in case.found if each is fn)
    assert_same(from_text(fn), calls)


def test_coroutines() -> None:
    async def fn(x):
        async def inner(v):
            return v + 1

        return await inner(x) + await inner(x + 1)

    def result(coroutine):
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value

    text = pseudo_source(fn.__code__, "f")
    assert text.startswith("async def f(x):")
    assert "    async def inner(v):" in text
    assert result(from_text(fn)(1)) == result(fn(1)) == 5


def test_an_unbound_variable_is_not_read_for_a_function_that_uses_it() -> None:
    def fn(x):
        def inner(v):
            return v * later

        later = x + 1
        return inner

    text = pseudo_source(fn.__code__, "f")
    assert text.index("return v * later") < text.index("later = x + 1")
    assert "later" not in text[: text.index("def inner")]
    assert from_text(fn)(2)(5) == 15
