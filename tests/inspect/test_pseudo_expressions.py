"""Expressions, run from their pseudo-source: values, order of evaluation, and which objects are one."""
# ruff: noqa: E714, PIE804, RUF021, UP031

from __future__ import annotations

import math

from support.pseudo import Cases, Noted, assert_same, from_text, say
from torchloom.inspect.pseudo import pseudo_source

case = Cases()
A, B, C = Noted("a"), Noted("bb"), Noted("c")
NUMBERS = ((2, 3), (5, -2), (-7, 4))
WORDS = (("ab", 3), ("x'y\"z\\", 11), ("{}", 1))


@case((7, 3), (-7, 3), (7, -3))
def arithmetic(a, b):
    return a + b * 2 - (a - b) / 2, a // b, a % b, -a // b, (-a) // b, a - (b - a), (a, b)


@case(*NUMBERS)
def powers(a, b):
    b = abs(b)
    return -(a**b), (-a) ** b, a**-b, (-1) ** a, -(1**a), (a**b) ** 2, a ** (b**2), 2**-1, (-2) ** b


@case((6, 3), (-6, 1))
def bits(a, b):
    return a & b | a ^ b, a & (b | a) ^ b, ~a, ~(a + b), a << b >> 1, a << (b >> 1), not a & b, ~-a


@case((A, B, C))
def operators_keep_their_order(a, b, c):
    return (
        a @ b @ c,
        a - (b + c) * a,
        a // b % c,
        a**b**c,
        (a**b) ** c,
        a < b,
        a[b],
        a[b, c],
        -a,
        +a,
        ~a,
    )


@case()
def negative_constants():
    return (-3).bit_length(), (5).bit_length(), (-2.5).is_integer(), (-1).real, -(3).real, (1).real


@case((2,), (3,))
def a_negative_base(a):
    return (-1) ** a, (-1.5) ** a, (-2) ** 2, -(2**a), [-1][0] ** a


@case((2,))
def constants_of_all_kinds(a):
    return (
        1e308 * 10,
        -0.0,
        1j,
        -1j,
        1 + 2j,
        2**200,
        -(2**70),
        b"a\x00\xff",
        ...,
        None,
        True,
        "\n\t\u00e9\U0001f600",
    )


@case((1.0,), (-0.5,))
def floats_without_a_literal(a):
    return (
        1e999,
        -1e999,
        a * 1e999,
        1e999 - 1e999,
        complex(1, -0.0),
        -1e999j,
        (1e999, (-1e999,)),
        a in {1e999, 2},
    )


@case((1, 2, 3), (3, 2, 1), (2, 2, 2))
def chained_comparisons(a, b, c):
    return a < b < c, a <= b > c != a, a == b == c, not a < b < c, (a < b) < c, a < (b < c)


@case((A, B, C), (B, A, C), (C, A, B))
def chained_comparisons_ask_once(a, b, c):
    return say(a) < say(b) < say(c)


@case((1, [1], None), (None, [None], 1), ([], [[]], []))
def identity_and_membership(a, b, c):
    return (
        a is b,
        a is not c,
        a in b,
        a not in b,
        (a in b) is True,
        not (a is None),
        a is None,
        c is not None,
    )


@case((0, "b", []), (1, "", [2]), (None, None, 0))
def boolean_operators_give_values(a, b, c):
    return a and b, a or b, a and b or c, a or (b and c)


@case((0, "b", []), (1, "", [2]), (None, None, 0))
def more_boolean_operators(a, b, c):
    return (a or b) and c, not a or not (b and c), a and (b or c)


@case((A, B, C), (B, A, C), (B, B, B))
def boolean_operators_stop_early(a, b, c):
    return say(a) and say(b) or say(c)


@case((1, 2), (0, 2), (None, None))
def conditional_expressions(a, b):
    return (a if a else b) + 1 if b else -1, [a if b else 0, b if a is None else 1]


@case((3,), (0,))
def a_conditional_argument(a):
    return max(say(1), say(a) if a else say(9), say(2))


@case(([1, 2, 3, 4, 5], 1, 3), ("abcdef", -3, None))
def slices(x, a, b):
    return x[a:b], x[:], x[a:], x[:b], x[::2], x[a:b:2], x[::-1], x[-2:], x[: a + 1], x[slice(a, b)]


@case((A, 1, 2))
def slices_in_tuples(x, a, b):
    return (
        x[a, 1:2],
        x[..., 1::2],
        x[:, None],
        x[a:b, ::b],
        x[(a, b)],
        x[1:2,],
        x[:, :, -1:],
        x[(1, 2), 3],
    )


@case((A, 1, 2))
def stores_to_slices(x, a, b):
    x[a:b] = a
    x[a, 1::2] = b
    x[...] = x[:, ::-1]
    x[a:, b] += 1
    del x[1:2], x[a, ::2]
    return x


@case(*WORDS)
def formatted(a, b):
    return (
        f"{a}",
        f"{a!r}",
        f"{a!s:>10}|{a!a}",
        f"{b:04d}{b!r:>{b}}",
        f"{{{a}}}",
        f"{a + 'x'}-{b * 2:.{b}f}",
        f"'{a}' \"{b}\"",
    )


@case(({"k": 1}, 2.5), ({"k": "{"}, 3))
def formatted_expressions(a, b):
    return (
        f"{a['k']}{b=}",
        f"{a['k']!r:>8}",
        f"{ {1: b}[1] }",
        f"{(lambda: b)()}",
        f"{b:{'>'}{10}}",
        f"x{b if b > 2.7 else a}\n{'{'}",
    )


@case((3,))
def formatting_does_not_use_names(format):
    str, repr, ascii, tuple, iter = 1, 2, 3, 4, 5
    return f"{format!r:>4}{str!s}{repr!a}{ascii}", (*[tuple, iter], format)


@case((Noted("d"), 2))
def formatted_in_order(a, b):
    return f"{say(a)!r}{say(b):>{say(5)}}" + f"{say(1)}"


@case((1,), (5,))
def walrus(a):
    x = [a, a := a + 1, a, a * 2]
    return x, (y := a * 3) + y, [z := 1, z + a], a


@case((4,), (-4,))
def names_that_look_generated(a):
    t1 = a
    t2 = t1 + 1
    x = [a, a := a + 1, a, a * t1]
    t3, *t4 = x
    return t1, t2, t3, t4, x


@case(([1, 2, 3],))
def order_with_effects(x):
    return [x[0], x.append(9), x[-1], len(x), x.pop(), x.pop(), [*x], x.clear(), x, (*x,)]


@case((A, B))
def a_value_before_a_statement(a, b):
    return (a + b, c := a.change(), a + b, c)


@case(([3, 1],))
def a_load_before_a_statement(x):
    return x[0], (y := x.pop(0)), x[0], y


@case((A, B))
def order_in_displays_and_calls(a, b):
    return (
        {say(1): say(2), say(3): say(4)},
        say(a)(say(1), *say([2]), k=say(3), **say({"m": 4})),
        {say(5), say(6)},
    )


@case(([1],))
def method_chains(x):
    return (
        "a,b".upper().split(",")[0].lower() * 2,
        (1, 2).count(1),
        [3, 1].index(1),
        {"a": 1}.get("b", x),
        b"x".hex(),
        (1.5).hex(),
    )


@case(("%s-%d", 4))
def old_formatting(a, b):
    return a % (b, b), "%s" % a, a % (1, 2) + "!"


@case((1, 2))
def keyword_arguments(a, b):
    def g(*args, **kwargs):
        return args, kwargs

    d = {"x": a}
    return (
        g(*[a, b], **d),
        g(a, *(b, a), k=b),
        g(**d, y=1, **{"z": 2}),
        g(*d, a, *d),
        g(**{"class": 1, "not a name": b}),
        g(**{}),
        g(*(), a),
        g(k=a, **d),
    )


@case((1,))
def keyword_arguments_that_clash(a):
    return dict(**{"x": a}, **{"x": 2})


@case(({"x": 1},))
def keyword_arguments_that_clash_at_a_call(d):
    return dict(x=3, **d)


@case((2,))
def ellipsis_and_tuples(a):
    return ..., (a,), ((),), (((a,),),), (a, ...), ()


@case(*WORDS)
def escapes(a, b):
    return (
        "\\",
        "'",
        '"',
        "'\"",
        "\x00\x1f\x7f",
        "\u2028",
        r"\d",
        a + "\r\n",
        "{" + a + "}",
        b"\\'\"",
    )


@case((1,))
def lambdas(a):
    f, g, h = lambda: a, lambda x, y=a, *z, k=2, **m: (x, y, z, k, m), lambda *x: x
    return (
        f(),
        g(1),
        g(1, 2, 3, k=4, n=5),
        h(1, *[2]),
        (lambda: (lambda b: a + b)(2))(),
        [(lambda x: -x)(a)][0],
    )


@case(([1, 2],), ([],))
def identities_of_calls(x):
    y = z = list(x)
    v = w = (x, y)
    y.append(1)
    return y, z, v, w, y is z, v is w


@case(("i",))
def conversions(x):
    return str(x), repr(x), int("12") + 1, float("inf"), float("-inf") < 0, [float("nan")][0] != 1


@case.each()
def test_an_expression_is_what_its_text_says(fn, calls) -> None:
    assert_same(fn, calls)


@case.each()
def test_the_text_of_the_text_does_the_same(fn, calls) -> None:
    """What is printed has constructs of its own, and is read the same way."""
    again = from_text(fn)
    assert_same(again, calls)


def test_floats_without_a_literal_are_calls() -> None:
    code = (lambda: 1).__code__
    consts = (math.inf, -math.inf, math.nan, complex(math.inf, -0.0), complex(-0.0, 1), (math.inf,))
    code = (lambda: (1.5, 2.5, 3.5, 4.5, 5.5, 6.5)).__code__.replace(co_consts=(None, consts))
    found: dict[str, object] = {}
    exec(pseudo_source(code, "f"), found)
    assert repr(found["f"]()) == repr(consts)


def test_a_string_that_is_cut_is_not_another_string() -> None:
    text = pseudo_source(compile(f"def f():\n    return {'x' * 500!r}", "x", "exec").co_consts[0])
    assert text.endswith("'...")


def test_a_function_is_not_written_with_its_defaults_alone() -> None:
    def fn(a, b, /, c, *d, e, **f):
        return a

    assert pseudo_source(fn.__code__, "f").startswith("def f(a, b, /, c, *d, e, **f):")
