"""Checkpoints and stores that are damaged, hostile or cut off."""

from __future__ import annotations

from dataclasses import replace

from faults.matrix.case import FINE, Case, Ends, killed, told
from faults.matrix.cases.making import GLOO, SHM, over

_REFUSED = (told("CheckpointError", "one"),) * 2
_LIKE = "right.undisturbed [gloo eager stage3]"


def _killed_in_save(who: int, seconds: float) -> list[Case]:
    arguments = {"who": who, "seconds": seconds}
    lost = told(f"rank {who} has ended without a word")
    ends: tuple[Ends, ...] = (lost, killed(9)) if who else (killed(9), lost)
    return [
        *over("files", f"rank {who} killed while saving", "is_killed_while_saving", ends, [GLOO],
              arguments=arguments),
        *over("files", f"resume after rank {who} was killed while saving", "resumes", (FINE, FINE),
              [GLOO], arguments=arguments, first="is_killed_while_saving", limit_s=30,
              trains_like=_LIKE),
    ]  # fmt: skip


CASES = [
    *over("files", "flipped bit", "loads_what_was_damaged", _REFUSED, [GLOO, SHM],
          arguments={"how": "flip"}),
    *over("files", "cut file", "loads_what_was_damaged", _REFUSED, [GLOO, replace(GLOO, stage=1)],
          arguments={"how": "cut"}),
    *over("files", "hostile .metadata", "loads_what_was_damaged", _REFUSED, [GLOO],
          arguments={"how": "forge"}),
    *over("files", "full disk on rank 0", "saves_on_a_full_disk", (told("CheckpointError", "rank 0"),) * 2,
          [GLOO], arguments={"who": 0}),
    *over("files", "full disk on rank 1", "saves_on_a_full_disk", (told("CheckpointError", "rank 1"),) * 2,
          [GLOO], arguments={"who": 1}),
    *_killed_in_save(0, 0.9),
    *_killed_in_save(1, 1.3),
    Case(name="files.store that others can write to", program="loads_a_store_of_others",
         ends=(told("ArtifactError", "not used"),), limit_s=20),
]  # fmt: skip
