"""Several simulations in one call: each combination of ranks, stage, micro batch and budget, as a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchloom._torch.dynamo import forget_compiled
from torchloom.config import load_config
from torchloom.errors import ConfigError, PlanError
from torchloom.plan.text import aligned
from torchloom.report.charts import Series, line_chart
from torchloom.simulation.models import simulated_model
from torchloom.simulation.result import Simulation
from torchloom.simulation.run import simulate

T = TypeVar("T")
_PARTS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One combination of settings; None leaves a setting to the config."""

    world_size: int
    stage: int | None = None
    shard_size: int | None = None
    batch: int | None = None
    accumulation: int | None = None
    budget: str | None = None
    checkpointing: str | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the training run, as a config has them."""

    def text(self) -> str:
        """Return the settings in words."""
        parts = {
            "ranks": self.world_size,
            "stage": self.stage,
            "shard size": self.shard_size,
            "batch": self.batch,
            "accumulation": self.accumulation,
            "budget": self.budget,
            "checkpointing": self.checkpointing,
        }
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)

    def config(self) -> dict[str, Any]:
        """Return the settings of the run with those of this combination."""
        settings = dict(self.base)
        if (
            self.batch
            or self.accumulation
            or all(settings.get(each, "auto") != "auto" for each in _PARTS)
        ):
            settings.pop("train_batch_size", None)  # follows from the others
        if "train_batch_size" not in settings:
            settings.setdefault(_PARTS[0], 1)
        zero = dict(settings.get("zero_optimization") or {})
        zero |= _given(stage=self.stage, shard_size=self.shard_size)
        return {
            **settings,
            **_given(
                train_micro_batch_size_per_gpu=self.batch,
                gradient_accumulation_steps=self.accumulation,
            ),
            "zero_optimization": zero,
        }


def _given(**values: T | None) -> dict[str, T]:
    return {name: value for name, value in values.items() if value is not None}


def choices_of(
    base: Mapping[str, Any],
    world_size: str,
    *,
    budget: str = "",
    checkpointing: str = "",
    **lists: str,
) -> list[Choice]:
    """Return all combinations of values that are given as texts with commas.

    Args:
        base: settings of the training run.
        world_size: numbers of ranks.
        budget: memory budgets.
        checkpointing: see `simulate`.
        lists: whole numbers by the name of a field of `Choice`; "" leaves it to the config.

    Raises:
        ConfigError: a value is no positive whole number.

    Example:
        >>> [each.text() for each in choices_of({}, "8,16", budget="70GB", stage="3")]
        ['ranks 8, stage 3, budget 70GB', 'ranks 16, stage 3, budget 70GB']
    """
    named: dict[str, list[Any]] = {
        name: [*_numbers(name, text)] or [None]
        for name, text in {"world_size": world_size, **lists}.items()
    }
    for name, text in {"budget": budget, "checkpointing": checkpointing}.items():
        named[name] = [each.strip() for each in text.split(",") if each.strip()] or [None]
    if named["world_size"] == [None]:
        raise ConfigError("--world-size: give the number of ranks, or several by commas")
    return [
        Choice(base=base, **dict(zip(named, values, strict=True)))
        for values in itertools.product(*named.values())
    ]


def _numbers(name: str, text: str) -> Iterator[int]:
    for part in filter(None, (each.strip() for each in text.split(","))):
        least = 0 if name == "stage" else 1
        if not part.isdecimal() or int(part) < least:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} {text}: {part!r} is no whole number from {least}: write one, or several by commas"
            )
        yield int(part)


def simulate_choice(
    choice: Choice, model: str | Callable[..., Any], seq_len: int, **hardware: Any
) -> Simulation:
    """Simulate one combination.

    Args:
        choice: the settings.
        model: see `simulated_model`.
        seq_len: tokens of a sample.
        hardware: `device`, `network`, `costs` and `eager` of `simulate`.

    Raises:
        PlanError: no plan keeps the budget.
        ConfigError: the settings or the model are wrong.
    """
    config = choice.config()
    batch = load_config(config, world_size=choice.world_size).batch
    made = simulated_model(model, batch.micro_batch_size, seq_len)
    forget_compiled()  # models of one class share the number of entries that Dynamo allows its code
    return simulate(
        made.module,
        made.inputs,
        config,
        world_size=choice.world_size,
        budget=choice.budget,
        checkpointing=choice.checkpointing or "none",
        name=made.name,
        **hardware,
    )


def table(
    found: Sequence[tuple[Choice, Simulation]], refused: Iterable[tuple[Choice, PlanError]] = ()
) -> str:
    """Return simulations as lines, those that fit first, by tokens per second of all ranks.

    Args:
        found: each with its settings.
        refused: settings that no plan keeps, with the reason.
    """
    order = sorted(found, key=lambda each: (not each[1].fits, -_of_all_ranks(each[1])))
    rows = [("settings", "tokens/s/rank", "MFU", "step s", "waits", "peak GB", "")]
    for choice, one in order:
        mfu = "" if one.mfu is None else f"{one.mfu:.1%}"
        rows.append(
            (
                choice.text(),
                f"{one.tokens_per_s:,.0f}",
                mfu,
                f"{one.step_s:.3g}",
                f"{one.exposed_s / one.step_s:.0%}",
                f"{one.peak_bytes / 1e9:.1f}",
                "" if one.fits else "does not fit",
            )
        )
    lines = [*aligned(rows, range(1, 6))]
    lines += [f"{choice.text()}: {error}" for choice, error in refused]
    return "\n".join(lines)


def frontier_chart(found: Sequence[tuple[Choice, Simulation]]) -> str:
    """Draw peak memory against a rank's time per token as SVG text: a line through those that no other beats in both.

    Args:
        found: each with its settings.
    """
    points = sorted((1e6 / one.tokens_per_s, one.peak_bytes / 1e9) for _, one in found)
    best: list[tuple[float, float]] = []
    for point in points:
        if not best or point[1] < best[-1][1]:
            best.append(point)
    beaten = [point for point in points if point not in best]
    one = found[0][1]
    times, peaks = zip(*best, strict=True)
    lines = [Series("least memory at its speed", times, peaks, has_markers=True, beside=beaten)]
    if one.capacity_bytes is not None:
        ends = points[0][0], points[-1][0]
        lines.append(Series(f"memory of {one.device}", ends, [one.capacity_bytes / 1e9] * 2))
    return line_chart(
        lines,
        title=f"{one.model}: memory against time",
        x_label="microseconds of a rank per token",
        y_label="peak of a rank, GB",
        note=f"{len(found)} settings on {one.device} over {one.network}; hollow: another is faster and smaller",
    )


def _of_all_ranks(one: Simulation) -> float:
    return one.tokens_per_s * one.world_size
