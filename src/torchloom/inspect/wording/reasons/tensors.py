"""Sentences about tensors: sizes, strides, dtypes, devices, gradients, marks on dims."""

from __future__ import annotations

import re
from functools import partial

from torchloom.inspect.wording.reasons.base import APART, Reason, in_words, rules


def _size(source: str, what: str, index: str, expected: str, actual: str) -> Reason:
    actual = actual.rstrip(".")
    if what != "size":
        fix = "call .contiguous() before, or compile with dynamic=True"
    elif {expected, actual} & {"0", "1"}:
        fix = (
            f"{APART}: pad to 2 or more, or torch._dynamo.decorators.mark_unbacked(tensor, {index})"
        )
    else:
        fix = f"torch._dynamo.mark_dynamic(tensor, {index}), dynamic=True, or pad to one size"
    return Reason(in_words(source), f"{what}({index}) == {expected}", actual, fix)


def _mismatch(source: str, expected: str, actual: str, *, name: str, fix: str) -> Reason:
    return Reason(in_words(source), f"{name} {expected}", actual.strip().rstrip("."), fix)


def _grad(source: str, expected: str) -> Reason:
    expected = expected.rstrip(".")
    actual = {"1": "0", "0": "1", "True": "False", "False": "True"}.get(expected, "the other")
    fix = "call it under one grad mode, with inputs that agree in requires_grad"
    return Reason(in_words(source), f"requires_grad={expected}", f"requires_grad={actual}", fix)


def _not_a_tensor(source: str, found: str) -> Reason:
    if found.startswith("torch."):
        return Reason(
            in_words(source),
            "a tensor of the class that it had",
            f"`{found}`",
            "pass tensors of one class, such as plain tensors or parameters alone",
        )
    fix = "each type makes an entry of its own: pass a tensor in each call"
    return Reason(in_words(source), "a tensor", f"`{found}`", fix)


def _another_class(source: str, expected: str, found: str) -> Reason:
    reason = _not_a_tensor(source, found)
    return reason._replace(expected=f"a `{expected}`") if found.startswith("torch.") else reason


def _duplicates(names: str) -> Reason:
    words = ", ".join(in_words(each.strip(" \"'")) for each in names.split(","))
    fix = "pass the same tensor twice in each call, or in none"
    return Reason(words, "different tensors", "one tensor twice", fix)


def _range(low: str, source: str, index: str, high: str | None) -> Reason:
    expected = f"size({index}) >= {low}" if high is None else f"{low} <= size({index}) <= {high}"
    return Reason(in_words(source), expected, "another size", _range_fix(high))


def _least(source: str, index: str, low: str) -> Reason:
    return _range(low, source, index, None)


def _most(source: str, index: str, high: str) -> Reason:
    return Reason(in_words(source), f"size({index}) <= {high}", "another size", _range_fix(high))


def _range_fix(high: str | None) -> str:
    if high is None:
        return "sizes below a bound are compiled apart, 0 and 1 always: pad to more"
    return "the function treats sizes beyond this bound in another way: keep to one side of it"


def _same_size(source: str, index: str, other: str) -> Reason:
    fix = "sizes that were equal are compiled as one: keep them equal, or mark both dynamic"
    return Reason(in_words(source), f"size({index}) == {_sized(other)}", "another size", fix)


def _marked(name: str, what: str) -> Reason:
    """Build the reason for a mark on a tensor's dims; torch does not say on which tensor."""
    calls = {
        "dynamo": "mark_dynamic, mark_static or decorators.mark_unbacked",
        "static": "mark_static",
        "unbacked": "decorators.mark_unbacked",
        "weak_dynamic": "maybe_mark_dynamic",
    }
    call = f"torch._dynamo.{calls.get(name, 'mark_dynamic')}"
    expected, came = f"not marked by {call}", f"marked by {call}"
    if what == "absent":
        expected, came = came, expected
    fix = f"call {call} on the tensors of all calls, or of none"
    return Reason("dims of a tensor", expected, came, fix)


def _unmarked(source: str, name: str) -> Reason:
    return _marked(name, "present")._replace(source=in_words(source))


def _other_marks(source: str, name: str, had: str) -> Reason:
    reason = _marked_dims(name, "other dims", had)
    return reason._replace(source=in_words(source), actual="other dims")


def _marked_dims(name: str, came: str, had: str) -> Reason:
    reason = _marked(name, "present")
    call = reason.actual.removeprefix("marked by ")
    return reason._replace(
        expected=f"no dims but {had} marked by {call}",
        actual=f"dims {came}",
        fix=f"call {call} on the same dims in all calls",
    )


def _sized(text: str) -> str:
    return re.sub(r"\.size\(\)\[(\d+)\]", r".size(\1)", text)


RULES = rules(
    (
        r"tensor '(.+?)' (size|stride) mismatch at index (\d+)\. expected (\S+), actual (\S+)",
        _size,
    ),
    (
        r"tensor '(.+?)' rank mismatch\. expected (\S+), actual (\S+)",
        partial(
            _mismatch,
            name="rank",
            fix="pass tensors with one number of dims, or compile one function for each",
        ),
    ),
    (
        r"tensor '(.+?)' dtype mismatch\. expected (\S+), actual (\S+)",
        partial(_mismatch, name="dtype", fix="cast to one dtype before the call"),
    ),
    (
        r"tensor '(.+?)' requires_grad mismatch\. expected requires_grad=(\S+?)\.?(?: .*)?",
        _grad,
    ),
    (
        r"tensor '(.+?)' (?:dispatch key|device).*?mismatch\. expected (.+?), actual (.+)",
        partial(
            _mismatch,
            name="device or dispatch keys",
            fix="move tensors to one device before the call",
        ),
    ),
    (
        r"expected type of '(.+?)' to be a tensor type, ' but found <class '(.+?)'>",
        _not_a_tensor,
    ),
    (  # 2.15 names the class that the entry expects
        r"expected type of '(.+?)' to be <class '(.+?)'>, but found <class '(.+?)'>",
        _another_class,
    ),
    (r"hasattr\((.+?), '_dynamo_(\w+?)_indices'\) == False", _unmarked),  # 2.11 and 2.12
    (
        r"\(?\((.+?)\._dynamo_(\w+?)_indices\.issubset\(\{(.*?)\}\)\) if hasattr.*",
        _other_marks,
    ),
    (r"Duplicate tensors? found:? \[?(.+?)\]?", _duplicates),
    (r"(\d+) <= (\S+)\.size\(\)\[(\d+)\](?: <= (\d+))?", _range),
    (r"(\S+)\.size\(\)\[(\d+)\] >= (\d+)", _least),
    (r"(\S+)\.size\(\)\[(\d+)\] <= (\d+)", _most),
    (r"(\S+)\.size\(\)\[(\d+)\] == (.*size\(\).*)", _same_size),
    (r"_dynamo_(\w+?)_indices should be absent but is (present) on runtime tensor", _marked),
    (r"(?:.*\b)?_dynamo_(\w+?)_indices\b.* is (absent) on runtime tensor", _marked),
    (r"_has_(dynamo)_dim_marking is (present) on runtime tensor.*", _marked),
    (
        r"_dynamo_(\w+?)_indices not a subset: runtime \{(.+?)\} is not a subset of compiled \{(.*)\}",
        _marked_dims,
    ),
)
"""In the order in which they are tried."""
