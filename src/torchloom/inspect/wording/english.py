"""Guards in plain words.

TENSOR_MATCH       argument x is a float32 tensor of shape [10] on cpu that requires grad
EQUALS_MATCH       argument n == 3
ID_MATCH           global torch.exp is the same object
"""

from __future__ import annotations

import re
from collections.abc import Callable


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


_QUOTED = re.compile(r"""(?<![\[\w])b?(['"])(?:\\.|(?!\1).)*\1""")
_WORD = re.compile(r"""b?['"]\w{0,20}(?:[:.]\w{1,8})?['"]""")
_MANY_DIGITS = re.compile(r"\d\D*\d\D*\d")
_SET_CONTAINS = re.compile(r"(?:___set_contains|set\.__contains__)\(")
_KEY_OF = re.compile(r"list\(dict\.keys\(.*\)\)\[\d+\]")
_OF_GLOBAL = re.compile(r"(?<![\w'\"])G\[")


def without_values(text: str, *, keys_too: bool = True) -> str:
    """Return a check without strings that may be secrets: only short words, such as modes, are left.

    Strings of globals are always hidden, also within calls. The source of the value stays readable.

    Args:
        text: the check as code.
        keys_too: whether checks on the keys of a dict hide keys; False where sources do so as well.

    Example:
        >>> without_values("L['mode'] == 'mean'"), without_values("L['key'] == 'sk-12ab-99'")
        ("L['mode'] == 'mean'", "L['key'] == <str>")
    """
    if text.startswith("BACKEND_MATCH failure"):  # goes on with both backends in printed form
        return "BACKEND_MATCH failure"
    left, sign, right = text.partition(" == ")
    contains = _SET_CONTAINS.search(text)
    if contains:
        left, sign, right = text[: contains.start()], contains.group(), text[contains.end() :]
    if not sign or (not keys_too and _KEY_OF.fullmatch(left)):
        return text
    is_global = _OF_GLOBAL.search(text) is not None

    def shown(match: re.Match[str]) -> str:
        word = match.group(0)
        is_plain = _WORD.fullmatch(word) and not _MANY_DIGITS.search(word)
        return word if is_plain and not is_global else "<str>"

    return f"{left}{sign}{_QUOTED.sub(shown, right)}"


_SHAPES = re.compile(r"size=\[([^\]]*)\]")
_GRAD = re.compile(r"requires_grad=(True|False)")
_DTYPE = re.compile(r"torch\.(\w+)")
_DEVICE = re.compile(r"device=(\w+)")
_SIMPLE = {
    "DEFAULT_DEVICE": "the default device is unchanged",
    "DETERMINISTIC_ALGORITHMS": "torch.use_deterministic_algorithms is unchanged",
    "GLOBAL_STATE": "grad mode, autocast and the other global switches of torch are unchanged",
    "GRAD_MODE": "gradients are switched on or off as before",
    "TORCH_FUNCTION_STATE": "no other __torch_function__ mode is active",
    "FSDP_TRAINING_STATE": "FSDP is in the same phase",
    "AUTOGRAD_SAVED_TENSORS_HOOKS": "the hooks on saved tensors are unchanged",
    "BACKEND_MATCH": "the backend is the same",
    "TORCH_FUNCTION_MODE_STACK": "the stack of __torch_function__ modes is unchanged",
}


def source_in_words(source: str) -> str:
    """Return the source of a guarded value in words.

    Example:
        >>> source_in_words("L['inputs']['x']")
        "argument inputs['x']"
        >>> source_in_words("G['torch'].exp")
        'global torch.exp'
    """
    text = re.sub(r"___dict_contains\(.*?, (.*)\)", r"\1", source)
    text = re.sub(
        r"__import_(\w+?)'", lambda match: match.group(1).replace("_dot_", ".") + "'", text
    )
    text = re.sub(r"list\(dict\.keys\((.*)\)\)\[(\d+)\]", r"\1 key \2", text)
    text = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)
    text = re.sub(r"object\.__getattribute__\((.*?), '(\w+)'\)", r"\1.\2", text)
    text = re.sub(r"\.__defaults__\[(\d+)\]", r" default \1", text)
    text = re.sub(r"\.__closure__\[(\d+)\]\.cell_contents", r" closure \1", text)
    for letter, word in (("L", "argument"), ("G", "global")):
        match = re.fullmatch(rf"{letter}\['([\w.]+)'\](.*)", text)
        if match:
            inner, rest = match.groups()
            if letter == "L" and inner == "self":
                return f"self{rest}"
            return f"{word} {inner}{rest}"
    if re.match(r"[a-z_]\w*", text) and not text.startswith(("self", "___", "torch.")):
        return f"argument {text}"  # some messages leave the L[...] out
    return text or "the call"


def guard_in_words(kind: str, source: str, text: str) -> str:
    """Return what a guard requires.

    Args:
        kind: Dynamo's name of the check.
        source: the value that it looks at.
        text: the check as code.
    """
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    what = source_in_words(source)
    text = without_tensors_of_floats(text)
    itself = re.fullmatch(r"(.+) == \1", text)
    if itself:
        return f"{source_in_words(itself.group(1))} is not nan"
    if kind == "LAMBDA_GUARD" and "top_saved_tensors_hooks" in text:
        kind = "AUTOGRAD_SAVED_TENSORS_HOOKS"
        return _SIMPLE[kind]
    for prefix, describe in _DESCRIBE.items():
        if kind.startswith(prefix):
            shown = without_addresses(text)
            return (
                describe(what, text)
                if callable(describe)
                else describe.format(what=what, text=shown)
            )
    if source in ("", "L", "G"):  # about the process, not about a value
        return without_addresses(text)
    return f"{what}: {without_addresses(text)}"


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


_NO_NAN = re.compile(r"not (?:math\.|__math_)isnan\((.+)\)")


def _equals(what: str, text: str) -> str:
    _, _, value = without_addresses(text).partition(" == ")
    return f"{what} == {value}" if value else f"{what}: {text}"


def _type(what: str, text: str) -> str:
    named = re.search(r"type=<class '([^']+)'>|<class '([^']+)'>", text)
    if named:
        name = named.group(1) or named.group(2)
        return f"{what} is {'an' if name[0] in 'aeiou' else 'a'} `{name}`"
    return f"{what} is of the same type"


def _length(what: str, text: str) -> str:
    counted = re.fullmatch(r"len\(.*\) == (\d+)", text)
    if counted:
        return f"{what} has {counted.group(1)} item{'' if counted.group(1) == '1' else 's'}"
    return f"{what} is {'empty' if text.startswith('not ') else 'not empty'}"


def _contains(what: str, text: str) -> str:
    found = re.search(r"___dict_contains\((.*?), ", text)
    if not found:
        return f"{what}: {without_addresses(text)}"
    lacks = text.startswith("not ")
    if what.endswith(".__dict__"):  # what an instance may have in place of its class's method
        owner = what.removesuffix(".__dict__")
        return f"{owner} has {'no ' if lacks else 'its own '}{found.group(1)}" + (
            " of its own" if lacks else ""
        )
    return f"{what} has {'no' if lacks else 'the'} key {found.group(1)}"


def _sizes(what: str, text: str) -> str:
    same = re.fullmatch(r"([LG]\[\S+) is ([LG]\[\S+)", text)
    if same:  # not a size: two ways to one object
        return (
            f"{source_in_words(same.group(1))} and {source_in_words(same.group(2))} are one object"
        )
    number = _NO_NAN.fullmatch(text)
    if number:
        return f"{source_in_words(number.group(1))} is not nan"
    text = re.sub(r"L((?:\['\w+'\])+)", lambda match: match.group(1), without_addresses(text))
    text = re.sub(r"(?<![\w\])])\['(\w+)'\]", r"\1", text)
    return "sizes: " + re.sub(r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)", text)


def _apart(what: str, text: str) -> str:
    named = re.findall(r"[LG]\['\w+'\][^,)]*", text)
    some = ", ".join(source_in_words(each).removeprefix("argument ") for each in named[:4])
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    return f"{some or 'these'}{more} are different tensors"


_SAME = "{what} is the same object"


_DESCRIBE: dict[str, str | Callable[[str, str], str]] = {
    "TENSOR_MATCH": _tensor,
    "EQUALS_MATCH": _equals,
    "CONSTANT_MATCH": _equals,
    "TYPE_MATCH": _type,
    "CLASS_MATCH": _SAME,
    "MODULE_MATCH": _SAME,
    "BUILTIN_MATCH": _SAME,
    "FUNCTION_MATCH": _SAME,
    "CLOSURE_MATCH": _SAME,
    "ID_MATCH": _SAME,
    "NN_MODULE": _SAME,
    "WEAKREF_ALIVE": "{what} is still alive",
    "NAME_MATCH": "{what} has the same name",
    "NONE_MATCH": "{what} is None",
    "BOOL_MATCH": lambda what, text: f"{what} is {'False' if 'False' in text else 'True'}",
    "FLOAT_IS_NAN": "{what} is nan",
    "COMPLEX_IS_NAN": "{what} is a complex nan",
    "NO_HASATTR": "{what} lacks an attribute: {text}",
    "HASATTR": "{what} has an attribute: {text}",
    "DICT_CONTAINS": _contains,
    "DICT_VERSION": "{what} has not been changed",
    "SEQUENCE_LENGTH": _length,
    "LENGTH_CHECK": _length,
    "DICT_LENGTH": _length,
    "NO_TENSOR_ALIASING": _apart,
    "OBJECT_ALIASING": "{what} is the same object as another argument",
    "STORAGE_OVERLAPPING": "these tensors share no memory that they did not share",
    "SHAPE_ENV": _sizes,
    "DIMENSION_DYNAMIC": "no dim of {what} is marked dynamic or static",
    "DYNAMIC_INDICES": "{what} is marked dynamic as before",
}
