"""Packs a record for the page: JSON with repeated texts kept once, then gzip, then base64.

A pass begins with the graph that the pass before it left, and gzip looks back only 32 KB: without
the table of texts, the page of a large model would carry most graphs twice.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torchloom.records import Session, to_json
from torchloom.report.page.figures import RunFigures
from torchloom.report.page.views import views

_MIN_SHARED = 256
"""Shortest repeated text, in characters, that goes into the table of texts."""


def pack(session: Session, run: RunFigures | None = None) -> str:
    """Return a record and its views as base64 of gzip of JSON; equal ones give equal text."""
    return pack_data({"record": to_json(session), **views(session, run)})


def pack_data(data: dict[str, Any]) -> str:
    """Return plain data as base64 of gzip of JSON."""
    counts = Counter(text for text in _texts(data) if len(text) >= _MIN_SHARED)
    table = {text: i for i, text in enumerate(t for t, n in counts.items() if n > 1)}
    packed = {"texts": list(table), **_share(data, table)}
    raw = json.dumps(packed, ensure_ascii=False, separators=(",", ":"), default=str)
    # Python writes lone surrogates that UTF-8 cannot hold, for instance from undecodable paths.
    coded = raw.encode("utf-8", errors="replace")
    return base64.b64encode(gzip.compress(coded, 9, mtime=0)).decode("ascii")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _share(value: Any, table: dict[str, int]) -> Any:
    """Return the data with each text of the table as `{"$text": its index}`, and floats that are not finite as text."""
    if isinstance(value, str):
        return {"$text": table[value]} if value in table else value
    if isinstance(value, dict):
        return {key: _share(each, table) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_share(each, table) for each in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)  # JSON of browsers has no NaN
    return value
