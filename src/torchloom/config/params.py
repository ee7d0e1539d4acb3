"""Check free-form parameters of optimizers, schedules and torch.compile against a table.

A table maps each name to its kind. An unknown name is an error here, because the constructor that
receives the parameters would reject it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchloom.config.findings import Findings, nearest
from torchloom.config.keys import AUTO
from torchloom.config.kinds import Kind, RefusedError, number_in, read_as, show

NO_AUTO: Mapping[str, object] = {}


def check_params(
    given: Mapping[str, object],
    table: Mapping[str, Kind],
    path: str,
    findings: Findings,
    *,
    auto: Mapping[str, object] = NO_AUTO,
) -> dict[str, object]:
    """Return the parameters that passed; the others are errors in `findings`.

    Args:
        given: what the user wrote; null counts as not given.
        table: the kinds by name.
        path: where the parameters are.
        findings: collects what is wrong.
        auto: what "auto" means, by name; None leaves the parameter out.
    """
    taken = {}
    for name, value in given.items():
        here = f"{path}.{name}"
        if name not in table:
            close = nearest(name, table)
            known = f"did you mean {close}?" if close else f"known: {', '.join(table)}"
            findings.error(here, "unknown parameter", known)
            continue
        if value == AUTO:
            if name not in auto:
                findings.leave_open(here)
                continue
            value = auto[name]
            findings.info(here, f'"auto" became {"the default" if value is None else show(value)}')
        if value is None:
            continue
        try:
            taken[name] = table[name](value)
        except RefusedError as refusal:
            if (number := number_in(value)) is None:
                findings.error(here, refusal.what, refusal.fix)
            else:
                _take_number(taken, name, table[name], (value, number), here, findings)
    return taken


def _take_number(
    taken: dict[str, object],
    name: str,
    kind: Kind,
    read: tuple[object, float],
    here: str,
    findings: Findings,
) -> None:
    """Take a text that is a number for the number, with a warning, if the parameter may be one."""
    text, number = read
    try:
        taken[name] = kind(number)
    except RefusedError as refusal:
        findings.error(here, refusal.what, refusal.fix)
    else:
        findings.warn(here, read_as(text, number))
