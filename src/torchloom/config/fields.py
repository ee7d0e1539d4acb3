"""How one key of the schema is declared, and how it is read back.

Each key says what torchloom does with it:

    used        the value takes effect
    hint        torchloom decides, and reports what was asked and what is used
    no effect   accepted, changes nothing; a warning when it asks for something
    refused     an error when it asks for something, silent when it is off

The declaration is plain data in the field's JSON schema, so checks, messages and docs/config.md use the
same text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

RecordT = TypeVar("RecordT")
Treatment = Literal["used", "hint", "no effect", "refused"]
OnAuto = Literal["default", "derive", "refuse"]


class Section(BaseModel):
    """A JSON object with known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What the schema says of one key."""

    name: str
    doc: str
    default: object
    treatment: Treatment
    auto: OnAuto = "default"
    """What "auto" means if the caller gives no value for it."""
    aliases: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    """Deprecated names; accepted with a warning."""
    instead: str = ""
    """What happens instead, or what to do instead."""
    gated: bool = False
    """Whether the feature is off until an `enabled: true` inside it."""
    idle: tuple[object, ...] = ()
    """More values that ask for nothing."""
    free_form: bool = False
    option: str = ""
    """The option of a pass that this key sets, "pass.option"."""
    adds: str = ""
    """The pass that is added if this key is true."""
    section: type[Section] | None = None


def used(
    default: object,
    doc: str,
    *,
    auto: OnAuto = "default",
    aliases: tuple[str, ...] = (),
    old: tuple[str, ...] = (),
    option: str = "",
    adds: str = "",
) -> Any:
    """Declare a key that takes effect.

    Args:
        default: the value when the key is not given.
        doc: what the key does, as docs/config.md shows it.
        auto: what "auto" means if the caller gives no value for it.
        aliases: other names, accepted without a warning.
        old: deprecated names, accepted with a warning.
        option: the option of a pass that the key sets, as "pass.option"; then no other code reads the key.
        adds: the pass that is added if the key is true.
    """
    return _field(
        default,
        doc,
        treatment="used",
        auto=auto,
        aliases=aliases,
        old=old,
        option=option,
        adds=adds,
    )


def section(of: type[Section], doc: str, *, aliases: tuple[str, ...] = ()) -> Any:
    """Declare a nested object that is all defaults when it is not given.

    Args:
        of: the schema of the object.
        doc: what the key does.
        aliases: other names of the key.
    """
    extra: dict[str, Any] = {"treatment": "used", "aliases": list(aliases)}
    return Field(default_factory=of, description=doc, json_schema_extra=extra)


def free_form(doc: str) -> Any:
    """Declare an object whose keys are checked elsewhere."""
    extra: dict[str, Any] = {"treatment": "used", "free_form": True}
    return Field(default_factory=dict, description=doc, json_schema_extra=extra)


def hint(doc: str, instead: str, *, aliases: tuple[str, ...] = ()) -> Any:
    """Declare a key that is treated as a hint.

    Args:
        doc: what the key asks for.
        instead: what torchloom does instead; "" if the code that reads the key reports that itself.
        aliases: other names of the key.
    """
    return _field(None, doc, treatment="hint", aliases=aliases, instead=instead)


def no_effect(default: object, doc: str, instead: str, *, gated: bool = False) -> Any:
    """Declare a key that changes nothing.

    Args:
        default: a value that asks for nothing, so it gives no warning.
        doc: what the key asks for, as in "no effect (DOC)".
        instead: what happens instead, or what to do instead.
        gated: whether the feature is off unless `enabled: true` is inside the value.
    """
    return _field(default, doc, treatment="no effect", instead=instead, gated=gated)


def refused(
    doc: str,
    instead: str,
    *,
    default: bool | None = None,
    idle: tuple[object, ...] = (),
    gated: bool = False,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a key that is an error when it asks for something.

    Args:
        doc: what the key asks for, as in "asks for DOC".
        instead: what to do instead.
        default: True if false is what asks for something.
        idle: values, beside null, false and 0, that ask for nothing.
        gated: whether the feature is off unless `enabled: true` is inside the value.
        aliases: other names of the key.
    """
    return _field(
        default, doc, treatment="refused", instead=instead, idle=idle, gated=gated, aliases=aliases
    )


@functools.cache
def keys_of(of: type[Section]) -> Mapping[str, Key]:
    """Return the keys of a section by name, in the order of their declaration."""
    return {name: _key(name, info) for name, info in of.model_fields.items()}


def record_of(of: type[RecordT], section: Section, **converted: Any) -> RecordT:
    """Return a record whose fields are the keys of the same name in a section.

    Args:
        of: the class of the record; a key that no field names has its own owner.
        section: as the user wrote it.
        converted: values of fields that differ from their key, or have none.
    """
    same = {each.name for each in fields(cast("Any", of))} & keys_of(type(section)).keys()
    return of(**{**{name: getattr(section, name) for name in same}, **converted})


def asks(value: object, key: Key) -> bool:
    """Return whether a value asks for the feature, rather than leaving it off.

    Example:
        >>> asks({"enabled": False, "ratio": 0.5}, Key(name="x", doc="", default=None,
        ...      treatment="refused"))
        False
    """
    if isinstance(value, Mapping):
        if "enabled" in value:
            return value["enabled"] not in (False, None, 0, "auto")
        inner = value.values()
        if key.gated:
            return any(isinstance(item, Mapping) and asks(item, key) for item in inner)
        return any(asks(item, key) for item in inner)
    if key.default is True:
        return value is False
    if value in (None, False, 0, "", "none", "auto") or value == []:
        return False
    return value != key.default and value not in key.idle


def _field(default: object, doc: str, **extra: Any) -> Any:
    filled = {
        key: list(value) if isinstance(value, tuple) else value for key, value in extra.items()
    }
    return Field(default=default, description=doc, json_schema_extra=filled)


def _key(name: str, info: FieldInfo) -> Key:
    extra: dict[str, Any] = {}
    if isinstance(info.json_schema_extra, dict):
        extra = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in info.json_schema_extra.items()
        }
    return Key(
        name=name,
        doc=info.description or "",
        default=info.get_default(call_default_factory=False),
        section=_section_in(info.annotation),
        **extra,
    )


def _section_in(annotation: object) -> type[Section] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
