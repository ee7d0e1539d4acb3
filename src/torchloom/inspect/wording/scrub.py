"""Checks as code without addresses and without strings that may be secrets."""

from __future__ import annotations

import re


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
