"""Every configuration that the benchmark can run, by name.

An arm names a module of this package whose `build(job, **options)` returns a `Trainee`. Opens without
torch, so that the driver stays small; a worker imports the one module that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to train the model."""

    name: str
    module: str
    family: str
    """What the charts name on their axis."""
    variant: Literal["eager", "compiled", "compiled per block"]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the module's `build`."""
    setting: str = ""
    """What tells arms of one family and variant apart, where that is not enough."""

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.family, self.variant, self.setting)))

    @property
    def communicates(self) -> bool:
        """False for the limit, whose replicas drift apart after their first step."""
        return self.module != "arms.limit"


def _pair(family: str, module: str) -> tuple[Arm, Arm]:
    """Return the eager and the compiled arm of a module whose `build` takes `compiled`."""
    stem = family.lower()
    return (
        Arm(
            name=f"{stem}-eager",
            module=module,
            family=family,
            variant="eager",
            options={"compiled": False},
        ),
        Arm(
            name=f"{stem}-compiled",
            module=module,
            family=family,
            variant="compiled",
            options={"compiled": True},
        ),
    )


_ALL = (
    *_pair("limit", "arms.limit"),
    *_pair("DDP", "arms.ddp"),
    Arm(
        name="fsdp2-eager",
        module="arms.fsdp2",
        family="FSDP2",
        variant="eager",
        options={"compiled": "none"},
    ),
    Arm(
        name="fsdp2-block",
        module="arms.fsdp2",
        family="FSDP2",
        variant="compiled per block",
        options={"compiled": "block"},
    ),
    Arm(
        name="fsdp2-whole",
        module="arms.fsdp2",
        family="FSDP2",
        variant="compiled",
        options={"compiled": "whole"},
    ),
    *_pair("DeepSpeed", "arms.zero3"),
    *(
        Arm(
            name=f"loom-{stage}",
            module="arms.loom",
            family=f"torchloom {stage}",
            variant="compiled",
            options={"stage": stage},
        )
        for stage in (1, 2, 3)
    ),
    Arm(
        name="loom-3-shared",
        module="arms.loom",
        family="torchloom 3, shared memory",
        variant="compiled",
        options={"stage": 3, "symmetric_memory": True},
    ),
    Arm(
        name="loom-3-selective",
        module="arms.loom",
        family="torchloom 3, weights that fit 1 GB stay",
        variant="compiled",
        options={"stage": 3, "memory_budget": 1_000_000_000},
    ),
)

ARMS: Mapping[str, Arm] = MappingProxyType({arm.name: arm for arm in _ALL})


def _trainer(name: str, family: str, variant: Any, **options: Any) -> Arm:
    return Arm(
        name=f"trainer-{name}",
        module="arms.trainer",
        family=f"Trainer, {family}",
        variant=variant,
        options=options,
    )


TRAINERS: Mapping[str, Arm] = MappingProxyType(
    {
        arm.name: arm
        for arm in (
            _trainer("ddp", "DDP", "compiled", kind="ddp", compiled=True),
            _trainer("fsdp2-eager", "FSDP2", "eager", kind="fsdp2-eager"),
            _trainer("fsdp2-block", "FSDP2", "compiled per block", kind="fsdp2-block"),
            _trainer("fsdp2-whole", "FSDP2", "compiled", kind="fsdp2-whole"),
            _trainer("deepspeed-eager", "DeepSpeed ZeRO-3", "eager", kind="deepspeed"),
            _trainer(
                "deepspeed-compiled",
                "DeepSpeed ZeRO-3",
                "compiled",
                kind="deepspeed",
                compiled=True,
            ),
            _trainer("loom", "torchloom 3", "compiled", kind="loom"),
        )
    }
)
"""The arms of `bench/integrations.py`: frameworks that train the same Llama."""


def pick_arms(names: Sequence[str], known: Mapping[str, Arm] = ARMS) -> list[Arm]:
    """Return the arms called `names` of those that are known, in that order.

    Raises:
        SystemExit: a name is unknown; the message lists the known ones.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no such arm: {', '.join(unknown)}; known arms: {', '.join(known)}")
    return [known[name] for name in names]
