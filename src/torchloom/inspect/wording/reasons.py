"""Reads the sentences in which torch says why a guard failed, and says what the user can do about each.

Some name the check, others what was found. `reason_of` reads one; `miss_of` reads the one for which an entry does not
serve a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from torchloom.inspect.wording.english import (
    check_in,
    groups_in_words,
    source_in_words,
    without_addresses,
    without_tensors_of_floats,
)
from torchloom.inspect.wording.hider import without_values

BRANCH = "each value makes an entry of its own: pass few different ones, or branch outside"
LENGTHS = (
    "each length makes an entry of its own: pass one length, or stack the values into one tensor"
)
ATTRIBUTES = "give all objects that are passed the same attributes and keys"
SIZES_FIX = "the function branches on this: keep to sizes for which it holds, or branch outside"
NAN = "nan makes an entry of its own: keep it out of numbers, or pass the number as a tensor"
TYPES = "pass values of one type"


ANOTHER = "another value"
ANOTHER_LENGTH = "another length"
OTHER_BACKEND = "BACKEND_MATCH: compiled by "


class Reason(NamedTuple):
    """Why an entry was rejected."""

    source: str
    """The value that was checked, in words; empty if the check is about no particular value."""
    expected: str
    """What the entry requires."""
    actual: str
    """What the call had, where torch says so."""
    fix: str
    """What the user can do about it; empty if it takes more than the sentence to say."""


class Miss(NamedTuple):
    """Why an entry does not serve a call."""

    compile_id: str
    source: str
    """The value that differs, as Dynamo writes it."""
    text: str
    """The check that failed."""
    english: str


def reason_of(text: str) -> Reason:
    """Read one sentence about a failed guard.

    Example:
        >>> reason_of("len(d) != 2").expected  # torch tells what it found
        'len 2'
    """
    body = _TAIL.sub("", check_in(text)).strip()
    while body.startswith("(") and body.endswith(")") and body.count("(") == body.count(")"):
        inner = body[1:-1]
        if inner.find(")") < inner.find("("):
            break
        body = inner
    body = without_tensors_of_floats(body)
    for pattern, reason in _RULES:
        found = pattern.fullmatch(body)
        if found and isinstance(reason, Reason):
            return _filled(reason, found)
        if found and not isinstance(reason, Reason):
            return reason(**found.groupdict())
    return Reason("", without_addresses(body), "", SIZES_FIX if ".size()[" in body else "")


def miss_of(compile_id: str, failure: str) -> Miss:
    """Return a failed guard in words.

    Args:
        compile_id: of the entry.
        failure: the first check that failed, in torch's words.
    """
    text = without_values(check_in(failure))
    source = (_SOURCE_IN.search(text) or [""])[0]
    reason = reason_of(text)
    english = reason.expected
    if reason.source or reason.actual:
        got = f", got {reason.actual}" if reason.actual else ""
        english = f"{reason.source or 'the call'}: expected {reason.expected}{got}"
    return Miss(compile_id, source, text, english)


_TAIL = re.compile(r"[. ]*(?:Guard failed on a parameter, consider .*|\(HINT: [^()]*\)\s*)$", re.S)
"""Upstream's advice behind some sentences."""
_SOURCE_IN = re.compile(
    r"(?<=^tensor ').+?(?=' \w+ )|[LG](?:\[(?:'[^']*'|\"[^\"]*\"|\w+)\]|\.\w+)+"
)


def _filled(reason: Reason, found: re.Match[str]) -> Reason:
    """Fill the groups of a sentence into its reason."""
    filled = Reason(*(part.format(**groups_in_words(found)) for part in reason))
    return filled._replace(expected=without_addresses(_SIZED.sub(r".size(\1)", filled.expected)))


_SIZED = re.compile(r"\.size\(\)\[(\d+)\]")


def _duplicates(names: str) -> Reason:
    words = ", ".join(source_in_words(each.strip(" \"'")) for each in names.split(","))
    fix = "pass the same tensor twice in each call, or in none"
    return Reason(words, "different tensors", "one tensor twice", fix)


def _global_state(what: str) -> Reason:
    changed = [words for name, words in _SWITCHES.items() if re.search(rf"\b{name}", what)]
    some = ", ".join(changed) or "grad mode, autocast and default dtype"
    return Reason("", "unchanged global state", what.strip(), f"keep {some} the same between calls")


_SWITCHES = {
    "grad_mode": "grad mode",
    "autocast": "autocast",
    "default_dtype": "the default dtype",
    "num_threads": "torch.set_num_threads",
    "deterministic_algorithms": "torch.use_deterministic_algorithms",
    "torch_function": "__torch_function__",
    "allow_": "the precision settings of matrix products",
}


_Rule = tuple[re.Pattern[str], Reason | Callable[..., Reason]]


def _rule(pattern: str, expected: str, actual: str, fix: str, source: str = "{s}") -> _Rule:
    return re.compile(pattern, re.S), Reason(source, expected, actual, fix)


def _read(pattern: str, read: Callable[..., Reason]) -> _Rule:
    return re.compile(pattern, re.S), read


def _presence(pattern: str, what: str, fix: str) -> list[_Rule]:
    """Return the rules of a check on something that a value has, and of one that must not be there."""
    there, missing = f"the {what}", f"no {what}"
    denied = _rule(f"not {pattern}", missing, there, fix)
    return [denied, _rule(pattern, there, missing, fix)]


_SOURCE = r"(?P<s>[A-Za-z_][\w.\[\]'\"()]*?)"
_NESTED = r"(?P<s>(?:(?:list|dict\.keys|type|tuple|super)\()*[A-Za-z_][\w.\[\]'\"]*(?:\)|\[\w+\])*)"
"""A source with what Dynamo calls in sources; any other call is a check of another sort."""
_OTHER = _SOURCE.replace("<s>", "<o>")
_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|-?inf"
_OBJECT = r"___check_obj_id\((?P<s>.+?), \d+\)"
_TENSOR = r"tensor '(?P<s>.+?)' "
_CAME = r"expected (?P<e>\S+), actual (?P<a>\S+)"
_SIZE = r"(?P<s>\S+)\.size\(\)\[(?P<i>\d+)\]"
_LOW = "sizes below a bound are compiled apart, 0 and 1 always: pad to more"
_HIGH = "the function treats sizes beyond this bound in another way: keep to one side of it"
_EQUAL = "sizes that were equal are compiled as one: keep them equal, or mark both dynamic"
_ONE_GRAD = "call it under one grad mode, with inputs that agree in requires_grad"
_CLASSES = "each class makes an entry of its own: pass tensors of one class in each call"
_MARK = (
    "call torch._dynamo.mark_dynamic, mark_static, mark_unbacked or maybe_mark_dynamic on the same dims in all "
    "calls, or in none"
)
_SAME = "pass the same object twice in each call, or in none"
_NONES = "None and other values make entries of their own: pass few different ones"
_ONE_OBJECT = "pass one and the same object"
_FUNCTION = "keep one function object: one that is defined again at each call is another one"

# In the order in which they are tried; the last pattern fits every comparison.
_RULES: list[_Rule] = [
    _rule(_TENSOR + rf"size mismatch at index (?P<i>\d+)\. {_CAME}", "size({i}) == {e}", "{a}", ""),
    _rule(
        _TENSOR + rf"stride mismatch at index (?P<i>\d+)\. {_CAME}",
        *("stride({i}) == {e}", "{a}", "call .contiguous() before, or compile with dynamic=True"),
    ),
    _rule(
        _TENSOR + rf"rank mismatch\. {_CAME}",
        *("rank {e}", "{a}"),
        "pass tensors with one number of dims, or compile one function for each",
    ),
    _rule(
        _TENSOR + rf"dtype mismatch\. {_CAME}",
        *("dtype {e}", "{a}", "cast to one dtype before the call"),
    ),
    _rule(
        _TENSOR + r"requires_grad mismatch\. expected requires_grad=1\b.*",
        *("requires_grad=1", "requires_grad=0", _ONE_GRAD),
    ),
    _rule(
        _TENSOR + r"requires_grad mismatch\. expected requires_grad=0\b.*",
        *("requires_grad=0", "requires_grad=1", _ONE_GRAD),
    ),
    _rule(
        _TENSOR + r"(?:dispatch key|device).*?mismatch\. expected (?P<e>.+?), actual (?P<a>.+)",
        *("device or dispatch keys {e}", "{a}", "move tensors to one device before the call"),
    ),
    _rule(
        r"expected type of '(?P<s>.+?)' to be .+ but found <class '(?P<a>.+?)'>",
        *("a tensor of the class that it had", "`{a}`", _CLASSES),
    ),
    _rule(
        r".*_(?:dynamo_\w*indices|has_dynamo_dim_marking)\b.*",
        *("the marks on dims that it had", "others", _MARK, "dims of a tensor"),
    ),
    _read(r"Duplicate tensors? found:? \[?(?P<names>.+?)\]?", _duplicates),
    _rule(
        rf"(?P<l>\d+) <= {_SIZE} <= (?P<h>\d+)",
        *("{l} <= size({i}) <= {h}", "another size", _HIGH),
    ),
    _rule(rf"(?P<l>\d+) <= {_SIZE}", "size({i}) >= {l}", "another size", _LOW),
    _rule(rf"{_SIZE} >= (?P<l>\d+)", "size({i}) >= {l}", "another size", _LOW),
    _rule(rf"{_SIZE} <= (?P<h>\d+)", "size({i}) <= {h}", "another size", _HIGH),
    _rule(rf"{_SIZE} == (?P<e>.*size\(\).*)", "size({i}) == {e}", "another size", _EQUAL),
    _read(r"GLOBAL_STATE[^:]*:(?P<what>.*)", _global_state),
    _rule(
        r"___check_torch_function_mode_stack\(\)",
        *("the same stack of torch function modes", "another stack"),
        "keep torch function modes, such as `with torch.device(...)`, the same between calls",
        "",
    ),
    _rule(f"{OTHER_BACKEND}(?P<b>.*)", "backend {b}", "another backend", "", ""),
    _rule(
        r"BACKEND_MATCH.*",
        *("the same backend object", "another one"),
        "register the backend under a name, or keep one object",
        "",
    ),
    _rule(
        r"Cache line invalidated.*",
        *("what it was compiled for still there", "freed"),
        "keep what the function was compiled for alive while it is called",
        "",
    ),
    # "!=" is how torch writes down what it found, never a demand.
    _rule(r"len\((?P<s>.+?)\) (?:!=|==) (?P<n>\d+)", "len {n}", ANOTHER_LENGTH, LENGTHS),
    _rule(r"not (?:math\.|__math_)isnan\((?P<s>.+)\)", "not nan", "nan", NAN),
    *_presence(r"set\.__contains__\((?P<s>.+), (?P<w>.+?)\)", "element {w}", BRANCH),
    _rule(_SOURCE + r" == (?P=s)", "not nan", "nan", NAN),
    *_presence(r"hasattr\((?P<s>.+?), (?P<w>'.+?')\)", "attribute {w}", ATTRIBUTES),
    *_presence(r"___dict_contains\((?P<w>.+?), (?P<s>.+)\)", "key {w}", ATTRIBUTES),
    _rule(f"not {_NESTED}", "empty", "not empty", LENGTHS),
    _rule(r"TYPE_MISMATCH\((?P<s>.+?)\)", "the type that it had", "another type", TYPES),
    _rule(
        r"KeyError on G\['?(?P<w>[^'\[\]]+)'?\]",
        *("defined", "not defined", "keep globals defined", "global {w}"),
    ),
    _rule(r"KeyError on (?P<s>.+)\[(?P<w>.+?)\]", "the key {w}", "no such key", ATTRIBUTES),
    _rule(
        r"getattr failed on source (?P<s>.+)",
        *("an attribute that it had", "no such attribute", ATTRIBUTES),
    ),
    _rule(
        r"___check_type_id\((?P<s>.+?), \d+\), type=<class '(?P<n>[^']+)'>",
        *("type `{n}`", "another type", TYPES),
    ),
    _rule(r"___check_type_id\((?P<s>.+?), \d+\)", "the type that it had", "another type", TYPES),
    _rule(
        r"___check_obj_id\((?P<s>.+?)\.__code__, \d+\).*", "the same function", "another", _FUNCTION
    ),
    _rule(_OBJECT + ".*", "the object that it had", "another object", _ONE_OBJECT),
    _rule(r"(?P<s>.+?) is not None", "not None", "None", _NONES),
    _rule(r"(?P<s>.+?) is None", "None", ANOTHER, _NONES),
    _rule(
        rf"{_SOURCE} is not {_OTHER}",
        *("not the same object as {o}", "the same object as it", _SAME),
    ),
    _rule(rf"{_SOURCE} is {_OTHER}", "the same object as {o}", "another object", _SAME),
    _rule(r"type\((?P<s>.+?)\) is \w+ and __\w+_isnan\(.+\)", "== nan", ANOTHER, ""),
    _rule(
        r"CodeGuardAccessor: Not a function on (?P<s>.+?)(?:\.__code__)?",
        *("a plain function", "another callable"),
        "functions, partials and modules make entries of their own: pass one and the same object",
    ),
    _rule(
        rf"{_SOURCE} (?P<c>!=|<|>|<=|>=) (?P<n>{_NUMBER})",
        *("{c} {n}", ANOTHER),
        "the function branches on this number: keep to one side, or branch outside",
    ),
    _rule(r"(?P<s>[\w.\[\]'\"()]+) == (?P<v>.+)", "== {v}", ANOTHER, ""),
]
