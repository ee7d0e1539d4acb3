"""A stored program runs only where a new trace would give the same: edits of all kinds are misses or right."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch

from serve.models import rows
from torchloom.errors import ArtifactError, ProofError
from torchloom.serve import Program, build, load

HEAD = """
import collections, enum, functools, torch
from torch import nn
import torch.nn.functional as F
"""
FORWARD = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        %s
    def forward(self, x):
        return %s
def model():
    return Model()
"""


def of(init: str, value: str) -> str:
    return HEAD + FORWARD % (init, value)


def pair(init: str, value: str, *edit: str) -> tuple[str, str]:
    text = of(init, value)
    old, new = edit
    assert old in text
    return text, text.replace(old, new)


def top(code: str, value: str, *edit: str) -> tuple[str, str]:
    text = HEAD + code + FORWARD % ("pass", value)
    old, new = edit
    assert old in text
    return text, text.replace(old, new)


BASE = """
class Base(nn.Module):
    def scale(self, x):
        return x * 2
    def forward(self, x):
        return self.scale(x)
class Model(Base):
    pass
def model():
    return Model()
"""
CASES: dict[str, tuple[str, str]] = {
    "constant": pair("self.k = 2", "x * self.k", "= 2", "= 3"),
    "type of a constant": pair("self.k = 2", "x + (1 if self.k is True else 0)", "= 2", "= True"),
    "sign of zero": pair(
        "self.k = 0.0", "torch.copysign(x, torch.full((), self.k))", "0.0", "-0.0"
    ),
    "absent attribute": pair("pass", "x * getattr(self, 'k', 2)", "pass", "self.k = 3"),
    "absent by hasattr": pair("pass", "x * (3 if hasattr(self, 'k') else 2)", "pass", "self.k = 3"),
    "absent on an object": (
        HEAD + "class C: pass\n" + FORWARD % ("self.c = C()", "x * getattr(self.c, 'k', 2)"),
        HEAD + "class C: k = 5\n" + FORWARD % ("self.c = C()", "x * getattr(self.c, 'k', 2)"),
    ),
    "class constant overridden by an instance": (
        HEAD
        + FORWARD.replace("    def __init__", "    K = 2\n    def __init__")
        % ("pass", "x * self.K"),
        HEAD
        + FORWARD.replace("    def __init__", "    K = 2\n    def __init__")
        % ("self.K = 3", "x * self.K"),
    ),
    "key of a dict": pair(
        "self.d = {'a': 1}", "x * (3 if 'b' in self.d else 2)", "'a': 1", "'a': 1, 'b': 1"
    ),
    "member of a set": pair("self.s = {1, 2}", "x * (3 if 7 in self.s else 2)", "{1, 2}", "{1, 7}"),
    "member of a frozenset": pair(
        "self.s = frozenset((1, 2))", "x * (3 if 7 in self.s else 2)", "(1, 2)", "(1, 7)"
    ),
    "long list": pair(
        "self.l = list(range(100))",
        "x * self.l[80]",
        "list(range(100))",
        "list(range(80)) + [5] * 20",
    ),
    "sum of a long list": pair(
        "self.l = [1] * 100", "x * sum(self.l)", "[1] * 100", "[1] * 99 + [2]"
    ),
    "long dict": pair("self.d = {i: 1 for i in range(100)}", "x * self.d[90]", "i: 1", "i: i"),
    "long set": pair(
        "self.s = set(range(100))",
        "x * (3 if 200 in self.s else 2)",
        "range(100)",
        "[*range(99), 200]",
    ),
    "nested tuple": pair("self.t = ((1, (2, 3)), 4)", "x * self.t[0][1][1]", "(2, 3)", "(2, 5)"),
    "nested tuple as a whole": pair(
        "self.t = ((1, (2, 3)), 4)",
        "x * (2 if self.t == ((1, (2, 3)), 4) else 5)",
        "= ((1, (2, 3)), 4)\n",
        "= ((1, (2, 9)), 4)\n",
    ),
    "deque": pair("self.q = collections.deque([1, 2])", "x * self.q[1]", "[1, 2]", "[1, 3]"),
    "named tuple": (
        HEAD
        + "P = collections.namedtuple('P', 'a b')\n"
        + FORWARD % ("self.p = P(1, 2)", "x * self.p.b"),
        HEAD
        + "P = collections.namedtuple('P', 'b a')\n"
        + FORWARD % ("self.p = P(1, 2)", "x * self.p.b"),
    ),
    "enum value": top("class E(enum.Enum):\n    A = 2\n", "x * E.A.value", "A = 2", "A = 3"),
    "int enum": top("class E(enum.IntEnum):\n    A = 2\n", "x * E.A", "A = 2", "A = 3"),
    "int subclass": top("class I(int): pass\nK = I(2)\n", "x * int(K)", "I(2)", "I(3)"),
    "finfo": pair("self.i = torch.finfo(torch.float32)", "x * self.i.eps", "float32", "float64"),
    "memory format": pair(
        "self.m = torch.contiguous_format",
        "x[None, None].contiguous(memory_format=self.m).as_strided((2,), (1,))",
        "contiguous_format\n",
        "channels_last\n",
    ),
    "dtype": pair(
        "self.t = torch.float32",
        "(x * 1.001).to(self.t).float()",
        "= torch.float32",
        "= torch.bfloat16",
    ),
    "slice": pair("self.s = slice(0, 4)", "x[:, self.s]", "slice(0, 4)", "slice(4, 8)"),
    "range": pair("self.r = range(3)", "x * sum(self.r)", "range(3)", "range(4)"),
    "string": pair("self.a = 'relu'", "getattr(F, self.a)(x)", "'relu'", "'silu'"),
    "global": top("K = 2\n", "x * K", "K = 2", "K = 3"),
    "function": top("def f(x): return x * 2\n", "f(x)", "x * 2", "x * 3"),
    "function defined below": top(
        "def f(x): return x * 2\n",
        "f(x)",
        "return x * 2\n",
        "return x * 2\ndef f(x): return x * 3\n",
    ),
    "function by a flag": top(
        "FLAG = True\nif FLAG:\n    def f(x): return x * 2\nelse:\n    def f(x): return x * 3\n",
        "f(x)",
        "FLAG = True",
        "FLAG = False",
    ),
    "default of a function": top("def f(x, k=2): return x * k\n", "f(x)", "k=2", "k=3"),
    "keyword default": top("def f(x, *, k=2): return x * k\n", "f(x)", "k=2", "k=3"),
    "nested function": top(
        "def f(x):\n    def g(y): return y * 2\n    return g(x)\n", "f(x)", "y * 2", "y * 3"
    ),
    "comprehension": top(
        "def f(x): return sum([x * i for i in (1, 2)])\n", "f(x)", "(1, 2)", "(1, 3)"
    ),
    "lambda": pair("self.f = lambda x: x * 2", "self.f(x)", "x * 2", "x * 3"),
    "two lambdas of a line": pair(
        "self.fs = [lambda x: x * 2, lambda x: x * 3]; self.f = self.fs[0]",
        "self.f(x)",
        "self.f = self.fs[0]",
        "self.f = self.fs[1]",
    ),
    "closure of a factory": top(
        "def make(k):\n    def f(x): return x * k\n    return f\nf = make(2)\n",
        "f(x)",
        "make(2)",
        "make(3)",
    ),
    "one of two inner functions": top(
        "def make(a):\n    def f(x): return x * 2\n    def g(x): return x * 3\n    return f if a else g\nf = make(True)\n",
        "f(x)",
        "make(True)",
        "make(False)",
    ),
    "function in a cell": top(
        "def a(x): return x * 2\ndef b(x): return x * 3\ndef make(k):\n    def f(x): return k(x)\n    return f\nf = make(a)\n",
        "f(x)",
        "make(a)",
        "make(b)",
    ),
    "partial": top(
        "def f(k, x): return x * k\nf = functools.partial(f, 2)\n", "f(x)", "(f, 2)", "(f, 3)"
    ),
    "partial of a lambda": top(
        "f = functools.partial(lambda k, x: x * k, 2)\n", "f(x)", "x * k", "x + k"
    ),
    "keyword of a partial": top(
        "def f(x, k): return x * k\nf = functools.partial(f, k=2)\n", "f(x)", "k=2", "k=3"
    ),
    "decorator": top(
        "def deco(f):\n    @functools.wraps(f)\n    def g(x): return f(x) * 2\n    return g\n@deco\ndef f(x): return x + 1\n",
        "f(x)",
        "f(x) * 2",
        "f(x) * 3",
    ),
    "what a decorator wraps": top(
        "def deco(f):\n    @functools.wraps(f)\n    def g(x): return f(x) * 2\n    return g\n@deco\ndef f(x): return x + 1\n",
        "f(x)",
        "x + 1",
        "x + 2",
    ),
    "replaced after its definition": top(
        "def f(x): return x * 2\ndef g(x): return x * 3\n",
        "f(x)",
        "return x * 3\n",
        "return x * 3\nf = g\n",
    ),
    "code is replaced": top(
        "def f(x): return x * 2\ndef g(x): return x * 3\n",
        "f(x)",
        "return x * 3\n",
        "return x * 3\nf.__code__ = g.__code__\n",
    ),
    "base class": (HEAD + BASE, HEAD + BASE.replace("x * 2", "x * 3")),
    "override": (
        HEAD + BASE,
        HEAD + BASE.replace("    pass\n", "    def scale(self, x):\n        return x * 3\n"),
    ),
    "another base": (
        HEAD + BASE,
        HEAD
        + BASE.replace(
            "class Model(Base)",
            "class Other(nn.Module):\n    def scale(self, x):\n        return x * 3\nclass Model(Other, Base)",
        ),
    ),
    "method patched on the class": (
        HEAD + BASE,
        HEAD + BASE + "Base.scale = lambda self, x: x * 3\n",
    ),
    "method patched on the instance": (
        HEAD + BASE,
        HEAD + BASE.replace("return Model()", "m = Model(); m.scale = lambda x: x * 3; return m"),
    ),
    "class made by type": (
        HEAD
        + "def forward(self, x): return x * 2\nModel = type('Model', (nn.Module,), {'forward': forward})\ndef model(): return Model()\n",
        HEAD
        + "def forward(self, x): return x * 3\nModel = type('Model', (nn.Module,), {'forward': forward})\ndef model(): return Model()\n",
    ),
    "class made by exec": (
        HEAD
        + "exec('class Model(nn.Module):\\n  def forward(self, x): return x * 2')\ndef model(): return Model()\n",
        HEAD
        + "exec('class Model(nn.Module):\\n  def forward(self, x): return x * 3')\ndef model(): return Model()\n",
    ),
    "static method": top(
        "class C:\n    @staticmethod\n    def f(x): return x * 2\n", "C.f(x)", "x * 2", "x * 3"
    ),
    "class method": top(
        "class C:\n    K = 2\n    @classmethod\n    def f(cls, x): return x * cls.K\n",
        "C.f(x)",
        "K = 2",
        "K = 3",
    ),
    "class method that hands its class on": top(
        "def get(c): return c.K\nclass C:\n    K = 2\n    @classmethod\n"
        "    def f(cls, x): return x * sum([get(cls) for _ in range(1)])\n",
        "C.f(x)",
        "K = 2",
        "K = 3",
    ),
    "class method patched": top(
        "class C:\n    @classmethod\n    def f(cls, x): return x * 2\n",
        "C.f(x)",
        "return x * 2\n",
        "return x * 2\nC.f = classmethod(lambda cls, x: x * 3)\n",
    ),
    "property": top(
        "class C:\n    @property\n    def k(self): return 2\nc = C()\n",
        "x * c.k",
        "return 2",
        "return 3",
    ),
    "operator of an object": top(
        "class C:\n    def __init__(self): self.a = 1\n    def __call__(self, x): return x * 2\nc = C()\n",
        "c(x)",
        "x * 2",
        "x * 3",
    ),
    "getattr of an object": top(
        "class C:\n    def __getattr__(self, name): return 2\nc = C()\n",
        "x * c.k",
        "return 2",
        "return 3",
    ),
    "getattr is added": top(
        "class C:\n    k = 2\nc = C()\n",
        "x * c.k",
        "    k = 2\n",
        "    k = 2\n    def __getattribute__(self, name): return 3\n",
    ),
    "truth of an object": top(
        "class C:\n    def __init__(self): self.a = 1\nc = C()\n",
        "x * (2 if c else 3)",
        "self.a = 1\n",
        "self.a = 1\n    def __bool__(self): return False\n",
    ),
    "object of another class": top(
        "class A:\n    def f(self, x): return x * 2\nclass B:\n    def f(self, x): return x * 3\nc = A()\n",
        "c.f(x)",
        "c = A()",
        "c = B()",
    ),
    "identity of two attributes": pair(
        "self.a = nn.Parameter(torch.ones(16)); self.b = self.a",
        "x * (2 if self.a is self.b else 3)",
        "self.b = self.a",
        "self.b = nn.Parameter(torch.ones(16))",
    ),
    "identity of two objects": (
        HEAD
        + "class C: pass\n"
        + FORWARD % ("self.a = C(); self.b = self.a", "x * (2 if self.a is self.b else 3)"),
        HEAD
        + "class C: pass\n"
        + FORWARD % ("self.a = C(); self.b = C()", "x * (2 if self.a is self.b else 3)"),
    ),
    "isinstance": top(
        "class A: pass\nclass B(A): pass\nc = A()\n",
        "x * (3 if isinstance(c, B) else 2)",
        "c = A()",
        "c = B()",
    ),
    "one of two classes of one name": top(
        "def make(k):\n    class C:\n        def f(self, x): return x * k\n    return C\nc = make(2)()\n",
        "c.f(x)",
        "make(2)",
        "make(3)",
    ),
    "global tensor of another type": top(
        "W = torch.full((16,), 2.0)\n", "x * W", "2.0)", "3.0, dtype=torch.float64)"
    ),
    "values of a global tensor": top("W = torch.full((16,), 2.0)\n", "x * W", "2.0)", "3.0)"),
    "values of a tensor in a list": pair(
        "self.w = [torch.full((16,), 2.0)]", "x * self.w[0]", "2.0)", "3.0)"
    ),
    "global list of numbers": top("K = [1, 2]\n", "x * K[1]", "[1, 2]", "[1, 3]"),
    "imported name": top("from math import pi as k\n", "x * k", "pi as k", "e as k"),
    "constant of a metaclass": top(
        "class Meta(type):\n    K = 2\nclass C(metaclass=Meta): pass\nc = C()\n",
        "x * type(c).K",
        "K = 2",
        "K = 3",
    ),
    "method of a metaclass": top(
        "class Meta(type):\n    def f(cls, x): return x * 2\nclass C(metaclass=Meta): pass\nc = C()\n",
        "type(c).f(x)",
        "x * 2",
        "x * 3",
    ),
    "dataclass": top(
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n    a: int = 2\nc = C()\n",
        "x * c.a",
        "= 2",
        "= 3",
    ),
    "ordered dict": pair(
        "self.d = collections.OrderedDict(a=2, b=3)",
        "x * next(iter(self.d.values()))",
        "a=2, b=3",
        "b=3, a=2",
    ),
    "default dict": pair(
        "self.d = collections.defaultdict(lambda: 2)", "x * self.d['q']", "lambda: 2", "lambda: 3"
    ),
    "module list": pair(
        "self.l = nn.ModuleList([nn.ReLU(), nn.Tanh()])",
        "self.l[1](self.l[0](x))",
        "nn.ReLU(), nn.Tanh()",
        "nn.Tanh(), nn.ReLU()",
    ),
    "activation by class": pair("self.a = nn.ReLU()", "self.a(x)", "nn.ReLU()", "nn.Tanh()"),
    "option of a layer": pair("self.a = nn.LeakyReLU(0.1)", "self.a(x)", "0.1", "0.2"),
    "hook": pair(
        "self.a = nn.ReLU()",
        "self.a(x)",
        "self.a = nn.ReLU()",
        "self.a = nn.ReLU(); self.a.register_forward_hook(lambda m, a, y: y * 3)",
    ),
    "another hook": pair(
        "self.a = nn.ReLU(); self.a.register_forward_hook(lambda m, a, y: y * 2)",
        "self.a(x)",
        "y * 2",
        "y * 3",
    ),
    "environment": top("import os\n", "x * float(os.environ.get('LOOM_K', '2'))", "'2'", "'3'"),
    "constant result": top(
        "@torch.compiler.assume_constant_result\ndef k(): return 2\n",
        "x * k()",
        "return 2",
        "return 3",
    ),
    "method of a builtin class": pair(
        "self.f = torch.Tensor.relu", "self.f(x)", "Tensor.relu", "Tensor.tanh"
    ),
    "method of a builtin class in a list": pair(
        "self.f = [torch.Tensor.relu]", "self.f[0](x)", "Tensor.relu", "Tensor.tanh"
    ),
    "method of a builtin class in a dict": pair(
        "self.f = {'a': torch.Tensor.relu}", "self.f['a'](x)", "Tensor.relu", "Tensor.tanh"
    ),
    "method of a builtin class in a partial": top(
        "f = functools.partial(torch.Tensor.add, other=1)\n", "f(x)", "Tensor.add", "Tensor.sub"
    ),
    "method of a builtin class as a global": top(
        "f = torch.Tensor.relu\n", "f(x)", "Tensor.relu", "Tensor.tanh"
    ),
    "builtin that a global hides": top("K = 2\n", "x * max(2, 3)", "K = 2", "max = min"),
    "builtin that a global hides from another function": top(
        "def f(): return len('ab')\n", "x * f()", "def f", "len = lambda v: 7\ndef f"
    ),
    "builtin that a scope of exec hides": top(
        "exec('def f(x): return x * max(2, 3)', scope := {})\nf = scope['f']\n",
        "f(x)",
        "scope := {}",
        "scope := {'max': min}",
    ),
    "subclass of tensors": top(
        "class S(torch.Tensor): pass\nT = torch.ones(16)\n",
        "x * (2 if type(T) is torch.Tensor else 3)",
        "T = torch.ones(16)\n",
        "T = torch.ones(16).as_subclass(S)\n",
    ),
    "parameter in place of a buffer": pair(
        "self.register_buffer('w', torch.ones(16))",
        "x * (2 if isinstance(self.w, nn.Parameter) else 3)",
        "self.register_buffer('w', torch.ones(16))",
        "self.w = nn.Parameter(torch.ones(16), requires_grad=False)",
    ),
    "order of hooks": pair(
        "self.a = nn.ReLU(); self.a.register_forward_hook(lambda m, a, y: y * 2); "
        "self.a.register_forward_hook(lambda m, a, y: y + 1)",
        "self.a(x)",
        "lambda m, a, y: y + 1",
        "lambda m, a, y: y + 1, prepend=True",
    ),
    "regular expression": pair(
        "import re; self.r = re.compile('a')",
        "x * (2 if self.r.match('a') else 3)",
        "'a')\n",
        "'b')\n",
    ),
    "union of types": pair(
        "self.u = int | str", "x * (2 if isinstance(3, self.u) else 3)", "int |", "float |"
    ),
    "decimal number": pair(
        "import decimal; self.d = decimal.Decimal('2')",
        "x * (2 if self.d == 2 else 3)",
        "'2'",
        "'3'",
    ),
    "most items of a deque": pair(
        "self.q = collections.deque([1, 2])", "x * (self.q.maxlen or 2)", "2])", "2], 5)"
    ),
    "absent attribute by its error": top(
        "def f(o):\n    try:\n        return o.k\n    except AttributeError:\n        return 2\n",
        "x * f(self)",
        "pass",
        "self.k = 3",
    ),
    "absent key by its error": top(
        "D = {}\ndef f(d):\n    try:\n        return d['k']\n    except KeyError:\n        return 2\n",
        "x * f(D)",
        "D = {}",
        "D = {'k': 3}",
    ),
    "absent attribute of a function": top(
        "def f(): pass\n", "x * (2 if hasattr(f, 'k') else 3)", "(): pass\n", "(): pass\nf.k = 1\n"
    ),
    "absent key of vars": pair(
        "self.k = 2", "x * (self.k if 'z' in self.__dict__ else 3)", "= 2", "= 2; self.z = 1"
    ),
}
NOT_STORED = {"constant result"}
"""A new trace might see another one, and nothing says so."""
COUNT = itertools.count()


def made(source: str, name: str, folder):
    """Return the model that a source makes, as a module of its own under one name for all."""
    path = folder / f"{name}.py"
    path.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    torch.manual_seed(0)
    return module.model().eval()


def check(before: str, after: str, folder, *, is_stored: bool = True) -> Program | None:
    """Build a model, edit it and load: return the program that is found, which has to be right."""
    module, x = f"edited_{next(COUNT)}", torch.randn(3, 16)
    before, after = before.replace("NAME", module), after.replace("NAME", module)
    try:
        return _check(before, after, module, x, folder, is_stored)
    finally:  # they answer to any name, and others go through all modules
        for name in [each for each in sys.modules if each.startswith(module)]:
            del sys.modules[name]


def _check(before, after, module, x, folder, is_stored):
    first = made(before, module, folder)
    with torch.no_grad():
        try:
            program = build(first, rows(), backend="eager", store=folder / "store")
        except ProofError:  # decimal numbers up to torch 2.12
            assert torch.__version__ < "2.13"
            return None
        torch.testing.assert_close(program(x), first(x), rtol=0, atol=0)
        stored = not program.variants[0].why_not_stored
        assert stored is is_stored
        if stored:  # the same program in another process is a hit
            again = made(before, module, folder)
            torch.testing.assert_close(load(folder / "store", again)(x), first(x), rtol=0, atol=0)
        edited = made(after, module, folder)
        try:
            loaded = load(folder / "store", edited)
        except ArtifactError:
            return None
        torch.testing.assert_close(loaded(x), edited(x), rtol=0, atol=0)
        return loaded


@pytest.mark.parametrize("name", CASES)
def test_an_edit_is_a_miss_or_gives_what_the_edited_model_gives(name, tmp_path):
    check(*CASES[name], tmp_path, is_stored=name not in NOT_STORED)


REBOUND = torch.full((16,), 2.0)


def with_a_global(x):
    return x * REBOUND


def test_a_global_tensor_that_is_bound_anew_is_the_new_one(tmp_path, monkeypatch):
    program, x = build(with_a_global, rows(), backend="eager", store=tmp_path), torch.randn(3, 16)
    loaded = load(tmp_path, with_a_global, rows())
    with torch.no_grad():
        for value in (3.0, 4.0):
            monkeypatch.setattr(sys.modules[__name__], "REBOUND", torch.full((16,), value))
            torch.testing.assert_close(program(x), x * value)
            torch.testing.assert_close(loaded(x), x * value)


NOTEBOOK = """
class Model(nn.Module):
    def forward(self, x):
        return helped(x) * K
def helped(x):
    return x + 1
K = 2
"""


@pytest.mark.parametrize("name", ["__main__", "nowhere", None])
def test_code_without_a_file(name, tmp_path):
    """As in notebooks: each cell is executed, and nothing says where its code is from."""

    def cell(text):
        scope = {} if name is None else {"__name__": name}
        exec(HEAD + text, scope)
        return scope["Model"]().eval()

    x = torch.randn(3, 16)
    with torch.no_grad():
        program = build(cell(NOTEBOOK), rows(), backend="eager", store=tmp_path)
        torch.testing.assert_close(program(x), (x + 1) * 2)
        if not program.variants[0].why_not_stored:
            torch.testing.assert_close(load(tmp_path, cell(NOTEBOOK))(x), (x + 1) * 2)
        for old, new in (("x + 1", "x + 2"), ("K = 2", "K = 3"), ("(x) * K", "(x) / K")):
            with pytest.raises(ArtifactError):
                load(tmp_path, cell(NOTEBOOK.replace(old, new)))
