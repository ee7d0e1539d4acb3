"""Reasons of recompiles: which older entry was rejected, what it expected, what came."""

from __future__ import annotations

import json
import re

from torchloom.inspect.english import source_in_words, without_addresses
from torchloom.records import Recompile

_SIZE = re.compile(
    r"tensor '(.+?)' (size|stride) mismatch at index (\d+)\. expected (\S+), actual (\S+)"
)
_RANK = re.compile(r"tensor '(.+?)' rank mismatch\. expected (\S+), actual (\S+)")
_DTYPE = re.compile(r"tensor '(.+?)' dtype mismatch\. expected (\S+), actual (\S+)")
_GRAD = re.compile(r"tensor '(.+?)' requires_grad mismatch\. expected requires_grad=(\S+)")
_DEVICE = re.compile(
    r"tensor '(.+?)' (?:dispatch key|device).*?mismatch\. expected (.+?), actual (.+)"
)
_EQUALS = re.compile(r"^([\w.\[\]'\"()]+) == (.+)$")


def parse_reasons(payload: str) -> list[Recompile]:
    """Read one `recompile_reasons`: a text, or a JSON list of texts, one per older entry."""
    try:
        data = json.loads(payload)
    except ValueError:
        data = payload
    texts = data if isinstance(data, list) else [data]
    return [parse_reason(str(text)) for text in texts]


def parse_reason(text: str) -> Recompile:
    """Read one reason, such as `0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8`.

    Example:
        >>> r = parse_reason("0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8")
        >>> r.entry, r.expected, r.actual
        ('0/0', 'size(0) == 10', '8')
    """
    entry, _, rest = text.partition(": ")
    if not re.fullmatch(r"[\d/]+", entry.strip()):
        entry, rest = "", text
    body, _, _ = rest.partition("  # ")
    source, expected, actual, fix = _parse(body)
    return Recompile(
        entry=entry.strip(),
        source=source_in_words(source) if source else "",
        expected=expected,
        actual=actual,
        text=without_addresses(body.strip()),
        fix=fix,
    )


def _parse(body: str) -> tuple[str, str, str, str]:  # noqa: PLR0911
    found = _SIZE.search(body)
    if found:
        source, what, index, expected, actual = found.groups()
        fix = (
            f"torch._dynamo.mark_dynamic(tensor, {index}), dynamic=True, or pad to one size"
            if what == "size"
            else "call .contiguous() before, or compile with dynamic=True"
        )
        return source, f"{what}({index}) == {expected}", actual.rstrip("."), fix
    for pattern, name, fix in (
        (_RANK, "rank", "pass tensors with one number of dims, or compile one function for each"),
        (_DTYPE, "dtype", "cast to one dtype before the call"),
        (_DEVICE, "device or dispatch keys", "move tensors to one device before the call"),
    ):
        found = pattern.search(body)
        if found:
            source, expected, actual = found.groups()
            return source, f"{name} {expected}", actual.strip().rstrip("."), fix
    found = _GRAD.search(body)
    if found:
        source, expected = found.groups()
        expected = expected.rstrip(".")
        actual = "0" if expected in ("1", "True") else "1"
        return (
            source,
            f"requires_grad={expected}",
            f"requires_grad={actual}",
            "call it under one grad mode, with inputs that agree in requires_grad",
        )
    if "GLOBAL_STATE" in body:
        return (
            "",
            "unchanged global state",
            body.partition(":")[2].strip(),
            "keep grad mode, autocast and default dtype the same between calls",
        )
    if "BACKEND_MATCH" in body:
        return (
            "",
            "the same backend object",
            "another one",
            "register the backend under a name, or keep one object",
        )
    found = _EQUALS.search(body.strip())
    if found:
        source, value = found.groups()
        return (
            source,
            f"== {without_addresses(value)}",
            "another value",
            _constant_fix(value.strip()),
        )
    return "", without_addresses(body.strip()), "", ""


def _constant_fix(value: str) -> str:
    """Return what ends recompiles for a constant that changes: only numbers can become dynamic."""
    if re.fullmatch(r"-?\d+", value):
        return "pass it as a tensor, or compile with dynamic=True"
    if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?|-?inf|nan", value):
        return "pass it as a tensor"
    return "each value makes an entry of its own: pass few different ones, or branch outside"
