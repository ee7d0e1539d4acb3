"""What Dynamo noted of its last compiles, and what that says of a function. Changes nothing.

Notes name a function by name, file and line, which copies of it share, and by the number of its frame. What a
torch lacks is answered with "nothing known".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import CodeType
from typing import Any

from torchloom._torch.introspect import CacheEntry
from torchloom._torch.marks import Mark

_NUM_NOTED = 64
"""Of how many compiles Dynamo keeps notes, unless it is told otherwise."""
_GIVES_UP = ("Unsupported", "UserError", None)
"""How a compile ends after which Dynamo leaves the function alone; None: there was nothing to compile."""


def last_failure(code: CodeType, entries: Sequence[CacheEntry], mark: Mark | None) -> str | None:
    """Return how the last attempt to compile a function failed since the last reset; None if it did not.

    Args:
        code: of the function.
        entries: all that it has.
        mark: what Dynamo keeps on it, where that is known.
    """
    notes = _notes_of(code, entries, mark)
    return getattr(notes[0], "fail_type", None) if notes else None


def left_alone(code: CodeType, entries: Sequence[CacheEntry], mark: Mark | None) -> str | None:
    """Return why Dynamo runs a function as it is from now on, in words; None if it does not.

    Args:
        code: of the function.
        entries: all that it has.
        mark: what Dynamo keeps on it; where that is not known, its notes are taken for it, which may be wrong:
            a failure that was raised looks like one that was not.
    """
    if not is_met(code):
        return "Dynamo is told to leave it alone" if mark is not None and mark.is_skipped else None
    if mark is None:
        return _guessed(code, entries)
    return _reason(code, entries, mark) if mark.is_skipped else None


def _reason(code: CodeType, entries: Sequence[CacheEntry], mark: Mark) -> str:
    notes = _notes_of(code, entries, mark)
    if notes and not _made_an_entry(notes[0]):
        return _in_words(notes[0], entries)
    if notes or _is_untried(code):
        return "Dynamo passed it over, as inside of a dispatch mode"
    return "Dynamo leaves it alone since an earlier call"


def _guessed(code: CodeType, entries: Sequence[CacheEntry]) -> str | None:
    from torch._dynamo import config

    notes = _notes_of(code, entries, None)
    if not notes:
        # Dynamo was asked, and did not try: it leaves what it passes over alone for good.
        is_passed = not entries and _is_untried(code)
        return "Dynamo passed it over, as inside of a dispatch mode" if is_passed else None
    last = notes[0]
    kind = getattr(last, "fail_type", None)
    if kind is None:
        return None if _made_an_entry(last) else _in_words(last, entries)
    if kind.rpartition(".")[2] not in _GIVES_UP and not config.suppress_errors:
        return None  # it was raised, and the next call tries again
    return _in_words(last, entries)


def is_forgotten(code: CodeType, mark: Mark | None) -> bool:
    """Return whether Dynamo has met a function, and neither its mark nor a note of what came of it is known."""
    return mark is None and is_met(code) and not _notes_of(code, (), None)


def _is_untried(code: CodeType) -> bool:
    """Return whether Dynamo notes no compile of such a function, and would still have the note."""
    found = _metrics()
    return len(found) < _NUM_NOTED and not any(_is_about(each, code) for each in found)


def is_met(code: CodeType) -> bool:
    """Return whether Dynamo was asked to compile a function since the last reset."""
    from torch._dynamo import convert_frame

    return code in convert_frame.input_codes


def _made_an_entry(metrics: Any) -> bool:
    """Return whether a compile ended well: Dynamo builds no guards where it traced nothing."""
    return (
        getattr(metrics, "fail_type", None) is None
        and getattr(metrics, "guard_count", None) is not None
    )


def _in_words(metrics: Any, entries: Sequence[CacheEntry]) -> str:
    kind = getattr(metrics, "fail_type", None)
    if kind is None:
        which = "in a later call nothing in it" if entries else "nothing in it"
        return f"{which} was to compile"
    lines = str(getattr(metrics, "fail_reason", "") or kind).strip().splitlines() or [kind]
    more = lines[1:2] if lines[0].endswith("raised:") else []
    return f"Dynamo gave it up: {' '.join([lines[0], *more])}"


def _notes_of(code: CodeType, entries: Sequence[CacheEntry], mark: Mark | None) -> list[Any]:
    """Return the notes on a function, the last one first; none where they may be another's."""
    if not is_met(code):
        return []
    found = [metrics for metrics in reversed(_metrics()) if _is_about(metrics, code)]
    frames = {entry.compile_id.frame_id for entry in entries}
    if mark is not None and not mark.is_skipped and not mark.is_run_only:
        frames = {mark.frame_id}
    if frames:
        return [metrics for metrics in found if _frame_of(metrics) in frames]
    return found if len({_frame_of(metrics) for metrics in found}) == 1 else []


def _frame_of(metrics: Any) -> int | None:
    found = re.fullmatch(r"(\d+)/\d+", str(getattr(metrics, "compile_id", "")))
    return None if found is None else int(found.group(1))


def _is_about(metrics: Any, code: CodeType) -> bool:
    return (
        getattr(metrics, "is_forward", True) is not False
        and metrics.co_name == code.co_name
        and metrics.co_filename == code.co_filename
        and metrics.co_firstlineno == code.co_firstlineno
    )


def was_refused(frame_id: int, entries: Sequence[CacheEntry]) -> bool:
    """Return whether a limit kept Dynamo from compiling a frame since it made the newest of its entries."""
    ids = [str(each.compile_id) for each in entries if each.compile_id.frame_id == frame_id]
    for metrics in reversed(_metrics()):
        if _frame_of(metrics) != frame_id:
            continue
        if str(metrics.compile_id) in ids:
            return False
        if metrics.co_name is None and metrics.fail_type == "Unsupported":
            return True
    return False


def _metrics() -> Sequence[Any]:
    from torch._dynamo import utils

    return list(getattr(utils, "_compilation_metrics", ()))
