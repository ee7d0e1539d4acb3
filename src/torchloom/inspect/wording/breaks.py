"""Reads graph breaks: reason, place and upstream's advice from the text that Dynamo logs."""

from __future__ import annotations

import re

from torchloom._torch import introspect
from torchloom.inspect.wording.hider import Words, told
from torchloom.records import Break

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_RAISED = re.compile(r"^[\w.]+(?:Error|Exception|Failed|Unsupported)\b.*", re.M)
_LINE = re.compile(r"Graph break in user code at (.+?):(\d+)")


def parse_break(text: str, words: Words) -> Break:
    """Read one `dynamo_graph_break_reason`.

    Args:
        text: headline, reason, explanation, hints and stacks as Dynamo formats them.
        words: the words of the traced source; other strings are hidden.
    """
    explanation = told(_section(text, "Explanation:"), words)
    hints = [
        told(hint.strip(), words)
        for hint in re.findall(r"^\s*Hint: (.+(?:\n(?!\s*(?:Hint|Developer)).*\S.*)*)", text, re.M)
    ]
    title = _title(text)
    known = introspect.graph_break_registry().get(title, {})
    number = str(known.get("id", ""))
    return Break(
        reason=title
        or next((line.strip() for line in text.splitlines() if line.strip()), "unknown"),
        explanation=explanation or str(known.get("Explanation", "")),
        hints=[" ".join(hint.split()) for hint in hints]
        or [str(h) for h in known.get("Hints", [])],
        user_stack=_user_stack(text),
        gb_type=number or title,
        doc_url=_url(text, number),
    )


def first_reason(text: str) -> str:
    """Return what went wrong, on one line, from the text of a compiler error or its traceback."""
    if "Traceback (most recent call last)" in text:
        raised = [match.start() for match in _RAISED.finditer(text)]
        text = text[raised[-1] :] if raised else text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Set TORCH", "You can suppress"))]
    if len(lines) > 1 and lines[0].endswith("raised:"):
        return lines[1]
    return lines[0] if lines else "unknown"


def without_debug_context(text: str) -> str:
    """Return a message of Dynamo without the line in which it prints values for its developers."""
    return re.sub(r"^\s*Developer debug context:.*\n?", "", text, flags=re.M)


def _title(text: str) -> str:
    for pattern in (
        r"Graph Break Reason: (.+)",
        r"Reason: (.+)",
        r"torch\._dynamo\.exc\.\w+: (.+)",
    ):
        found = re.search(pattern, text)
        if not found:
            continue
        title = found.group(1).strip()
        # Says where in bytecode, or that the frame is skipped; why stands below.
        if title.startswith(("Encountered graph break", "Failed to handle graph break")):
            rest = text[found.end() :].lstrip().splitlines()
            title = rest[0].strip() if rest else title
        return title
    return ""


def _section(text: str, heading: str) -> str:
    found = re.search(
        rf"{heading}\s*(.+?)(?:\n\s*(?:Hint|Developer debug|Developer|\n)|\Z)", text, re.S
    )
    return " ".join(found.group(1).split()) if found else ""


def _user_stack(text: str) -> list[str]:
    head = text.partition("Traceback (most recent call last)")[0]
    head = head.partition("User code traceback:")[2] or head
    frames = [f"{path}:{line} in {name.rstrip(',')}" for path, line, name in _FRAME.findall(head)]
    if frames:
        return frames
    found = _LINE.search(text)
    return [f"{found.group(1)}:{found.group(2)}"] if found else []


def _url(text: str, number: str) -> str | None:
    found = re.search(r"https://\S*gb\d+\S*", text)
    if found:
        return found.group(0).rstrip(".,)")
    if not number:
        return None
    page = number.lower()
    return f"https://meta-pytorch.github.io/compile-graph-break-site/gb/{page}.html"
