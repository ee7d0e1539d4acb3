"""Files and lines of one watch: the trace names files by number and frames as dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchloom._torch import introspect
from torchloom.inspect.live.lines import is_library, resolve_lines
from torchloom.inspect.record.compiles import Compile
from torchloom.inspect.wording.english import guard_in_words
from torchloom.inspect.wording.hider import Hider
from torchloom.inspect.wording.scrub import without_addresses, without_values
from torchloom.records import Guard


class Places:
    """Resolves the file names of one watch.

    Args:
        files: names by their number in the trace; the reader of the trace adds to them.
        hider: notes the keys that guards name.
    """

    def __init__(self, files: dict[int, str], hider: Hider) -> None:
        self.files, self._hider = files, hider

    def of(self, frame: Mapping[str, Any]) -> tuple[str, int]:
        """Return file and line of a frame as torch logs it."""
        number = frame.get("filename")
        path = self.files.get(number, str(number)) if isinstance(number, int) else str(number)
        return path, int(frame.get("line") or 0)

    def add_user_lines(self, compile_: Compile) -> None:
        """Add to each guard of an entry the line of user code that made it.

        An entry whose live guards are gone gets the guards from the trace.
        """
        entry = compile_.entry
        lines: dict[str, str] = {}
        texts: dict[str, str] = {}
        for row in compile_.guard_rows:
            raw = str(row.get("code", ""))
            self._hider.note(raw)
            code = without_values(raw, keys_too=False)
            texts[without_addresses(code)] = code
            user = [
                frame for frame in row.get("user_stack") or [] if not is_library(self.of(frame)[0])
            ]
            if user:
                file, line = self.of(user[-1])
                lines[without_addresses(code)] = f"{file}:{line}"
        if not entry.guards:
            entry.guards = [
                Guard(source="", kind="", text=text, english=guard_in_words("", "", code))
                for text, code in texts.items()
            ]
        resolve_lines(entry.guards, compile_.code, self.files.values(), lines)


def user_stack(compile_: Compile) -> list[str]:
    """Return the user's frames that led to a compile, as `file:line in function`, the compiled function last if it is one of these."""
    calls = [call for call in compile_.calls if not is_library(call[0])]
    if compile_.code is not None:
        file, line = introspect.place_of(compile_.code)
        calls += [] if is_library(file) else [(file, line, compile_.code.co_name)]
    return [f"{file}:{line} in {name}" for file, line, name in calls]
