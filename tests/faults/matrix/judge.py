"""Whether a case ended as it must: a function of what was seen, so that it is tested by itself.

told        ranks ended as they must, each with its sentence
went on     nothing was wrong, and the weights are right
SILENT      an error is missing, or names something else, or ranks hold different weights
HUNG        a rank did not end within the limit, or never came to its fault
NOISE       a traceback of torch, or what C++ prints
LEFT        a process, a file or shared memory stayed behind
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from faults.matrix.case import Case, Ends

GOOD = ("told", "went on", "skipped")

_SENTENCE = re.compile(
    r"^(?:\[rank \d+\] |torchloom[\w .-]*: |Error: )?(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Interrupt))\b: ?(.*)$"
)
_NATIVE = (
    "terminate called", "Exception raised from", "GLHF", "Fatal Python error", "Exception ignored in",
    "core dumped", "leaked shared_memory", "leaked semaphore", "ChildFailedError",
)  # fmt: skip
_NATIVE_LINE = re.compile(r"^(frame #\d+:|\[(rank\d+\]:\[)?[EF]\d{3,4} )")
_FRAME = re.compile(r'^\s*File "([^"]+)", line \d+')


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One process, after its end."""

    name: str
    code: int | None
    """None where a launcher does not tell the codes of its workers."""
    text: str
    in_time: bool = True
    ends: Ends


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A case, after its end."""

    case: Case
    processes: Sequence[Seen]
    seconds: float | None
    """From the fault to the last end; None where no rank came to its fault."""
    left: Sequence[str] = ()
    skipped: str = ""
    """Why the case could not run here."""
    other_weights: str = ""
    """Of the case that this one trains like."""
    libraries: Sequence[str] = ()
    """Folders whose frames a user must not see."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a case."""

    word: str
    why: str = ""
    sentence: str = ""
    codes: str = ""
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether the case ended as it must."""
        return self.word in GOOD


def judge(seen: Observation) -> Outcome:
    """Return what came of a case; the worst that is wrong with it counts."""
    if seen.skipped:
        return Outcome(word="skipped", why=seen.skipped)
    word, why = next(
        ((word, why) for word, find in _FAULTS if (why := find(seen))),
        ("went on" if _all_fine(seen) else "told", ""),
    )
    codes = " ".join("?" if each.code is None else str(each.code) for each in seen.processes)
    said = [sentence_of(each.text) for each in seen.processes]
    return Outcome(word=word, why=why, codes=codes, sentence=next(filter(None, said), ""))


def sentence_of(text: str) -> str:
    """Return the first line of the error that a process ended with; empty where there is none."""
    lines = [line.rstrip() for line in text.splitlines()]
    found = [line for line in lines if _SENTENCE.match(line)]
    return found[-1] if found else ""


def weights_of(text: str) -> str:
    """Return what a rank that trained to its end says of its weights."""
    found = re.findall(r"^weights (\S+)$", text, re.MULTILINE)
    return found[-1] if found else ""


def _all_fine(seen: Observation) -> bool:
    return all(each.code == 0 and weights_of(each.text) for each in seen.processes)


def _hung(seen: Observation) -> str:
    late = [each.name for each in seen.processes if not each.in_time]
    if seen.seconds is None:
        return "no rank came to its fault"
    if late:
        return f"{', '.join(late)} did not end within {seen.case.limit_s:g} s"
    if seen.seconds > seen.case.limit_s:
        return f"took {seen.seconds:.1f} s of {seen.case.limit_s:g} s"
    return ""


def _silent(seen: Observation) -> str:
    if seen.case.goes_on or (seen.case.may_end and _all_fine(seen)):
        return _wrong_weights(seen)
    return next((why for each in seen.processes if (why := _wrong_end(each))), "")


def _wrong_weights(seen: Observation) -> str:
    for each in seen.processes:
        if each.code != 0 or not weights_of(each.text):
            return f"{each.name} ended with {each.code}: {sentence_of(each.text) or 'no weights'}"
    held = {weights_of(each.text) for each in seen.processes}
    if len(held) > 1:
        return f"ranks came to different ends: {sorted(held)}"
    if "nan" in held:
        return "weights are not finite"
    if seen.case.trains_like and held != {seen.other_weights}:
        return f"weights differ from those of {seen.case.trains_like}"
    return ""


def _wrong_end(each: Seen) -> str:
    ends, sentence = each.ends, sentence_of(each.text)
    if each.code is not None and each.code not in ends.codes:
        return f"{each.name} ended with {each.code}, not {ends.codes[0]}"
    if ends.speaks and not sentence:
        return f"{each.name} says nothing"
    missing = [word for word in ends.words if word not in _from_sentence(each.text, sentence)]
    return f"{each.name} does not say {missing[0]!r}" if missing else ""


def _from_sentence(text: str, sentence: str) -> str:
    """Return the sentence with the lines that belong to it."""
    return text[text.rfind(sentence) :] if sentence else ""


def _noise(seen: Observation) -> str:
    return next((why for each in seen.processes if (why := _noise_of(each, seen.libraries))), "")


def _noise_of(each: Seen, libraries: Sequence[str]) -> str:
    for line in each.text.splitlines():
        frame = _FRAME.match(line)
        if frame and any(frame[1].startswith(folder) for folder in libraries):
            return f"{each.name} shows a frame of a library: {line.strip()}"
        if any(word in line for word in _NATIVE) or _NATIVE_LINE.match(line):
            return f"{each.name} prints {line.strip()[:80]!r}"
        if line.startswith("Traceback") and not each.ends.shows_traceback:
            return f"{each.name} shows a traceback"
    return ""


def _left(seen: Observation) -> str:
    return f"left behind: {', '.join(seen.left)}" if seen.left else ""


_FAULTS = (("HUNG", _hung), ("SILENT", _silent), ("NOISE", _noise), ("LEFT", _left))
