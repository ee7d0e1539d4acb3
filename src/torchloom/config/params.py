"""Check free-form parameters of optimizers, schedules and torch.compile against a table.

A table maps each name to its kind. An unknown name is an error here, because the constructor that
receives the parameters would reject it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchloom.config.findings import Findings, nearest
from torchloom.config.keys import AUTO
from torchloom.config.kinds import Kind, show

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
        if (read := findings.take(table[name], value, here)) is not None:
            taken[name] = read
    return taken
