"""Hiding keys and attributes that came while the program ran, in all texts of a record alike.

Dynamo writes keys of dicts and names of attributes into the sources of guards, into names of graph inputs, into
reasons and into bytecode. Where the source of the program says them, they are shown. A key that was read from
a file, or put together at run time, may be a secret: it is hidden everywhere.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from torchloom.inspect.wording.keys import QUOTED, SourceKey, keys_in, strings_in
from torchloom.inspect.wording.vocabulary import Words

_MESSAGE = re.compile(r"((?:Message: |with message |\(reason: ))(.*?)(\.?\)?)$", re.S)


class Hider:
    """Collects keys that the source does not contain, and removes them from texts."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self._labels: dict[str, str] = {}
        """The label that replaces each key."""
        self._forms: dict[str, str] = {}
        """What replaces each text, in lower case, in which a key appears."""
        self._pattern: re.Pattern[str] | None = None

    def note(self, text: str) -> None:
        """Look for keys in the source of a value, or in a check of one."""
        for found in keys_in(text):
            if not self.words.knows(found.key):
                self._note(found)

    def in_record(self, value: Any) -> None:
        """Remove the keys from all texts of a record, in place; the program's own source stays."""
        if self._labels:
            self._clean(value)

    def text(self, text: str) -> str:
        """Return a text without the keys: `d[<key 1>]`, and `L_d_key_1_` for the input of a graph."""
        if not self._forms:
            return text
        if self._pattern is None:
            forms = sorted(self._forms, key=len, reverse=True)
            # A form is not found within a longer word; others of Python's names may go on behind it.
            each = (
                ("(?<![A-Za-z0-9])" if form[0].isalnum() else "")
                + re.escape(form)
                + ("(?![A-Za-z0-9])" if form[-1].isalnum() else "")
                for form in forms
            )
            self._pattern = re.compile("|".join(each), re.IGNORECASE)
        return self._pattern.sub(lambda match: self._forms[match.group(0).lower()], text)

    def _note(self, found: SourceKey) -> None:
        key, begin = found.key, found.begin
        label = self._labels.setdefault(key, f"key {len(self._labels) + 1}")
        word = label.replace(" ", "_")
        forms = dict.fromkeys((repr(key), ascii(key), f'"{key}"', f"b{key!r}"), f"<{label}>")
        if begin:  # the name that Dynamo makes of the source for the input of a graph
            forms[_mangled(f"{begin} {key}")] = self.text(_mangled(begin)) + f"_{word}"
        if key.isidentifier() or found.is_attribute:
            forms[f".{key}"] = f".<{label}>"
        if found.is_attribute:  # as bytecode is printed
            forms |= {f"{sign}{key})": f"{sign}{word})" for sign in "( |"}
        new = {form.lower(): stands for form, stands in forms.items() if form}
        if any(form not in self._forms for form in new):
            self._forms = {**new, **self._forms}
            self._pattern = None

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            value[:] = [self._clean(each) for each in value]
        elif isinstance(value, dict):
            items = [(self._clean(key), self._clean(each)) for key, each in value.items()]
            value.clear()
            value.update(items)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                if (type(value).__name__, field.name) not in _SOURCES:
                    setattr(value, field.name, self._clean(getattr(value, field.name)))
        return value


_SOURCES = frozenset(
    {("Function", name) for name in ("name", "qualname", "file", "source")}
    | {("Entry", "stack"), ("Entry", "compile_id"), ("Guard", "user_line"), ("Guard", "kind")}
    | {("Break", "user_stack"), ("Kernel", "language"), ("Artifact", "kind")}
)
"""Fields that hold places or text of the program's own source, or words of torchloom."""


def told(text: str, words: Words) -> str:
    """Return what Dynamo says of a graph break without the strings that the program made while running."""

    def shown(match: re.Match[str]) -> str:
        return match.group(0) if all(map(words.knows, strings_in(match.group(0)))) else "<str>"

    message = _MESSAGE.search(text)
    if message is None:
        return QUOTED.sub(shown, text)
    head, said, tail = message.groups()
    kept = said if said in ("", "None") or words.knows(said) else "<str>"
    return f"{QUOTED.sub(shown, text[: message.start()])}{head}{kept}{tail}"


def _mangled(key: str) -> str:
    """Return a key as it stands in the name of a graph's input."""
    return re.sub(r"[^a-zA-Z0-9]+", "_", key).strip("_")
