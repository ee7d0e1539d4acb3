"""The code that was traced, compared later with the code that is reached from the model then.

Dynamo guards function objects by identity, which no other process can check. Here code objects are compared by what
they do: names of files, numbers of lines and comments do not count, and neither do files that were edited after they
were imported. Each code object is looked for

    in the classes of what the trace read     `type(self.act).forward`, in each class that it inherits from
    in the functions that it read             globals, attributes, arguments, cells, what a decorator wraps
    under its name in its module              the rest

A program with code that is found in none of these is not stored. For code of torch and Python their versions stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchloom.serve.model.code_reader import Reader


@dataclass(frozen=True)
class Codes:
    """The code that a program was traced from."""

    names: tuple[str, ...]
    reached: tuple[Mapping[str, Any], ...]
    """Each: places where the same code is reached, "files" by label and "was", digests by label."""

    def changed(self, look_up: Any) -> list[str]:
        """Say what differs now, one line each.

        Args:
            look_up: returns the value at a place.
        """
        reader, lines = Reader(frozenset(self.names)), list[str]()
        for each in self.reached:
            was = each["was"]
            for place in each["places"]:
                try:
                    now = reader.read(look_up(place))
                except Exception as error:  # noqa: BLE001 - attributes may raise anything
                    lines.append(
                        f"source of {next(iter(was), place)}: gone ({type(error).__name__})"
                    )
                    break
                if now == was:
                    continue
                labels = [label for label in {**was, **now} if was.get(label) != now.get(label)]
                lines += [
                    f"source changed: {Path(each['files'].get(label) or reader.files.get(label, '?')).name}, {label}"
                    for label in labels
                ]
                break
        return list(dict.fromkeys(lines))

    def to_json(self) -> dict[str, Any]:
        """Return it as texts."""
        return {"names": list(self.names), "reached": [dict(each) for each in self.reached]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Codes:
        """Return what `to_json` wrote."""
        return cls(tuple(stored["names"]), tuple(stored["reached"]))
