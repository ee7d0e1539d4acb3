"""What a page of a report carries."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def packed_in(page: str) -> dict[str, Any]:
    """Return what the script of a page unpacks."""
    coded = re.search(r'id="record">([^<]*)</script>', page)
    assert coded
    return json.loads(gzip.decompress(base64.b64decode(coded[1])))


def record_in(packed: dict[str, Any]) -> Any:
    """Return the record, with each text in its place."""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) == {"$text"}:
                return packed["texts"][value["$text"]]
            return {key: walk(each) for key, each in value.items()}
        return [walk(each) for each in value] if isinstance(value, list) else value

    return walk(packed["record"])
