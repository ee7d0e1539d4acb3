"""Modules of the standard library, run from the pseudo-source of their functions."""

from __future__ import annotations

import importlib.util
import re
import types
from collections.abc import Iterator
from textwrap import indent

import pytest

from support.pseudo import from_text
from torchloom.inspect.pseudo import pseudo_source

LEFT_OUT = re.compile(r"^\s*# |<[a-zA-Z? ]+>|<key|\.\.\.  #|'\.\.\.", re.M)
"""What says that a text is not all of a function."""
WORDS = "The quick brown fox, jumping-over the  lazy dog; and again: the quick brown fox."


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Yield the functions and methods that a module defines."""
    for value in list(vars(module).values()):
        is_own = isinstance(value, type) and value.__module__ == module.__name__
        for each in list(vars(value).values()) if is_own else [value]:
            fn = getattr(each, "__func__", getattr(each, "fget", each))
            if isinstance(fn, types.FunctionType) and fn.__module__ == module.__name__:
                yield fn


def twin_of(name: str) -> types.ModuleType:
    """Return a second copy of a module, whose functions are what their pseudo-source says."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    count = 0
    for fn in functions_of(module):
        text = pseudo_source(fn.__code__, "f")
        if not LEFT_OUT.search(text) and "__class__" not in fn.__code__.co_freevars:
            code = from_text(fn, text).__code__
            if code.co_freevars == fn.__code__.co_freevars:
                fn.__code__ = code
                count += 1
    assert count > 3
    return module


def wrapped(m):
    return m.wrap(WORDS, 20), m.shorten(WORDS, 30), m.dedent("  a\n   b\n"), m.indent("a\nb", "> ")


def compared(m):
    a, b = WORDS.split(), WORDS.replace("fox", "cat").split()[::-1]
    close = m.get_close_matches("appel", ["ape", "apple", "peach"])
    return (
        list(m.unified_diff(a, b)),
        list(m.ndiff(a, b)),
        close,
        m.SequenceMatcher(None, a, b).ratio(),
    )


def divided(m):
    f = m.Fraction(355, 113)
    return (
        str(f + 1),
        str(f**-3),
        f"{f.limit_denominator(50)}",
        f < 3,
        hash(f),
        round(f, 3),
        divmod(f, 2),
    )


def averaged(m):
    data = [1.5, 2.5, 2.5, 4.0, 7.25]
    plain = [m.mean(data), m.median(data), m.mode(data), m.pvariance(data), m.quantiles(data, n=4)]
    return plain, m.multimode(data), m.NormalDist(1, 2).overlap(m.NormalDist(2, 3)), m.fmean(data)


def coloured(m):
    rgb = (0.2, 0.4, 0.7)
    return m.rgb_to_hsv(*rgb), m.rgb_to_hls(*rgb), m.hsv_to_rgb(0.6, 0.5, 0.9), m.rgb_to_yiq(*rgb)


def addressed(m):
    net = m.ip_network("10.1.0.0/22")
    parts = [str(each) for each in net.subnets(new_prefix=24)], net.num_addresses, repr(net[5])
    found = list(m.summarize_address_range(m.ip_address("1.2.3.0"), m.ip_address("1.2.3.130")))
    return parts, found, m.ip_address("::ffff:1:2").exploded, str(m.IPv6Address(2**70 + 5))


def split(m):
    return (
        m.split("a 'b c' d\\ e \"f\"", comments=True),
        m.join(["a b", "c"]),
        list(m.shlex("x = 'y z' # w")),
    )


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("textwrap", wrapped),
        ("difflib", compared),
        ("fractions", divided),
        ("statistics", averaged),
        ("colorsys", coloured),
        ("ipaddress", addressed),
        ("shlex", split),
    ],
)
def test_a_module_runs_from_its_text(name: str, use) -> None:
    assert repr(use(twin_of(name))) == repr(use(importlib.import_module(name)))


@pytest.mark.parametrize(
    "name",
    [
        "argparse",
        "ast",
        "configparser",
        "datetime",
        "email.message",
        "inspect",
        "typing",
        "zipfile",
    ],
)
def test_a_text_without_marks_is_python(name: str) -> None:
    for fn in functions_of(importlib.import_module(name)):
        text = pseudo_source(fn.__code__, "f")
        assert not text.startswith("# not readable"), text
        if not LEFT_OUT.search(re.sub("# exception handlers", "", text)):
            free = "".join(f"    {each} = None\n" for each in fn.__code__.co_freevars)
            whole = f"def outer():\n{free}{indent(text, '    ')}\n"
            compile(whole, "x", "exec", dont_inherit=True)
