"""The types of the schema: a Python type, and the kind that reads what users write.

A name that starts with `Maybe` may also be absent (null in JSON is always "not given").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import PlainValidator

from torchloom.config import kinds
from torchloom.config.budget import MemoryBudget, parse_budget


def _stage(value: object) -> int:
    try:
        stage = kinds.whole()(value)
    except kinds.RefusedError as refusal:
        raise kinds.RefusedError(refusal.what, "write 0, 1, 2 or 3") from None
    if stage not in (0, 1, 2, 3):
        raise kinds.RefusedError(
            f"{kinds.show(value)} is not a ZeRO stage",
            "use 0 (nothing divided), 1 (optimizer state), 2 (and gradients) or 3 (and parameters)",
        )
    return stage


def _print_every(value: object) -> float:
    try:
        return kinds.above(0)(value)
    except kinds.RefusedError as refusal:
        fix = "write a number above 0, or Infinity to print nothing"
        raise kinds.RefusedError(refusal.what, fix) from None


def _clip(value: object) -> float:
    if value is False:  # as DeepSpeed reads it: no norm is above it
        return 0.0
    if value is True:
        raise kinds.RefusedError("true is not a number", "write the largest norm, as 1.0")
    return kinds.number()(value)


Flag: TypeAlias = Annotated[bool, PlainValidator(kinds.flag)]
MaybeFlag: TypeAlias = Annotated[bool | None, PlainValidator(kinds.flag)]
Count: TypeAlias = Annotated[int, PlainValidator(kinds.whole())]
Positive: TypeAlias = Annotated[int, PlainValidator(kinds.whole(1))]
MaybeCount: TypeAlias = Annotated[int | None, PlainValidator(kinds.whole(1))]
Size: TypeAlias = Annotated[int | None, PlainValidator(kinds.whole())]
Seed: TypeAlias = Annotated[int | None, PlainValidator(kinds.whole(0, 2**63 - 1))]
ScalePower: TypeAlias = Annotated[int, PlainValidator(kinds.whole(0, 127))]
Number: TypeAlias = Annotated[float | None, PlainValidator(kinds.number())]
Clip: TypeAlias = Annotated[float, PlainValidator(_clip)]
Scale: TypeAlias = Annotated[float, PlainValidator(kinds.number())]
PrintEvery: TypeAlias = Annotated[float, PlainValidator(_print_every)]
Seconds: TypeAlias = Annotated[float, PlainValidator(kinds.above(0))]
MaybeSeconds: TypeAlias = Annotated[float | None, PlainValidator(kinds.above(0))]
DTypeName: TypeAlias = Annotated[str | None, PlainValidator(kinds.dtype)]
Name: TypeAlias = Annotated[str, PlainValidator(kinds.text)]
MaybeText: TypeAlias = Annotated[str | None, PlainValidator(kinds.text)]
AnyText: TypeAlias = Annotated[str, PlainValidator(kinds.any_text)]
MaybeAnyText: TypeAlias = Annotated[str | None, PlainValidator(kinds.any_text)]
Names: TypeAlias = Annotated[tuple[str, ...], PlainValidator(kinds.names)]
MaybeNames: TypeAlias = Annotated[tuple[str, ...] | None, PlainValidator(kinds.names)]
FlagOrText: TypeAlias = Annotated[bool | str, PlainValidator(kinds.flag_or_text)]
Items: TypeAlias = Annotated[Mapping[str, object], PlainValidator(kinds.mapping)]
MaybeList: TypeAlias = Annotated[tuple[object, ...] | None, PlainValidator(kinds.sequence)]
Stage: TypeAlias = Annotated[Literal[0, 1, 2, 3], PlainValidator(_stage)]
NonFinite: TypeAlias = Annotated[
    Literal["skip", "raise", "stop"], PlainValidator(kinds.word("skip", "raise", "stop"))
]
Device: TypeAlias = Annotated[str, PlainValidator(kinds.word("none", "cpu", "nvme"))]
AllReduceOp: TypeAlias = Annotated[str | None, PlainValidator(kinds.word("mean", "sum"))]
Budget: TypeAlias = Annotated[MemoryBudget | None, PlainValidator(parse_budget)]
AnyValue: TypeAlias = Annotated[object, PlainValidator(lambda value: value)]
