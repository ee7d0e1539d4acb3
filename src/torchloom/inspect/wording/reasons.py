"""The sentences in which torch says why a guard failed: some name the check, others what was found."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from torchloom.inspect.wording.english import (
    source_in_words,
    without_addresses,
    without_tensors_of_floats,
)

BRANCH = "each value makes an entry of its own: pass few different ones, or branch outside"
DYNAMIC_FIX = "pass it as a tensor, or compile with dynamic=True"
LENGTHS = (
    "each length makes an entry of its own: pass one length, or stack the values into one tensor"
)
ATTRIBUTES = "give all objects that are passed the same attributes and keys"
_SIZES_FIX = "the function branches on this: keep to sizes for which it holds, or branch outside"
NAN = "nan makes an entry of its own: keep it out of numbers, or pass the number as a tensor"
ATTRIBUTE_FIX = (
    "pass it as a tensor, or as an argument of its own; dynamic=True does not help where it is an "
    "attribute of a module"
)
MODULE_FIX = "an attribute of a module is a constant of the graph: make it a buffer, or an argument"
TYPES = "pass values of one type"
APART = "sizes 0 and 1 are compiled apart, also with dynamic=True"
ANOTHER = "another value"
ANOTHER_LENGTH = "another length"


class Reason(NamedTuple):
    """Why an entry was rejected."""

    source: str
    """The value that was looked at, in words; empty where it is none in particular."""
    expected: str
    """What the entry demands of it."""
    actual: str
    """What came, where torch says it."""
    fix: str


def reason_of(text: str) -> Reason:
    """Read one sentence about a failed guard.

    Example:
        >>> reason_of("len(d) != 2").expected  # torch tells what it found
        'len 2'
    """
    body = _TAIL.sub("", text.partition("\nUser stack trace")[0].partition("  # ")[0]).strip()
    while body.startswith("(") and body.endswith(")") and body.count("(") == body.count(")"):
        inner = body[1:-1]
        if inner.find(")") < inner.find("("):
            break
        body = inner
    body = without_tensors_of_floats(body)
    for pattern, build in _RULES:
        found = pattern.fullmatch(body)
        if found:
            return build(*found.groups())
    return Reason("", without_addresses(body), "", _SIZES_FIX if ".size()[" in body else "")


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
    return Reason(_words(source), f"{what}({index}) == {expected}", actual, fix)


def _mismatch(name: str, fix: str) -> Callable[..., Reason]:
    def build(source: str, expected: str, actual: str) -> Reason:
        return Reason(_words(source), f"{name} {expected}", actual.strip().rstrip("."), fix)

    return build


def _grad(source: str, expected: str) -> Reason:
    expected = expected.rstrip(".")
    actual = {"1": "0", "0": "1", "True": "False", "False": "True"}.get(expected, "the other")
    fix = "call it under one grad mode, with inputs that agree in requires_grad"
    return Reason(_words(source), f"requires_grad={expected}", f"requires_grad={actual}", fix)


def _not_a_tensor(source: str, found: str) -> Reason:
    if found.startswith("torch."):
        return Reason(
            _words(source),
            "a tensor of the class that it had",
            f"`{found}`",
            "pass tensors of one class, such as plain tensors or parameters alone",
        )
    fix = "each type makes an entry of its own: pass a tensor in each call"
    return Reason(_words(source), "a tensor", f"`{found}`", fix)


def _another_class(source: str, expected: str, found: str) -> Reason:
    reason = _not_a_tensor(source, found)
    return reason._replace(expected=f"a `{expected}`") if found.startswith("torch.") else reason


def _length(source: str, sign: str, length: str) -> Reason:
    # "!=" is how torch writes down what it found, never a demand.
    del sign
    return Reason(_words(source), f"len {length}", ANOTHER_LENGTH, LENGTHS)


def _empty(source: str) -> Reason:
    called = re.match(r"[\w.]+(?=\()", source)
    if called and called.group() not in _SOURCE_CALLS:  # a check of another sort that is denied
        return Reason("", without_addresses(f"not {source}"), "", "")
    return Reason(_words(source), "empty", "not empty", LENGTHS)


_SOURCE_CALLS = (
    "list",
    "dict.keys",
    "getattr",
    "object.__getattribute__",
    "type",
    "tuple",
    "super",
)
"""What Dynamo calls in the sources of values."""


def _nan(source: str) -> Reason:
    return Reason(_words(source), "not nan", "nan", NAN)


def _contains_element(negated: str | None, source: str, element: str) -> Reason:
    with_it, without_it = f"the element {element}", f"no element {element}"
    expected, actual = (without_it, with_it) if negated else (with_it, without_it)
    return Reason(_words(source), expected, actual, BRANCH)


def _missing_key(source: str, key: str) -> Reason:
    if source == "G":
        return Reason(
            f"global {key.strip(chr(39))}", "defined", "not defined", "keep globals defined"
        )
    return Reason(_words(source), f"the key {key}", "no such key", ATTRIBUTES)


def _missing_attribute(source: str) -> Reason:
    return Reason(_words(source), "an attribute that it had", "no such attribute", ATTRIBUTES)


def _has(negated: str | None, source: str, name: str) -> Reason:
    with_it, without_it = f"the attribute {name}", f"no attribute {name}"
    if negated:
        return Reason(_words(source), without_it, with_it, ATTRIBUTES)
    return Reason(_words(source), with_it, without_it, ATTRIBUTES)


def _contains(negated: str | None, key: str, source: str) -> Reason:
    with_it, without_it = f"the key {key}", f"no key {key}"
    if negated:
        return Reason(_words(source), without_it, with_it, ATTRIBUTES)
    return Reason(_words(source), with_it, without_it, ATTRIBUTES)


def _type(source: str, name: str | None) -> Reason:
    expected = f"type `{name}`" if name else "the type that it had"
    return Reason(_words(source), expected, "another type", TYPES)


def _another_type(source: str) -> Reason:
    return _type(source, None)


def _object(source: str, name: str | None, member: str | None) -> Reason:
    name = name or member
    kept = " that it had" if name is None else f" `{name}` that it had"
    if source.endswith(".__code__"):
        fix = "keep one function object: one that is defined again at each call is another one"
        return Reason(_words(source.removesuffix(".__code__")), "the same function", "another", fix)
    return Reason(
        _words(source), f"the object{kept}", "another object", "pass one and the same object"
    )


def _none(source: str, negated: str | None) -> Reason:
    fix = "None and other values make entries of their own: pass few different ones"
    if negated:
        return Reason(_words(source), "not None", "None", fix)
    return Reason(_words(source), "None", "another value", fix)


def _one_object(left: str, negated: str | None, right: str) -> Reason:
    both = "the same object as"
    fix = "pass the same object twice in each call, or in none"
    other = _words(right)
    if negated:
        return Reason(_words(left), f"not {both} {other}", f"{both} it", fix)
    return Reason(_words(left), f"{both} {other}", "another object", fix)


def _duplicates(names: str) -> Reason:
    words = ", ".join(_words(each.strip(" \"'")) for each in names.split(","))
    fix = "pass the same tensor twice in each call, or in none"
    return Reason(words, "different tensors", "one tensor twice", fix)


_SWITCHES = {
    "grad_mode": "grad mode",
    "autocast": "autocast",
    "default_dtype": "the default dtype",
    "num_threads": "torch.set_num_threads",
    "deterministic_algorithms": "torch.use_deterministic_algorithms",
    "torch_function": "__torch_function__",
    "allow_": "the precision settings of matrix products",
}


def _global_state(what: str) -> Reason:
    changed = [words for name, words in _SWITCHES.items() if re.search(rf"\b{name}", what)]
    some = ", ".join(changed) or "grad mode, autocast and default dtype"
    return Reason("", "unchanged global state", what.strip(), f"keep {some} the same between calls")


def _mode_stack() -> Reason:
    fix = "keep torch function modes, such as `with torch.device(...)`, the same between calls"
    return Reason("", "the same stack of torch function modes", "another stack", fix)


def _backend(rest: str) -> Reason:
    del rest
    fix = "register the backend under a name, or keep one object"
    return Reason("", "the same backend object", "another one", fix)


def _range(low: str, source: str, index: str, high: str | None) -> Reason:
    expected = f"size({index}) >= {low}" if high is None else f"{low} <= size({index}) <= {high}"
    return Reason(_words(source), expected, "another size", _range_fix(high))


def _least(source: str, index: str, low: str) -> Reason:
    return _range(low, source, index, None)


def _most(source: str, index: str, high: str) -> Reason:
    return Reason(_words(source), f"size({index}) <= {high}", "another size", _range_fix(high))


def _range_fix(high: str | None) -> str:
    if high is None:
        return "sizes below a bound are compiled apart, 0 and 1 always: pad to more"
    return "the function treats sizes beyond this bound in another way: keep to one side of it"


def _same_size(source: str, index: str, other: str) -> Reason:
    fix = "sizes that were equal are compiled as one: keep them equal, or mark both dynamic"
    return Reason(_words(source), f"size({index}) == {_sized(other)}", "another size", fix)


def _equals(source: str, value: str) -> Reason:
    words = _words(source)
    shown = without_addresses(f"{source} == {value}").removeprefix(f"{source} == ")
    return Reason(words, f"== {shown}", ANOTHER, constant_fix(words, value))


def _not_a_number(source: str) -> Reason:
    words = _words(source)
    return Reason(words, "== nan", ANOTHER, constant_fix(words, "nan"))


def _no_function(source: str) -> Reason:
    fix = "functions, partials and modules make entries of their own: pass one and the same object"
    return Reason(_words(source), "a plain function", "another callable", fix)


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
    return _marked(name, "present")._replace(source=_words(source))


def _other_marks(source: str, name: str, had: str) -> Reason:
    reason = _marked_dims(name, "other dims", had)
    return reason._replace(source=_words(source), actual="other dims")


def _marked_dims(name: str, came: str, had: str) -> Reason:
    reason = _marked(name, "present")
    call = reason.actual.removeprefix("marked by ")
    return reason._replace(
        expected=f"no dims but {had} marked by {call}",
        actual=f"dims {came}",
        fix=f"call {call} on the same dims in all calls",
    )


def _compared(source: str, sign: str, value: str) -> Reason:
    fix = "the function branches on this number: keep to one side, or branch outside"
    return Reason(_words(source), f"{sign} {value}", ANOTHER, fix)


def _freed(rest: str) -> Reason:
    del rest
    fix = "keep what the function was compiled for alive while it is called"
    return Reason("", "what it was compiled for still there", "freed", fix)


def constant_fix(source: str, value: str) -> str:
    """Return what ends recompiles for a constant that changes.

    Args:
        source: in words. Only numbers among the arguments themselves can become dynamic.
        value: as code.
    """
    is_number = re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?|-?inf|nan", value.strip()) is not None
    if source.startswith("global "):
        return (
            "a global is a constant of the graph: pass it as an argument"
            if not is_number
            else "a global is a constant of the graph: pass it as an argument, as a tensor"
        )
    if source.startswith("self"):
        return (
            MODULE_FIX
            if is_number
            else "an attribute of a module is a constant of the graph: keep it, or pass it as an argument"
        )
    if re.fullmatch(r"-?\d+", value.strip()):
        # Of a name alone nothing tells whether it is a module whose attribute this is.
        return DYNAMIC_FIX if re.fullmatch(r"\w* ?\w+", source) else ATTRIBUTE_FIX
    if is_number:
        return "pass it as a tensor"
    return BRANCH


def _words(source: str) -> str:
    return source_in_words(source.strip()) if source.strip() else ""


def _sized(text: str) -> str:
    return re.sub(r"\.size\(\)\[(\d+)\]", r".size(\1)", text)


_TAIL = re.compile(r"[. ]*(?:Guard failed on a parameter, consider .*|\(HINT: [^()]*\)\s*)$", re.S)
"""Upstream's advice behind some sentences."""
_SOURCE = r"([A-Za-z_][\w.\[\]'\"()]*?)"
_TYPE = r"(?:, type=<class '([^']+)'>)?"
_TYPE_OR_MEMBER = r"(?:, type=<(?:class|enum) '([^']+)'>|, type=<([\w.]+): .*>)?"
"""Of members of enums torch 2.11 and 2.12 say which one, and its value."""
_RULES: list[tuple[re.Pattern[str], Callable[..., Reason]]] = [
    (re.compile(pattern, re.S), build)
    for pattern, build in [
        (
            r"tensor '(.+?)' (size|stride) mismatch at index (\d+)\. expected (\S+), actual (\S+)",
            _size,
        ),
        (
            r"tensor '(.+?)' rank mismatch\. expected (\S+), actual (\S+)",
            _mismatch(
                "rank", "pass tensors with one number of dims, or compile one function for each"
            ),
        ),
        (
            r"tensor '(.+?)' dtype mismatch\. expected (\S+), actual (\S+)",
            _mismatch("dtype", "cast to one dtype before the call"),
        ),
        (
            r"tensor '(.+?)' requires_grad mismatch\. expected requires_grad=(\S+?)\.?(?: .*)?",
            _grad,
        ),
        (
            r"tensor '(.+?)' (?:dispatch key|device).*?mismatch\. expected (.+?), actual (.+)",
            _mismatch("device or dispatch keys", "move tensors to one device before the call"),
        ),
        (
            r"expected type of '(.+?)' to be a tensor type, ' but found <class '(.+?)'>",
            _not_a_tensor,
        ),
        (  # 2.15 names the class that the entry expects
            r"expected type of '(.+?)' to be <class '(.+?)'>, but found <class '(.+?)'>",
            _another_class,
        ),
        (r"len\((.+?)\) (!=|==) (\d+)", _length),
        (r"not (?:math\.|__math_)isnan\((.+)\)", _nan),
        (r"(not )?set\.__contains__\((.+), (.+?)\)", _contains_element),
        (_SOURCE + r" == \1", _nan),
        (r"not " + _SOURCE, _empty),
        (r"TYPE_MISMATCH\((.+?)\)", _another_type),
        (r"KeyError on (.+)\[(.+?)\]", _missing_key),
        (r"getattr failed on source (.+)", _missing_attribute),
        (r"hasattr\((.+?), '_dynamo_(\w+?)_indices'\) == False", _unmarked),  # 2.11 and 2.12
        (
            r"\(?\((.+?)\._dynamo_(\w+?)_indices\.issubset\(\{(.*?)\}\)\) if hasattr.*",
            _other_marks,
        ),
        (r"(not )?hasattr\((.+?), ('.+?')\)", _has),
        (r"(not )?___dict_contains\((.+?), (.+)\)", _contains),
        (r"___check_type_id\((.+?), \d+\)" + _TYPE, _type),
        (r"___check_obj_id\((.+?), \d+\)" + _TYPE_OR_MEMBER, _object),
        (r"(.+?) is (not )?None", lambda source, negated: _none(source, negated)),
        (_SOURCE + r" is (not )?" + _SOURCE, _one_object),
        (r"Duplicate tensors? found:? \[?(.+?)\]?", _duplicates),
        (r"GLOBAL_STATE[^:]*:(.*)", _global_state),
        (r"___check_torch_function_mode_stack\(\)", _mode_stack),
        (r"BACKEND_MATCH(.*)", _backend),
        (r"(\d+) <= (\S+)\.size\(\)\[(\d+)\](?: <= (\d+))?", _range),
        (r"(\S+)\.size\(\)\[(\d+)\] >= (\d+)", _least),
        (r"(\S+)\.size\(\)\[(\d+)\] <= (\d+)", _most),
        (r"(\S+)\.size\(\)\[(\d+)\] == (.*size\(\).*)", _same_size),
        (r"type\((.+?)\) is \w+ and __\w+_isnan\(.+\)", _not_a_number),
        (r"CodeGuardAccessor: Not a function on (.+?)(?:\.__code__)?", _no_function),
        (r"_dynamo_(\w+?)_indices should be absent but is (present) on runtime tensor", _marked),
        (r"(?:.*\b)?_dynamo_(\w+?)_indices\b.* is (absent) on runtime tensor", _marked),
        (r"_has_(dynamo)_dim_marking is (present) on runtime tensor.*", _marked),
        (
            r"_dynamo_(\w+?)_indices not a subset: runtime \{(.+?)\} is not a subset of compiled \{(.*)\}",
            _marked_dims,
        ),
        (_SOURCE + r" (!=|<|>|<=|>=) (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|-?inf)", _compared),
        (r"(Cache line invalidated.*)", _freed),
        (r"([\w.\[\]'\"()]+) == (.+)", _equals),
    ]
]
