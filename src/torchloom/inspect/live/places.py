"""Files and lines: what the trace names by number or by the end of a path."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch

import torchloom
from torchloom._torch import introspect
from torchloom.inspect.heard import Compile
from torchloom.inspect.wording.english import guard_in_words, without_addresses, without_values
from torchloom.inspect.wording.hider import Hider
from torchloom.records import Guard

_TORCH = str(Path(torch.__file__).parent) + os.sep
_TORCHLOOM = str(Path(torchloom.__file__).parent) + os.sep


class Places:
    """Resolves the file names of one watch.

    Args:
        files: names by their number in the trace.
        hider: notes the keys that guards name.
    """

    def __init__(self, files: dict[int, str], hider: Hider | None = None) -> None:
        self.files, self._hider = files, hider

    def of(self, frame: Mapping[str, Any]) -> tuple[str, int]:
        """Return file and line of a frame as torch logs it."""
        number = frame.get("filename")
        path = self.files.get(number, str(number)) if isinstance(number, int) else str(number)
        return path, int(frame.get("line") or 0)

    def add_user_lines(self, compile_: Compile) -> None:
        """Add to each guard of an entry where in the user's code it was born."""
        entry = compile_.entry
        lines: dict[str, str] = {}
        texts: dict[str, str] = {}
        for row in compile_.guard_rows:
            raw = str(row.get("code", ""))
            if self._hider is not None:
                self._hider.note(raw)
            code = without_values(raw, keys_too=self._hider is None)
            texts[without_addresses(code)] = code
            user = [
                frame for frame in row.get("user_stack") or [] if not _is_torch(self.of(frame)[0])
            ]
            if user:
                file, line = self.of(user[-1])
                lines[without_addresses(code)] = f"{file}:{line}"
        if not entry.guards:
            entry.guards = [
                Guard(source="", kind="", text=text, english=guard_in_words("", "", code))
                for text, code in texts.items()
            ]
        self.resolve_lines(entry.guards, compile_.code, lines)

    def resolve_lines(
        self, guards: Iterable[Guard], code: CodeType | None, lines: Mapping[str, str] | None = None
    ) -> None:
        """Write the whole path of each guard's line, of which Dynamo writes the end alone.

        Args:
            guards: of one entry.
            code: the function; its own file counts first.
            lines: whole places by the text of a guard, where they are known.
        """
        own = [] if code is None else [code.co_filename]
        every = dict.fromkeys([*own, *self.files.values(), *linecache.cache])
        known = [path for path in every if not _is_torch(path)]
        for guard in guards:
            guard.user_line = (lines or {}).get(guard.text) or _resolved(guard.user_line, known)


def user_stack(compile_: Compile) -> list[str]:
    """Return what called a function that was compiled, and the function, outside of torch and torchloom."""
    calls = [call for call in compile_.calls if not _is_torch(call[0]) and not _is_ours(call[0])]
    if compile_.code is not None:
        file, line = introspect.place_of(compile_.code)
        calls.append((file, line, compile_.code.co_name))
    return [f"{file}:{line} in {name}" for file, line, name in calls]


def _resolved(place: str | None, known: Iterable[str]) -> str | None:
    """Return the whole path of a place of which Dynamo wrote the end; None inside of torch."""
    if not place:
        return None
    path, _, line = place.rpartition(":")
    matching = [file for file in known if file.endswith(path)]
    if Path(path).is_absolute() and not matching:
        return None if _is_torch(path) else place
    return f"{matching[0]}:{line}" if matching else None


def _is_torch(path: str) -> bool:
    return path.startswith(_TORCH)


def _is_ours(path: str) -> bool:
    return path.startswith(_TORCHLOOM)
