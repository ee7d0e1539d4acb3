"""Reads why Dynamo recompiled: the older entry, what it expected, what it got."""

from __future__ import annotations

import json
import re

from torchloom.inspect.wording.hider import Hider
from torchloom.inspect.wording.reasons import reason_of
from torchloom.inspect.wording.scrub import without_addresses, without_values
from torchloom.records import Recompile


def parse_reasons(payload: str, hider: Hider | None = None) -> list[Recompile]:
    """Read one `recompile_reasons`: a text, or a JSON list of texts, one per older entry.

    Args:
        payload: as Dynamo logs it.
        hider: notes the keys that the texts name.
    """
    try:
        data = json.loads(payload)
    except ValueError:
        data = payload
    texts = data if isinstance(data, list) else [data]
    return [parse_reason(str(text), hider) for text in texts]


def parse_reason(text: str, hider: Hider | None = None) -> Recompile:
    """Read one reason, such as `0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8`.

    Example:
        >>> r = parse_reason("0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8")
        >>> r.entry, r.expected, r.actual
        ('0/0', 'size(0) == 10', '8')
    """
    entry, _, rest = text.partition(": ")
    if not re.fullmatch(r"[\d/]+", entry.strip()):
        entry, rest = "", text
    body = rest.partition("\nUser stack trace")[0].partition("  # ")[0].strip()
    if hider is not None:
        hider.note(body)
    body = without_values(body, keys_too=hider is None)
    reason = reason_of(body)
    return Recompile(
        entry=entry.strip(),
        source=reason.source,
        expected=reason.expected,
        actual=reason.actual,
        text=without_addresses(body),
        fix=reason.fix,
    )
