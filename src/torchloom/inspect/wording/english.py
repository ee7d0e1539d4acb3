"""Guards in plain words.

TENSOR_MATCH       argument x is a float32 tensor of shape [10] on cpu that requires grad
EQUALS_MATCH       argument n == 3
ID_MATCH           global torch.exp is the same object
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torchloom.records import Guard


def check_in(text: str) -> str:
    """Return the check in what torch tells of it, without the line and the stack of the user's code behind it."""
    return text.partition("\nUser stack trace")[0].partition("  #")[0].strip()


def without_tensors_of_floats(text: str) -> str:
    """Return code in which dynamic floats are written as before torch 2.12, without a tensor around them.

    Example:
        >>> without_tensors_of_floats("___as_tensor(L['n']).item() <= 3.0")
        "L['n'] <= 3.0"
    """
    return re.sub(r"___as_tensor\((.+?)\)\.item\(\)", r"\1", text)


_IDS = re.compile(r"\b(?:ids?|hash|data_ptr)\b|\.data_ptr\(|^\W*\d{12,}\W*$")
_COMPARED = r"((?:(?:[=!]=|[<>]=?) |\[)-?\d{12,}\b)"


def without_addresses(text: str) -> str:
    """Return code with object ids and addresses taken out."""
    text = re.sub(r"___check_(?:obj|type)_id\((.*?), \d+\)", r"\1 is unchanged", text)
    text = re.sub(r"\b0x[0-9a-fA-F]{6,}\b", "0x..", text)
    # The end of a uuid may be digits alone.
    text = re.sub(r"_as_uuid_[0-9a-f_]+|_[0-9a-f]{8}_[0-9a-f_]{27}", "", text)
    # Names that Dynamo makes hold addresses between underscores.
    number = r"(?<![^\W_])\d{12,}(?![^\W_])"
    if _IDS.search(text):
        return re.sub(number, "<id>", text)
    # A number that is compared, or is a key, is the program's own.
    return re.sub(rf"{_COMPARED}|{number}", lambda m: m.group(1) or "<id>", text)


def source_in_words(source: str) -> str:
    """Return the source of a guarded value in words.

    Example:
        >>> source_in_words("L['inputs']['x']")
        "argument inputs['x']"
        >>> source_in_words("G['torch'].exp")
        'global torch.exp'
    """
    for pattern, words in _IN_SOURCES:
        source = pattern.sub(words, source)
    return source or "the call"


def _module(imported: re.Match[str]) -> str:
    return imported[1].replace("_dot_", ".") + "'"


_IN_SOURCES = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"___dict_contains\(.*?, (.*)\)", r"\1"),
        (r"__import_(\w+?)'", _module),
        (r"list\(dict\.keys\((.*)\)\)\[(\d+)\]", r"\1 key \2"),
        (r"\.(?:__dict__|_modules|_parameters|_buffers)\['(\w+)'\]", r".\1"),
        (r"object\.__getattribute__\((.*?), '(\w+)'\)", r"\1.\2"),
        (r"\.__defaults__\[(\d+)\]", r" default \1"),
        (r"\.__closure__\[(\d+)\]\.cell_contents", r" closure \1"),
        (r"\AL\['self'\]", "self"),
        (r"\AL\['([\w.]+)'\]", r"argument \1"),
        (r"\AG\['([\w.]+)'\]", r"global \1"),
        # Some messages leave the L[...] out.
        (r"\A(?=[a-z_])(?!self|___|torch\.|argument |global )", "argument "),
    )
]


def groups_in_words(found: re.Match[str]) -> dict[str, str]:
    """Return the named groups of a match: sources, which are called `s` and `o`, in words."""
    given = {name: (value or "").strip().rstrip(".") for name, value in found.groupdict().items()}
    return {name: source_in_words(v) if v and name in "so" else v for name, v in given.items()}


def guard_in_words(kind: str, source: str, text: str) -> str:
    """Return what a guard requires.

    Args:
        kind: Dynamo's name of the check.
        source: the value that it looks at.
        text: the check as code.
    """
    what, text = source_in_words(source), without_tensors_of_floats(text)
    for pattern, sentence in _SENTENCES:
        found = pattern.match(f"{kind} {text}")
        if found and isinstance(sentence, str):
            said = sentence.format(what=what, text=text, **groups_in_words(found))
            return without_addresses(said)
        if found and not isinstance(sentence, str):
            return sentence(what, text)
    is_about_process = source in ("", "L", "G")
    return without_addresses(text if is_about_process else f"{what}: {text}")


_VALUES = ("TENSOR_MATCH", "TYPE_MATCH", "EQUALS_MATCH", "NONE_MATCH", "TRUE_MATCH", "FALSE_MATCH")


def value_in_words(guard: Guard) -> str:
    """Return what a guard says that a value is, such as `== 3` or `a float32 tensor of ...`; empty for other checks."""
    said = guard.english.removeprefix(f"{source_in_words(guard.source)} ")
    return said.removeprefix("is ") if guard.kind in _VALUES else ""


_SHAPES = re.compile(r"size=\[([^\]]*)\]")
_GRAD = re.compile(r"requires_grad=(True|False)")
_DTYPE = re.compile(r"torch\.(\w+)")
_DEVICE = re.compile(r"device=(\w+)")


def _tensor(what: str, text: str) -> str:
    found = _DTYPE.search(text.partition("DispatchKeySet")[2] or text)
    dtype = found.group(1) if found else ""
    parts = [what, "is an" if dtype.startswith("int") else "is a", dtype, "tensor"]
    shape, grad, device = _SHAPES.search(text), _GRAD.search(text), _DEVICE.search(text)
    if shape:
        sizes = re.sub(r"\bNone\b", "any", shape.group(1))
        parts.append(f"of shape [{sizes}]")
    if device and device.group(1) != "None":
        parts.append(f"on device {device.group(1)}")
    if grad:
        parts.append("that requires grad" if grad.group(1) == "True" else "without grad")
    return " ".join(part for part in parts if part)


def _sizes(_: str, text: str) -> str:
    text = re.sub(r"L((?:\['\w+'\])+)", lambda match: match.group(1), without_addresses(text))
    text = re.sub(r"(?<![\w\])])\['(\w+)'\]", r"\1", text)
    return "sizes: " + re.sub(r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)", text)


def _apart(_: str, text: str) -> str:
    named = re.findall(r"[LG]\['\w+'\][^,)]*", text)
    some = ", ".join(source_in_words(each).removeprefix("argument ") for each in named[:4])
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    return f"{some or 'these'}{more} are different tensors"


_LENGTH = "(?:LENGTH_CHECK|DICT_LENGTH) "
_CONTAINS = r"___dict_contains\((?P<k>.*?), "
_BY_CHECK: dict[str, str | Callable[[str, str], str]] = {
    "TENSOR_MATCH": _tensor,
    "ID_MATCH": "{what} is the same object",
    r"\S* (?P<s>.+) == (?P=s)\Z": "{s} is not nan",
    "EQUALS_MATCH .*? == (?P<v>.*)": "{what} == {v}",
    "TYPE_MATCH .*?<class '(?P<n>[aeiou][^']*)'>": "{what} is an `{n}`",
    "TYPE_MATCH .*?<class '(?P<n>[^']+)'>": "{what} is a `{n}`",
    "TYPE_MATCH": "{what} is of the same type",
    # What an instance may have in place of its class's method.
    rf"DICT_CONTAINS not {_CONTAINS}(?P<s>.*)\.__dict__\)": "{s} has no {k} of its own",
    rf"DICT_CONTAINS {_CONTAINS}(?P<s>.*)\.__dict__\)": "{s} has its own {k}",
    rf"DICT_CONTAINS not {_CONTAINS}": "{what} has no key {k}",
    rf"DICT_CONTAINS {_CONTAINS}": "{what} has the key {k}",
    "DICT_VERSION": "{what} has not been changed",
    rf"{_LENGTH}len\(.*\) == 1\Z": "{what} has 1 item",
    rf"{_LENGTH}len\(.*\) == (?P<n>\d+)": "{what} has {n} items",
    f"{_LENGTH}not ": "{what} is empty",
    _LENGTH: "{what} is not empty",
    "NONE_MATCH": "{what} is None",
    "NOT_NONE": "{what} is not None",
    "FALSE_MATCH": "{what} is False",
    "TRUE_MATCH": "{what} is True",
    "FLOAT_IS_NAN": "{what} is nan",
    "COMPLEX_IS_NAN": "{what} is a complex nan",
    "NO_HASATTR": "{what} lacks an attribute: {text}",
    "HASATTR": "{what} has an attribute: {text}",
    "NO_TENSOR_ALIASING": _apart,
    "OBJECT_ALIASING": "{what} is the same object as another argument",
    "STORAGE_OVERLAPPING": "these tensors share no memory that they did not share",
    # Not of sizes: two ways to one object.
    r"SHAPE_ENV (?P<s>[LG]\[\S+) is (?P<o>[LG]\[\S+)\Z": "{s} and {o} are one object",
    r"SHAPE_ENV not (?:math\.|__math_)isnan\((?P<s>.+)\)\Z": "{s} is not nan",
    "SHAPE_ENV|SYMBOLIC_SHAPE": _sizes,
    "DIMENSION_DYNAMIC": "no dim of {what} is marked dynamic or static",
    "DYNAMIC_INDICES": "{what} is marked dynamic as before",
    "DEFAULT_DEVICE": "the default device is unchanged",
    "GLOBAL_STATE": "grad mode, autocast and the other global switches of torch are unchanged",
    "LAMBDA_GUARD .*top_saved_tensors_hooks": "the hooks on saved tensors are unchanged",
    "TORCH_FUNCTION_MODE_STACK": "the stack of __torch_function__ modes is unchanged",
}
"""What a guard requires, by a pattern of its kind and its code; the first that fits counts."""
_SENTENCES = [(re.compile(pattern, re.S), said) for pattern, said in _BY_CHECK.items()]
