"""Validate a cleaned document; parts that pydantic refuses become errors and are left out."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from torchloom.config.findings import Findings
from torchloom.config.jsonc import join
from torchloom.config.kinds import RefusedError, show
from torchloom.config.schema import ConfigSchema


def validated(tree: dict[str, Any], findings: Findings) -> ConfigSchema:
    """Return the schema filled from `tree`; what does not validate is an error and left out."""
    try:
        return ConfigSchema.model_validate(tree)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _tell(detail, findings)
            _drop(tree, detail["loc"])
    return ConfigSchema.model_validate(tree)


def _tell(detail: Any, findings: Findings) -> None:
    path = ""
    for part in detail["loc"]:
        path = join(path, part)
    refusal = detail.get("ctx", {}).get("error")
    if isinstance(refusal, RefusedError):
        findings.error(path, refusal.what, refusal.fix)
    else:  # the only other way to fail: a section that is not an object
        findings.error(path, f"{show(detail['input'])} is not an object", "write { ... }")


def _drop(tree: dict[str, Any], location: tuple[int | str, ...]) -> None:
    *parents, last = location
    for part in parents:
        tree = tree[str(part)]
    tree.pop(str(last), None)
