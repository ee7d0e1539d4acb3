"""Edited values: constants, containers, types, and what is not there. A stored program is a miss then, or right."""

from __future__ import annotations

import sys

import pytest
import torch

from serve.model.edits import FORWARD, HEAD, check, pair, top
from serve.models import rows
from torchloom.serve import build, load

CASES: dict[str, tuple[str, str]] = {
    "constant": pair("self.k = 2", "x * self.k", "= 2", "= 3"),
    "type of a constant": pair("self.k = 2", "x + (1 if self.k is True else 0)", "= 2", "= True"),
    "sign of zero": pair(
        "self.k = 0.0", "torch.copysign(x, torch.full((), self.k))", "0.0", "-0.0"
    ),
    "absent attribute": pair("pass", "x * getattr(self, 'k', 2)", "pass", "self.k = 3"),
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
    "long list": pair(
        "self.l = list(range(100))",
        "x * self.l[80]",
        "list(range(100))",
        "list(range(80)) + [5] * 20",
    ),
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
    "int subclass": top("class I(int): pass\nK = I(2)\n", "x * int(K)", "I(2)", "I(3)"),
    "dtype": pair(
        "self.t = torch.float32",
        "(x * 1.001).to(self.t).float()",
        "= torch.float32",
        "= torch.bfloat16",
    ),
    "slice": pair("self.s = slice(0, 4)", "x[:, self.s]", "slice(0, 4)", "slice(4, 8)"),
    "string": pair("self.a = 'relu'", "getattr(F, self.a)(x)", "'relu'", "'silu'"),
    "global": top("K = 2\n", "x * K", "K = 2", "K = 3"),
    "identity of two attributes": pair(
        "self.a = nn.Parameter(torch.ones(16)); self.b = self.a",
        "x * (2 if self.a is self.b else 3)",
        "self.b = self.a",
        "self.b = nn.Parameter(torch.ones(16))",
    ),
    "global tensor of another type": top(
        "W = torch.full((16,), 2.0)\n", "x * W", "2.0)", "3.0, dtype=torch.float64)"
    ),
    "values of a global tensor": top("W = torch.full((16,), 2.0)\n", "x * W", "2.0)", "3.0)"),
    "values of a tensor in a list": pair(
        "self.w = [torch.full((16,), 2.0)]", "x * self.w[0]", "2.0)", "3.0)"
    ),
    "imported name": top("from math import pi as k\n", "x * k", "pi as k", "e as k"),
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
    "option of a layer": pair("self.a = nn.LeakyReLU(0.1)", "self.a(x)", "0.1", "0.2"),
    "environment": top("import os\n", "x * float(os.environ.get('LOOM_K', '2'))", "'2'", "'3'"),
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
    "regular expression": pair(
        "import re; self.r = re.compile('a')",
        "x * (2 if self.r.match('a') else 3)",
        "'a')\n",
        "'b')\n",
    ),
    "absent key of vars": pair(
        "self.k = 2", "x * (self.k if 'z' in self.__dict__ else 3)", "= 2", "= 2; self.z = 1"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_edited_value_is_a_miss_or_gives_what_the_edited_model_gives(name, tmp_path):
    check(*CASES[name], tmp_path)


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
