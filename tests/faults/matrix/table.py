"""Rows and summary of the matrix, and the same as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faults.matrix.judge import GOOD, Outcome

_NAME, _WORD = 52, 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case and what came of it."""

    name: str
    outcome: Outcome
    seconds: float | None
    took_s: float
    """With starting and cleaning up."""
    outputs: dict[str, str]

    def text(self, width: int) -> str:
        """Return the row as one line, and the reason where the case failed as a second one."""
        seconds = "-" if self.seconds is None else f"{self.seconds:.1f}"
        head = f"{self.name:<{_NAME}} {self.outcome.word:<{_WORD}} {seconds:>5}"
        line = f"{head}  {self.outcome.codes:<8} {self.outcome.sentence or self.outcome.why}"
        lines = [line[:width]]
        if not self.outcome.is_good:
            lines.append(f"    {self.outcome.why}")
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {**asdict(self), "outcome": self.outcome.word, "why": self.outcome.why,
                "sentence": self.outcome.sentence, "codes": self.outcome.codes}  # fmt: skip


def head() -> str:
    """Return the line above the rows."""
    return f"{'case':<{_NAME}} {'outcome':<{_WORD}} {'s':>5}  {'codes':<8} sentence"


def summary(rows: Sequence[Row], took_s: float) -> str:
    """Return the lines below the rows."""
    words = Counter(row.outcome.word for row in rows)
    counts = ", ".join(f"{words[word]} {word}" for word in sorted(words))
    slowest = max((row.seconds or 0.0 for row in rows if row.outcome.is_good), default=0.0)
    lines = [f"{len(rows)} cases in {took_s:.0f} s: {counts}; slowest end {slowest:.1f} s"]
    lines += [
        f"  skipped: {row.name}: {row.outcome.why}" for row in rows if row.outcome.word == "skipped"
    ]
    lines += [
        f"  {row.outcome.word}: {row.name}: {row.outcome.why}"
        for row in rows
        if row.outcome.word not in GOOD
    ]
    return "\n".join(lines)


def write(path: Path, rows: Sequence[Row], took_s: float) -> None:
    """Write the table as JSON."""
    content = {"seconds": round(took_s, 1), "rows": [row.plain() for row in rows]}
    path.write_text(json.dumps(content, indent=1))


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 where a case failed, or where there was none."""
    return 0 if rows and all(row.outcome.is_good for row in rows) else 1
