"""What a pass is: one function, one signature, declared needs, options of its own.

    def prefetch(gm: fx.GraphModule, ctx: PassContext, *, max_bytes: int = 16 << 20) -> int: ...

A pass edits `gm.graph` in place and returns how many edits it made. Lint, recompilation, timing,
text dumps and error context belong to the pass manager. A pass is a pure function of the graph, the
context and its options: no clock, no environment, no rank, so that all ranks build the same graph.

Keyword-only parameters are the options of a pass. They are bound where the pass is named (a preset, a
schedule, the configuration), so no other pass sees them. The context holds facts that several passes share.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import fx

from torchloom.errors import PassError

Stage = Literal["captured", "joint", "lowered"]
"""captured: as Dynamo traced forward. joint: with backward, before the split. lowered: each of the two graphs after it."""
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order in which a graph goes through them."""
_NOTES = "torchloom_notes"


def note(gm: fx.GraphModule, text: str) -> None:
    """Let the report of the pass that runs say a sentence about what it did or left.

    Args:
        gm: the graph that the pass was given.
        text: equal on all ranks.
    """
    gm.meta.setdefault(_NOTES, []).append(text)


def taken_notes(gm: fx.GraphModule) -> tuple[str, ...]:
    """Return what a pass said of a graph, and forget it."""
    return tuple(gm.meta.pop(_NOTES, ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What a plan decided about the values of one joint graph: names of nodes, of parameters.

    Activations that are named nowhere are kept.
    """

    recompute: frozenset[str] | None = None
    """Activations that backward computes again; None leaves it to the partitioner."""
    resident: frozenset[str] = frozenset()
    """Parameters that are gathered once per optimizer step."""
    prefetch_bytes: int | None = None
    """Weights gathered ahead of their use may hold this much; None leaves it to `prefetch`."""
    bucket_bytes: int | None = None
    """Transfers are merged up to this size, or up to those of `bucket` where they are smaller."""

    def key(self) -> str:
        """Return the choices as text that is equal on all ranks, whatever the order of sets."""
        recompute = None if self.recompute is None else sorted(self.recompute)
        return repr((recompute, sorted(self.resident), self.prefetch_bytes, self.bucket_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedWeights:
    """Sharded parameters that lie whole in memory that all ranks map."""

    name: str
    """What graphs call them; equal on all ranks."""
    handle: str
    """The communicator of these ranks."""
    params: tuple[tuple[str, torch.dtype], ...]
    """Name and dtype of each, in the order in which graphs number them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassContext:
    """Read-only facts that several passes of one compile share."""

    world_size: int
    """Ranks that share one copy of the weights."""
    copies: int = 1
    """Of the weights, in groups of ranks of their own."""
    handle: str = ""
    """The communicator of the model that these facts are about; "": a graph names no other."""
    is_backward: bool = False
    """Whether the lowered graph is the backward one."""
    choices: Choices | None = None
    """What the plan decided about this graph; None where there is no plan."""
    memory_budget_bytes: int | None = None
    """Device memory that a step may use at its peak; None where nobody has said."""
    shared_weights: SharedWeights | None = None
    """Weights that are read in place, without a gather."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Which parameter each input of this graph holds (a shard of it, or all): input -> name.
    Follows from the graph, so it is not part of the key."""

    def is_about(self, handle: str) -> bool:
        """Say whether these facts are about the parameters that a node names beside this handle.

        A graph may hold weights of another engine's model, which was called in forward: their names
        may be the same.
        """
        return self.handle in ("", handle)

    def key(self) -> str:
        """Return everything a pass may depend on beside its options, as text for cache keys."""
        choices = "None" if self.choices is None else self.choices.key()
        facts = replace(self, choices=None, params={})
        return f"{facts!r} {choices}"


PassFn = Callable[..., int]
"""`(gm, ctx, *, options) -> number of edits`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPass:
    """A pass, its options, and what it needs and gives.

    Example:
        >>> def shrink(gm, ctx, *, min_bytes: int = 1 << 20) -> int:
        ...     return 0
        >>> GraphPass(name="shrink", fn=shrink, stage="lowered").with_options(min_bytes=5).options
        (('min_bytes', 5),)
    """

    name: str
    fn: PassFn
    stage: Stage
    provides: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts_with: frozenset[str] = frozenset()
    memory_budget_bytes: int | None = None
    """What a schedule gave this pass; replaces the context's budget."""
    sees_regions: bool = False
    """Whether the pass is fine with graphs in which equal layers are calls of one body (`torchloom::region`). Graphs
    stay whole for passes of users that do not say so."""
    options: tuple[tuple[str, object], ...] = ()
    """Keyword arguments of `fn`, by name; what is not here has the default of `fn`."""

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Run the pass with its options; return how many edits it made."""
        return self.fn(gm, ctx, **dict(self.options))

    def with_options(self, **options: object) -> GraphPass:
        """Return the pass with options bound, beside those that are bound already.

        Raises:
            PassError: the pass has no such option, or the value is of another kind than its default.
        """
        known = options_of(self.fn)
        for name, value in options.items():
            if name in known:
                _check_kind(self.name, name, value, known[name])
            else:
                near = difflib.get_close_matches(name, known, n=1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
                )
                raise PassError(f"pass {self.name!r} has no option {name!r}: {hint}")
        return replace(self, options=tuple(sorted({**dict(self.options), **options}.items())))

    def option(self, name: str) -> Any:
        """Return the value of an option: what was bound, or else the default.

        Raises:
            KeyError: the pass has no such option.
        """
        return {**options_of(self.fn), **dict(self.options)}[name]


_KINDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
"""Plain kinds of options, in words."""


def _check_kind(pass_name: str, option: str, value: object, default: object) -> None:
    """Refuse a value of another kind than a plain default, and sizes below 0."""
    kind = type(default)
    if kind not in _KINDS:
        return
    fits = type(value) is kind or (kind is float and type(value) is int)
    if isinstance(value, int) and option.endswith("_bytes"):
        fits = fits and value >= 0
    if not fits:
        raise PassError(
            f"option {option!r} of pass {pass_name!r} is {value!r}: give {_KINDS[kind]}, as its default "
            f"{default!r} is"
        )


def options_of(fn: Callable[..., Any]) -> dict[str, object]:
    """Return the options of a pass's function, its keyword-only parameters, with their defaults."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some callables of C tell no names
        return {}
    only = inspect.Parameter.KEYWORD_ONLY
    return {each.name: each.default for each in parameters if each.kind is only}
