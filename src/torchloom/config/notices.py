"""Hints, warnings and errors for keys that do not simply take effect."""

from __future__ import annotations

from torchloom.config.fields import Key, Section, asks, keys_of
from torchloom.config.findings import Findings
from torchloom.config.jsonc import join
from torchloom.config.kinds import show


def tell_treatments(section: Section, findings: Findings, path: str = "") -> None:
    """Add a hint, a warning or an error for each given key whose treatment requires one.

    Args:
        section: a validated section.
        findings: collects errors, notes and hints.
        path: the path of the section; "" for the whole document.
    """
    keys = keys_of(type(section))
    for name in keys:
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        here = join(path, name)
        if isinstance(value, Section):
            tell_treatments(value, findings, here)
        else:
            _tell(keys[name], value, here, findings)


def _tell(key: Key, value: object, path: str, findings: Findings) -> None:
    if key.treatment == "hint" and key.instead:
        if _is_alarming(key.name, value):
            findings.warn(path, f"{show(value)} has no effect: {key.instead}")
        else:
            findings.hint(path, asked=value, used=None, why=key.instead)
    elif key.treatment == "no effect" and asks(value, key):
        findings.warn(path, f"no effect ({key.doc}): {key.instead}")
    elif key.treatment == "refused" and asks(value, key):
        findings.error(path, f"asks for {key.doc}, which this release does not have", key.instead)


def _is_alarming(name: str, value: object) -> bool:
    """Return whether a hint asks for the opposite of what happens, which deserves a warning."""
    return name == "overlap_comm" and value is False
