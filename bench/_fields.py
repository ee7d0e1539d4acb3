"""What bench/memory.py compares: three fields, in each of which torchloom meets its peers alike.

    inductor   one process, everything compiled by Inductor
    boxed      one process, captured graphs run one operator at a time, arguments freed after their
               last use: what is in memory is what the graphs say
    sharded    two processes, stage 3 beside FSDP2, compiled by Inductor

All arms of a field are alive at once and take turns; fields follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arms import Arm

OURS = "torchloom"
BUDGETS = "torch memory budget"
CHECKPOINTS = "per-block checkpoint"
_TORCH_BUDGETS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

TINY = {
    "num_layers": 2,
    "dim": 64,
    "num_heads": 4,
    "hidden_dim": 176,
    "vocab_size": 256,
    "seq_len": 64,
}
"""Sizes of the decoder for a quick run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """Arms that are compared with each other."""

    name: str
    title: str
    world_size: int
    ours: Arm
    """Without a budget; a point is made of it by `our_arm`."""
    peers: tuple[Arm, ...]
    base: str
    """Name of the peer whose time is 1: the one that trades nothing."""


def our_arm(field: Field, budget_bytes: int, percent: int) -> Arm:
    """Return torchloom under a budget, `percent` of the way from the least to no recomputation."""
    return replace(
        field.ours,
        name=f"{field.ours.name}-{percent}",
        setting=f"{percent} %",
        options={**field.ours.options, "memory_budget": budget_bytes},
    )


def free_arm(field: Field) -> Arm:
    """Return torchloom as it is without any key set."""
    return replace(field.ours, name=f"{field.ours.name}-free", setting="no budget")


def pick_fields(
    names: Sequence[str], peers: Sequence[str] | None = None, *, is_quick: bool = False
) -> list[Field]:
    """Return the fields called `names`, with few peers if quick, or with those called `peers`.

    Raises:
        SystemExit: a name is unknown; the message lists the known ones.
    """
    _refuse_unknown("field", names, list(FIELDS))
    found = [FIELDS[name] for name in names]
    if peers is not None:
        _refuse_unknown("peer", peers, [arm.name for field in found for arm in field.peers])
        return [
            replace(field, peers=tuple(arm for arm in field.peers if arm.name in peers))
            for field in found
        ]
    return [_quick(field) for field in found] if is_quick else found


def _refuse_unknown(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no such {what}: {', '.join(unknown)}; known: {', '.join(known)}")


def _quick(field: Field) -> Field:
    """Keep the peer that trades nothing, checkpointing of all blocks and torch's least budget."""
    kept = [
        arm
        for arm in field.peers
        if arm.name == field.base
        or arm.options.get("budget") == 0.0
        or (arm.options.get("checkpoint_every") == 1 and arm.variant == "compiled")
    ]
    return replace(field, peers=tuple(kept))


def _torch_budgets(route: str) -> list[Arm]:
    return [
        Arm(
            name=f"torch-{route}-{budget:g}",
            module="arms.activations",
            family=BUDGETS,
            variant="compiled",
            setting=f"{budget:g}",
            options={"route": route, "budget": budget},
        )
        for budget in _TORCH_BUDGETS
    ]


def _checkpoints(route: str) -> list[Arm]:
    return [
        Arm(
            name=f"checkpoint-{route}-{every}",
            module="arms.activations",
            family=CHECKPOINTS,
            variant="eager" if route == "eager" else "compiled",
            setting=_which(every),
            options={"route": route, "checkpoint_every": every},
        )
        for every in (1, 2)
    ]


def _fsdp2(compiled: str, every: int) -> Arm:
    name = f"fsdp2-{compiled}"
    return Arm(
        name=f"{name}-checkpoint-{every}" if every else name,
        module="arms.fsdp2",
        family="FSDP2 + checkpoint" if every else "FSDP2",
        variant="compiled" if compiled == "whole" else "compiled per block",
        setting=_which(every) if every else "",
        options={"compiled": compiled, "checkpoint_every": every},
    )


def _selective(compiled: str) -> Arm:
    arm = _fsdp2(compiled, 1)
    return replace(
        arm,
        name=f"fsdp2-{compiled}-selective",
        family="FSDP2 + selective checkpoint",
        options={**arm.options, "selective": True},
    )


def _which(every: int) -> str:
    return "all blocks" if every == 1 else f"1 block of {every}"


def _loom(name: str, stage: int, backend: str) -> Arm:
    return Arm(
        name=f"loom-{name}",
        module="arms.loom",
        family=OURS,
        variant="compiled",
        options={"stage": stage, "backend": backend},
    )


_EAGER = Arm(
    name="eager",
    module="arms.activations",
    family="no trade",
    variant="eager",
    options={"route": "eager"},
)

FIELDS = {
    field.name: field
    for field in (
        Field(
            name="inductor",
            title="one process, Inductor",
            world_size=1,
            ours=_loom("inductor", 0, "inductor"),
            peers=(*_torch_budgets("inductor"), *_checkpoints("inductor")),
            base="torch-inductor-1",
        ),
        Field(
            name="boxed",
            title="one process, operator by operator",
            world_size=1,
            ours=_loom("boxed", 0, "aot_eager"),
            peers=(
                *_torch_budgets("boxed"),
                *_checkpoints("boxed"),
                _EAGER,
                *_checkpoints("eager"),
            ),
            base="torch-boxed-1",
        ),
        Field(
            name="sharded",
            title="two processes, stage 3 and FSDP2",
            world_size=2,
            ours=_loom("sharded", 3, "inductor"),
            peers=(
                *(_fsdp2("whole", every) for every in (0, 1, 2)),
                *(_fsdp2("block", every) for every in (0, 1)),
                _selective("block"),
            ),
            base="fsdp2-block",
        ),
    )
}
