"""Displays, comprehensions and unpacking, run from their pseudo-source."""
# ruff: noqa: B023, B905, C400, C404, C416, F821, PIE800

from __future__ import annotations

from support.pseudo import Cases, Noted, assert_same, from_text, say

case = Cases()
A, B = Noted("a"), Noted("bb")
LISTS = (([1, 2, 3],), ([],), ([0, -1],))


@case(*LISTS)
def lists(xs):
    return [], [1], [1, 2, 3, 4], [*xs], [*xs, 5], [0, *xs, *xs], [[xs], [[]]], [*(1, 2), *[3]]


@case(*LISTS)
def sets(xs):
    return set(), {1}, {1, 2, 3, 4}, {*xs}, {*xs, 5}, {*(), 7}, {*xs, *xs}, {*""}, {frozenset({1})}


@case(*LISTS)
def dicts(xs):
    d = {"a": xs, **{"b": 1}}
    return (
        {},
        d,
        {**d},
        {**d, "a": 2},
        {"a": 2, **d},
        {1: 2, 3: {4: xs}},
        {(1, 2): 3, None: 4, ...: 5},
    )


@case(*LISTS)
def tuples(xs):
    return (), (1,), (xs,), (*xs,), (1, *xs), (*xs, *xs), ((xs,), [(), ((),)])


@case((1,))
def one_dict_under_two_names(a):
    x = y = {"k": a}
    x["z"] = 1
    return x, y, x is y


@case((1,))
def one_set_under_two_names(a):
    x = y = {a, 2}
    x.add(3)
    z = w = {*()}
    z.add(a)
    return x, y, z, w, x is y


@case((1,))
def one_tuple_under_two_names(a):
    x = y = ({"k": a}, [a])
    x[0]["z"] = 1
    v = w = (a, [])
    return x, y, x is y, x[0] is y[0], v is w, [v, w][0] is w


@case((1,))
def one_list_in_two_places(a):
    x = [y := [a], y, [y]]
    y.append(2)
    (p := {})["k"] = q = [p]
    return x, y, p, q, [r := {}, r, {"r": r}]


@case((1,))
def a_display_that_is_changed_at_once(a):
    ([a, 2])[0] = x = {"a": 1}
    {"k": x}["k"]["b"] = a
    return x, [1, 2, 3][a], [a, 2, 3][1:], {"a": a}["a"], [[], [a]][1].append(a)


@case((2,))
def displays_with_effects_as_statements(a):
    [say(1), say(a)]
    {say(2): say(3)}
    (say(4), {say(5)})
    [say(x) for x in (6, 7)]
    f"{say(8)}"


@case(*LISTS)
def comprehensions(xs):
    return (
        [x + 1 for x in xs],
        {x % 2 for x in xs},
        {x: -x for x in xs},
        list(x for x in xs if x),
        [0 for _ in xs],
    )


@case(*LISTS)
def conditions_in_comprehensions(xs):
    return (
        [x for x in xs if x if x > 1],
        [x if x else None for x in xs],
        [x for x in xs if not x or x > 2],
        {k: v for k, v in enumerate(xs) if 0 < k + v < 4},
        [(x, y) for x in xs if x for y in xs if y != x],
    )


@case(*LISTS)
def comprehensions_in_comprehensions(xs):
    return (
        [[x * y for y in xs] for x in xs],
        {x: [y for y in range(x)] for x in xs},
        [{(a, b) for b in xs} for a in xs],
    )


@case(*LISTS)
def two_comprehensions_at_once(xs):
    return [x for x in xs] + [y for y in xs][::-1], ([x for x in xs], xs, {x for x in xs})


@case(*LISTS)
def a_comprehension_leaves_its_variable_alone(xs):
    x = "outside"
    return [x for x in xs], x, {x: x for x in xs}, x, [[x for x in (x, x)] for x in xs], x


@case(*LISTS)
def a_comprehension_that_binds(xs):
    last = None
    found = (last, [last := x for x in xs], last)
    return found, [total := 0] + [total := total + x for x in xs], total


@case(*LISTS)
def comprehensions_that_capture(xs):
    a = 5
    fs = [lambda: x + a for x in xs]
    a = 6
    return (
        [f() for f in fs],
        [(lambda y: y * x)(2) for x in xs],
        [f(1) for f in [lambda v, x=x: v + x for x in xs]],
    )


@case((A,))
def comprehensions_in_order(a):
    return (
        {say(x): say(y) for x, y in zip(say(a), say(a))},
        [say(x) for x in say(a) if say(x)],
        {say(x) for x in a},
    )


@case((2,), (0,))
def comprehensions_over_displays(n):
    return (
        [x for x in [n, 1]],
        [x for x in (n,)],
        [y for x in [[n]] for y in x],
        [i for i in {n: 1}],
        [c for c in "ab"],
    )


@case(*LISTS)
def star_in_comprehension(xs):
    return (
        [[*xs, x] for x in xs],
        [{"a": x, **{}} for x in xs],
        [(x, *xs) for x in xs],
        dict([(x, 1) for x in xs]),
    )


@case(*LISTS)
def generators_as_arguments(xs):
    return (
        sum(x * 2 for x in xs),
        max((x for x in xs), default=None),
        tuple((a, b) for a in xs for b in xs if a < b),
        any(x for x in xs),
    )


@case(([1, 2, 3],), ([1],), ("ab",), ([],))
def unpacking(xs):
    a, *b = xs
    *c, d = xs
    [*e] = xs
    (*f,) = xs
    first, *middle = (*xs, 9)
    return a, b, c, d, e, f, first, middle


@case((1, [2, 3]), (0, (4, 5)))
def nested_unpacking(a, b):
    x, (y, z) = a, b
    (p,), q = [x], y
    [r, *[s, t]] = [a, *b]
    x, y, z = z, x, y
    return x, y, z, p, q, r, s, t


@case(([1, 2, 3],))
def swaps(x):
    x[0], x[1] = x[1], x[0]
    a, b, c, d = x[0], x[1], x[2], x
    a, b, c, d = d, a, b, c
    return a, b, c, d


@case((A, B))
def swaps_in_order(a, b):
    a[say(0)], b.x = say(b).y, say(a)[1]
    return a


@case(([3, 4],))
def changes_in_place(x):
    y = x
    x += [1]
    z = x
    x *= 2
    x[0] += 10
    x[1:3] = [7]
    x[-1] -= x[0]
    return x, y is x, z is x


@case((5,))
def changes_of_numbers(a):
    b = a
    a += 1
    a -= 2
    a *= 3
    a **= 2
    a //= 4
    a %= 30
    a <<= 2
    a >>= 1
    a |= 1
    a &= 0xFF
    a ^= 3
    c = a
    a /= 2
    return a, b, c


@case((A, B))
def changes_of_attributes(a, b):
    a.x += b
    a.x.y *= 2
    a[b] += a[b]
    a[say(1)].z -= say(2)
    a @= b
    return a


@case(([1, 2, 3, 4],))
def deletions(x):
    d = {"a": 1, "b": 2}
    y = x
    del x[0], d["a"]
    del y[:1]
    z = 1
    del z
    del x
    return y, d


@case.each()
def test_a_container_is_what_its_text_says(fn, calls) -> None:
    assert_same(fn, calls)


@case.each()
def test_the_text_of_the_text_does_the_same(fn, calls) -> None:
    assert_same(from_text(fn), calls)
