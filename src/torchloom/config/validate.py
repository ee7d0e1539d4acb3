"""Validate a cleaned document; parts that pydantic refuses become errors and are left out."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from torchloom.config.findings import Findings
from torchloom.config.jsonc import join
from torchloom.config.kinds import RefusedError, number_in, read_as, show
from torchloom.config.schema import ConfigSchema


def validated(tree: dict[str, Any], findings: Findings) -> ConfigSchema:
    """Return the schema filled from `tree`; what does not validate is an error and left out."""
    try:
        return ConfigSchema.model_validate(tree)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if not _is_read_as_number(detail, tree, findings):
                _tell(detail, findings)
                _drop(tree, detail["loc"])
    return validated(tree, findings)


def _is_read_as_number(detail: Any, tree: dict[str, Any], findings: Findings) -> bool:
    """Put a number in the place of a text that is one, as DeepSpeed does; say whether this was so."""
    number = number_in(detail["input"])
    if number is None or not all(isinstance(part, str) for part in detail["loc"]):
        return False
    *parents, last = detail["loc"]
    for part in parents:
        tree = tree[part]
    if tree.get(last) != detail["input"]:
        return False
    tree[last] = number
    findings.warn(".".join(detail["loc"]), read_as(detail["input"], number))
    return True


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
