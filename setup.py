"""Makes the README's relative links absolute for package indexes; everything else is in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(
    r'(?P<code>^```.*?^```)|(?P<start>\]\(|(?:src|srcset|href)=")(?!\w+:|#)', re.M | re.S
)
SHOWN = (".gif", ".png", ".svg")


def _absolute(text: str, project: str) -> str:
    source, version = (
        re.findall(rf'^{key} = "(.+)"', project, re.M)[0] for key in ("Source", "version")
    )
    ref = "main" if "dev" in version else f"v{version}"

    def prefixed(match: re.Match[str]) -> str:
        if match["code"]:
            return match["code"]
        target = re.split(r'[)"#]', text[match.end() :], maxsplit=1)[0]
        return f"{match['start']}{source}/{'raw' if target.endswith(SHOWN) else 'blob'}/{ref}/"

    return LINK.sub(prefixed, text)


setup(
    long_description=_absolute(
        (ROOT / "README.md").read_text("utf-8"), (ROOT / "pyproject.toml").read_text("utf-8")
    ),
    long_description_content_type="text/markdown",
)
