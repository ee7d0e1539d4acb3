"""Guards in plain words: what each sort of check reads like."""

from __future__ import annotations

import pytest

from torchloom.inspect.wording.english import guard_in_words, source_in_words
from torchloom.inspect.wording.hider import without_values

SELF = "L['self']._modules['l']"


@pytest.mark.parametrize(
    ("kind", "source", "text", "words"),
    [
        ("LENGTH_CHECK", "L['a']", "len(L['a']) == 1", "argument a has 1 item"),
        ("LENGTH_CHECK", "L['a']", "len(L['a']) == 12", "argument a has 12 items"),
        ("LENGTH_CHECK", "L['a']", "not L['a']", "argument a is empty"),
        ("DICT_LENGTH", "L['kw']", "L['kw']", "argument kw is not empty"),
        (
            "DICT_CONTAINS",
            f"{SELF}.__dict__",
            f"not ___dict_contains('forward', {SELF}.__dict__)",
            "self.l has no 'forward' of its own",
        ),
        (
            "DICT_CONTAINS",
            "L['kw']",
            "___dict_contains('q', L['kw'])",
            "argument kw has the key 'q'",
        ),
        (
            "NO_TENSOR_ALIASING",
            "L['x']",
            "check_no_aliasing(L['x'], L['kw']['y'])",
            "x, kw['y'] are different tensors",
        ),
        ("SHAPE_ENV", "", "2 <= L['x'].size()[0]", "sizes: 2 <= x.size(0)"),
        (
            "SHAPE_ENV",
            "",
            "L['d']['x'].size()[0] == L['d']['y'].stride()[1]",
            "sizes: d['x'].size(0) == d['y'].stride(1)",
        ),
        (
            "TYPE_MATCH",
            "L['k']",
            "L['k'] is unchanged, type=<class 'int'>",
            "argument k is an `int`",
        ),
        (
            "LAMBDA_GUARD",
            "L",
            "torch._functorch.aot_autograd.utils.top_saved_tensors_hooks ids == None",
            "the hooks on saved tensors are unchanged",
        ),
        (
            "TENSOR_MATCH",
            "L['i']",
            "check_tensor(L['i'], Tensor, DispatchKeySet(CPU), torch.int64, size=[2], stride=[1])",
            "argument i is an int64 tensor of shape [2]",
        ),
        (
            "SHAPE_ENV",
            "",
            "G['__import_torch_dot_nn'].F is G['__import_torch_dot_nn_dot_functional']",
            "global torch.nn.F and global torch.nn.functional are one object",
        ),
    ],
)
def test_words(kind: str, source: str, text: str, words: str) -> None:
    assert guard_in_words(kind, source, text) == words


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("list(dict.keys(L['kw']))[0]", "argument kw key 0"),
        ("G['__import_torch_dot_nn_dot_modules_dot_linear'].F", "global torch.nn.modules.linear.F"),
        ("L['self']._modules['l']._parameters['bias']", "self.l.bias"),
    ],
)
def test_sources(source: str, words: str) -> None:
    assert source_in_words(source) == words


@pytest.mark.parametrize(
    "check",
    [
        "list(dict.keys(G['D']))[1] == 'passphrase'",
        "str(G['D']['a']) == 'passphrase'",
        "(G['D'] == 'passphrase'",
        "G['S'].x == {'passphrase'}",
        "___set_contains(G['S'], 'passphrase')",
    ],
)
def test_strings_of_globals_are_hidden_wherever_the_global_stands(check: str) -> None:
    assert "passphrase" not in without_values(check)
