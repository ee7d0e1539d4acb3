"""Sentences about other values (numbers, lengths, keys, attributes, types, objects) and about the process."""

from __future__ import annotations

import re

from torchloom.inspect.wording.reasons.base import (
    ANOTHER,
    ANOTHER_LENGTH,
    ATTRIBUTES,
    BRANCH,
    LENGTHS,
    NAN,
    TYPES,
    Reason,
    constant_fix,
    in_words,
    rules,
)
from torchloom.inspect.wording.scrub import without_addresses


def _length(source: str, sign: str, length: str) -> Reason:
    # "!=" is how torch writes down what it found, never a demand.
    del sign
    return Reason(in_words(source), f"len {length}", ANOTHER_LENGTH, LENGTHS)


def _empty(source: str) -> Reason:
    called = re.match(r"[\w.]+(?=\()", source)
    if called and called.group() not in _SOURCE_CALLS:  # a check of another sort that is denied
        return Reason("", without_addresses(f"not {source}"), "", "")
    return Reason(in_words(source), "empty", "not empty", LENGTHS)


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
    return Reason(in_words(source), "not nan", "nan", NAN)


def _contains_element(negated: str | None, source: str, element: str) -> Reason:
    return _presence(source, f"element {element}", negated, BRANCH)


def _presence(source: str, what: str, negated: str | None, fix: str) -> Reason:
    """Return the reason of a check on something that a value has; `negated` where it must have none."""
    with_it, without_it = f"the {what}", f"no {what}"
    expected, actual = (without_it, with_it) if negated else (with_it, without_it)
    return Reason(in_words(source), expected, actual, fix)


def _missing_key(source: str, key: str) -> Reason:
    if source == "G":
        return Reason(
            f"global {key.strip(chr(39))}", "defined", "not defined", "keep globals defined"
        )
    return Reason(in_words(source), f"the key {key}", "no such key", ATTRIBUTES)


def _missing_attribute(source: str) -> Reason:
    return Reason(in_words(source), "an attribute that it had", "no such attribute", ATTRIBUTES)


def _has(negated: str | None, source: str, name: str) -> Reason:
    return _presence(source, f"attribute {name}", negated, ATTRIBUTES)


def _contains(negated: str | None, key: str, source: str) -> Reason:
    return _presence(source, f"key {key}", negated, ATTRIBUTES)


def _type(source: str, name: str | None) -> Reason:
    expected = f"type `{name}`" if name else "the type that it had"
    return Reason(in_words(source), expected, "another type", TYPES)


def _another_type(source: str) -> Reason:
    return _type(source, None)


def _object(source: str, name: str | None, member: str | None) -> Reason:
    name = name or member
    kept = " that it had" if name is None else f" `{name}` that it had"
    if source.endswith(".__code__"):
        fix = "keep one function object: one that is defined again at each call is another one"
        return Reason(
            in_words(source.removesuffix(".__code__")), "the same function", "another", fix
        )
    return Reason(
        in_words(source), f"the object{kept}", "another object", "pass one and the same object"
    )


def _none(source: str, negated: str | None) -> Reason:
    fix = "None and other values make entries of their own: pass few different ones"
    if negated:
        return Reason(in_words(source), "not None", "None", fix)
    return Reason(in_words(source), "None", "another value", fix)


def _one_object(left: str, negated: str | None, right: str) -> Reason:
    both = "the same object as"
    fix = "pass the same object twice in each call, or in none"
    other = in_words(right)
    if negated:
        return Reason(in_words(left), f"not {both} {other}", f"{both} it", fix)
    return Reason(in_words(left), f"{both} {other}", "another object", fix)


def _equals(source: str, value: str) -> Reason:
    words = in_words(source)
    shown = without_addresses(f"{source} == {value}").removeprefix(f"{source} == ")
    return Reason(words, f"== {shown}", ANOTHER, constant_fix(words, value))


def _not_a_number(source: str) -> Reason:
    words = in_words(source)
    return Reason(words, "== nan", ANOTHER, constant_fix(words, "nan"))


def _no_function(source: str) -> Reason:
    fix = "functions, partials and modules make entries of their own: pass one and the same object"
    return Reason(in_words(source), "a plain function", "another callable", fix)


def _compared(source: str, sign: str, value: str) -> Reason:
    fix = "the function branches on this number: keep to one side, or branch outside"
    return Reason(in_words(source), f"{sign} {value}", ANOTHER, fix)


_SOURCE = r"([A-Za-z_][\w.\[\]'\"()]*?)"
_TYPE = r"(?:, type=<class '([^']+)'>)?"
_TYPE_OR_MEMBER = r"(?:, type=<(?:class|enum) '([^']+)'>|, type=<([\w.]+): .*>)?"
"""Of members of enums torch 2.11 and 2.12 say which one, and its value."""

RULES = rules(
    (r"len\((.+?)\) (!=|==) (\d+)", _length),
    (r"not (?:math\.|__math_)isnan\((.+)\)", _nan),
    (r"(not )?set\.__contains__\((.+), (.+?)\)", _contains_element),
    (_SOURCE + r" == \1", _nan),
    (r"not " + _SOURCE, _empty),
    (r"TYPE_MISMATCH\((.+?)\)", _another_type),
    (r"KeyError on (.+)\[(.+?)\]", _missing_key),
    (r"getattr failed on source (.+)", _missing_attribute),
    (r"(not )?hasattr\((.+?), ('.+?')\)", _has),
    (r"(not )?___dict_contains\((.+?), (.+)\)", _contains),
    (r"___check_type_id\((.+?), \d+\)" + _TYPE, _type),
    (r"___check_obj_id\((.+?), \d+\)" + _TYPE_OR_MEMBER, _object),
    (r"(.+?) is (not )?None", _none),
    (_SOURCE + r" is (not )?" + _SOURCE, _one_object),
    (r"type\((.+?)\) is \w+ and __\w+_isnan\(.+\)", _not_a_number),
    (r"CodeGuardAccessor: Not a function on (.+?)(?:\.__code__)?", _no_function),
    (_SOURCE + r" (!=|<|>|<=|>=) (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|-?inf)", _compared),
    (r"([\w.\[\]'\"()]+) == (.+)", _equals),
)
"""In the order in which they are tried."""


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


def _freed(rest: str) -> Reason:
    del rest
    fix = "keep what the function was compiled for alive while it is called"
    return Reason("", "what it was compiled for still there", "freed", fix)


PROCESS_RULES = rules(
    (r"GLOBAL_STATE[^:]*:(.*)", _global_state),
    (r"___check_torch_function_mode_stack\(\)", _mode_stack),
    (r"BACKEND_MATCH(.*)", _backend),
    (r"(Cache line invalidated.*)", _freed),
)
"""In the order in which they are tried."""
