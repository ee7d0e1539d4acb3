"""Branches, loops and statements around others, run from their pseudo-source."""
# ruff: noqa: B018, C416, E714, F821, F842, PIE790, RUF021, SIM208, UP037

from __future__ import annotations

import types

from support.pseudo import MARK, Cases, Noted, assert_same, from_text, say
from torchloom.inspect.pseudo import pseudo_source

case = Cases()
A, B = Noted("a"), Noted("bb")
LISTS = (([1, 2, 3],), ([],), ([0, 5, 0, 2],), ([7, 7],))


@case((1, 2), (0, 2), (None, 0), (-1, None))
def branches(a, b):
    if a is None:
        r = "none"
    elif not a:
        r = "zero"
    elif a > 0 and (b is not None or a == 3):
        r = "positive"
    else:
        r = "rest"
    if b is not None:
        r += str(b)
    return r


@case((A, B), (B, A), (B, B))
def branches_ask_in_order(a, b):
    if say(a) and say(b) or not say(b):
        return say(1)
    if not (a and b):
        return say(2)
    return say(3)


@case(("(",), (")",), ("x",), ("",))
def parentheses_in_conditions(a):
    if not ((a + "(").count(")") or a.endswith(")")):
        return 1
    if not (a + "(").startswith("("):
        return 2
    return 3


@case((0, 1), (1, 0), (2, 2))
def conditions_of_all_kinds(a, b):
    found = []
    if not a < b:
        found.append(1)
    if a == b is not None:
        found.append(2)
    if not (a is None):
        found.append(3)
    if (a < b) is None:
        found.append(4)
    if not not a:
        found.append(5)
    return found


@case(*LISTS)
def loops(xs):
    total = 0
    for i, x in enumerate(xs):
        if x == 2:
            continue
        if x > 6:
            break
        total += x * i
    else:
        total += 100
    return total, xs


@case(*LISTS)
def loops_in_loops(xs):
    found = []
    for x in xs:
        for y in xs:
            if y == 5:
                break
            if x == y:
                continue
            found.append((x, y))
        else:
            found.append("else")
        found.append(x)
    return found


@case(*LISTS)
def three_loops(xs):
    found = []
    for x in xs:
        for y in xs:
            for z in xs:
                if z == 2:
                    break
                if z == 7:
                    continue
                found.append((x, y, z))
            if y == 5:
                break
        else:
            continue
        found.append("broken")
    return found


@case((5,), (0,), (30,))
def while_loops(n):
    found = []
    while n:
        n -= 1
        if n % 3 == 0:
            continue
        if n > 25:
            break
        found.append(n)
    else:
        found.append("else")
    while True:
        n += 2
        if n > 10:
            return found, n


@case(*LISTS)
def while_in_for(xs):
    found = []
    for x in xs:
        i = 0
        while i < x:
            i += 1
            if i == 4:
                break
            if i == 2:
                continue
            found.append((x, i))
        found.append(x)
    return found


@case((4,), (0,))
def for_in_while(n):
    found = []
    while n > 0:
        n -= 1
        for i in range(n):
            if i == 2:
                break
            found.append((n, i))
        if n == 1:
            continue
        found.append(n)
    return found


@case((6,), (0,))
def while_in_while(n):
    i = found = 0
    while i < n:
        j = 0
        while j < i:
            j += 1
            if (i + j) % 3 == 0:
                continue
            if j > 4:
                break
            found += i * j
        i += 1
    return found


@case(*LISTS)
def a_return_from_within(xs):
    for x in xs:
        for y in range(x):
            while y:
                if y == 2:
                    return x, y
                y -= 1
    return None


@case(*LISTS)
def loops_with_comprehensions(xs):
    found = []
    for x in xs:
        found += [x * y for y in xs if y]
        if [y for y in found if y > 8]:
            break
    return found, [[z for z in range(x)] for x in xs]


@case(*LISTS)
def a_list_that_waits_for_a_loop(xs):
    n = 0
    return [n, [n := n + x for x in xs], n], {"k": [n := n + 1 for _ in xs], "n": n}


@case(([1, 2, 3],))
def loops_over_what_changes(xs):
    found = []
    for x in xs:
        if x < 3:
            xs.append(x + 2)
        found.append(x)
    for x in (it := iter(xs)):
        found.append((x, next(it, None)))
    return found


exec(  # pytest would rewrite it
    """def assertions(a):
    assert a, f"not {a}"
    assert a > 0
    return a
"""
)
case((1,), (0,), (-1,))(assertions)


@case((1,), (None,))
def raises(a):
    if a is None:
        raise ValueError("none") from KeyError("k")
    raise TypeError(a)


class Manager:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        say(f"enter {self.name}")
        return [self.name]

    def __exit__(self, *args):
        say((f"exit {self.name}", args))


@case((1,), (0,))
def with_blocks(a):
    with Manager("m") as m, Manager(say("n")):
        m.append(a)
        if a:
            return m, say("inside")
        say("end")
    with Manager("x"):
        pass
    return m


@case(*LISTS)
def with_in_a_loop(xs):
    for x in xs:
        with Manager(x) as m:
            if x == 2:
                continue
            if x == 5:
                break
            say(m)
    return xs


@case((1,), (0,), (3,))
def finally_blocks(a):
    found = []
    try:
        found.append(a)
        if a == 1:
            return found
    finally:
        found.append("finally")
    for i in range(a):
        try:
            if i == 1:
                break
        finally:
            found.append(i)
    return found


@case((1,))
def try_blocks_that_do_not_raise(a):
    try:
        b = a + 1
    except ValueError:
        b = 0
    else:
        b *= 2
    return b


@case((types.SimpleNamespace(x=1),))
def statements_on_attributes(o):
    o.y = o.x
    o.x += 1
    o.z = o.w = []
    o.z.append(o.x)
    del o.y
    return o, vars(o)


@case((3,))
def variables_that_are_rebound(a):
    b = a
    a = a + 1
    c = (a, b)
    a, b = b, a
    d = [a, (a := 9), a]
    return a, b, c, d


@case((5, 3, [1]))
def variables_that_change_places_with_results(n, d, x):
    n, d = d, n - 2 * d
    n, d, x = d, len(x), [n, *x]
    first = (n, (n := n + d), n, [d, (d := len(x)), d])
    second = x, n, [n := n + 1 for _ in x], n
    third = (d, (d := (d := d * 2) + 1), d)
    return n, d, x, first, second, third


@case(([1],))
def pending_values_and_changes_in_place(x):
    def add(y):
        nonlocal x
        x += y
        return x

    def own(a):
        b = a
        return b, [b := [*b, 1], b], (b, (b := b * 2), b)

    return x, add([2]), x, own(x), (x, add([3]), x)


@case((1,), (2,))
def a_variable_without_a_value(a):
    if a == 1:
        b = 1
    return b


@case((2,))
def statements_of_all_kinds(a):
    pass
    a
    a + 1
    say(a)
    x: int = a
    y: "str"
    ...
    return x


@case.each()
def test_a_statement_does_what_its_text_says(fn, calls) -> None:
    assert_same(fn, calls)


@case.each()
def test_the_text_of_the_text_does_the_same(fn, calls) -> None:
    again = from_text(fn)
    if fn is a_variable_without_a_value or MARK in pseudo_source(fn.__code__):
        return
    assert_same(again, calls)


def test_handlers_are_said_to_be_left_out() -> None:
    def caught(a):
        try:
            return a[0]
        except IndexError:
            return None

    def nested(a):
        def inner():
            with a:
                pass

        return inner

    for fn in (caught, nested, with_blocks, finally_blocks):
        assert MARK in pseudo_source(fn.__code__)
    for fn in (loops, loops_with_comprehensions, branches):
        assert MARK not in pseudo_source(fn.__code__)


def test_a_text_that_is_cut_says_so() -> None:
    body = "\n".join(f"    if a[{i}]:\n        b += {i}" for i in range(14))
    namespace: dict = {}
    exec(f"def fn(a):\n    b = 0\n{body}\n    return b", namespace)
    text = pseudo_source(namespace["fn"].__code__)
    assert text.endswith("# ... (more than 2000 lines: cut)")
    assert len(text.splitlines()) < 2010


def test_an_instruction_that_has_no_syntax_is_marked() -> None:
    namespace: dict = {}
    exec(
        "def fn(a):\n    match a:\n        case {'k': v, **rest}:\n            return v\n    return 0",
        namespace,
    )
    assert "# MATCH_MAPPING" in pseudo_source(namespace["fn"].__code__)


def test_two_ways_out_of_a_loop_are_told_apart() -> None:
    assert from_text(three_loops)([1, 2, 5, 7]) == three_loops([1, 2, 5, 7])
