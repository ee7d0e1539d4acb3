"""Declare the keys of a section: what each takes, its default, its documentation, and what happens with it.

Each key says what torchloom does with it:

    used        the value takes effect
    hint        torchloom decides, and reports what was asked and what is used
    no effect   accepted, changes nothing; a warning when it asks for something
    refused     an error when it asks for something, silent when it is off

Checks, messages and docs/config.md are made of these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, cast

from torchloom.config.frozen import FrozenMap
from torchloom.config.kinds import Kind, anything, mapping

T = TypeVar("T")
SectionT = TypeVar("SectionT", bound="Section")
Treatment = Literal["used", "hint", "no effect", "refused"]
OnAuto = Literal["default", "derive", "refuse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What the schema says of one key."""

    name: str = ""
    doc: str
    default: object = None
    treatment: Treatment = "used"
    take: Kind = anything
    """Reads what the user wrote, or refuses it."""
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


class Section:
    """A JSON object with known keys: a class attribute declares each, an instance holds their values."""

    keys: ClassVar[Mapping[str, Key]] = {}

    def __init_subclass__(cls) -> None:
        own = {
            name: replace(key, name=name) for name, key in vars(cls).items() if isinstance(key, Key)
        }
        cls.keys = {**cls.keys, **own}

    def __init__(self, **values: object) -> None:
        self.given = frozenset(values)
        """The keys that the user gave."""
        for name, key in self.keys.items():
            setattr(self, name, values.get(name, key.default))


def used(take: Callable[[object], T], default: object, doc: str, **more: Any) -> T:
    """Declare a key that takes effect.

    Args:
        take: reads what the user wrote.
        default: the value when the key is not given.
        doc: what the key does, as docs/config.md shows it.
        more: other fields of `Key`.
    """
    return cast("T", Key(take=take, default=default, doc=doc, **more))


def section(of: type[SectionT], doc: str, *, aliases: tuple[str, ...] = ()) -> SectionT:
    """Declare a nested object that is all defaults when it is not given.

    Args:
        of: the schema of the object.
        doc: what the key does.
        aliases: other names of the key.
    """
    return used(mapping, of(), doc, section=of, aliases=aliases)  # type: ignore[return-value]


def absent(of: type[SectionT], doc: str) -> SectionT | None:
    """Declare a nested object that is None when it is not given."""
    return used(mapping, None, doc, section=of)  # type: ignore[return-value]


def free_form(doc: str) -> Mapping[str, object]:
    """Declare an object whose keys are checked elsewhere."""
    return used(mapping, FrozenMap(), doc, free_form=True)


def _not_used(treatment: Treatment, doc: str, instead: str, **more: Any) -> Any:
    """Declare a key that does not simply take effect.

    Args:
        treatment: what happens with it.
        doc: what the key asks for, as in "no effect (DOC)" and "asks for DOC".
        instead: what torchloom does instead, or what to do; "" for a hint if the code that reads the key reports that itself.
        more: other fields of `Key`; the default is a value that asks for nothing, and True if false asks for something.
    """
    return Key(doc=doc, instead=instead, treatment=treatment, **more)


hint = partial(_not_used, "hint")
no_effect = partial(_not_used, "no effect")
refused = partial(_not_used, "refused")


def record_of(of: type[T], section: Section, **converted: Any) -> T:
    """Return a record whose fields are the keys of the same name in a section.

    Args:
        of: the class of the record; a key that no field names has its own owner.
        section: as the user wrote it.
        converted: values of fields that differ from their key, or have none.
    """
    same = {each.name for each in fields(cast("Any", of))} & section.keys.keys()
    return of(**{**{name: getattr(section, name) for name in same}, **converted})


def asks(value: object, key: Key) -> bool:
    """Return whether a value asks for the feature, rather than leaving it off.

    Example:
        >>> asks({"enabled": False, "ratio": 0.5}, Key(name="x", doc="", treatment="refused"))
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
