"""Passes by name: presets of the ZeRO stages, DeepSpeed's names, passes of users; and the options that follow from a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchloom.config.compiling import PHASES, RENAMED
from torchloom.costs import Network
from torchloom.deepcompile.forms import Adapted, adapt
from torchloom.errors import PassError, PassOrderError
from torchloom.graph import GraphPass
from torchloom.passes import PASSES
from torchloom.plan.transfer_sizes import default_sizes
from torchloom.shard import Layout

_CAPABILITIES = {"z3_gather_release": "transfers"}
"""DeepSpeed's names for what passes provide -> torchloom's names."""


@dataclass(frozen=True, kw_only=True)
class PassContract:
    """What a pass requires and provides: names of the user's own, or those of the built-in passes.

    Example:
        >>> PassContract(requires={"transfers"}).requires
        frozenset({'transfers'})
    """

    provides: Iterable[str] = frozenset()
    requires: Iterable[str] = frozenset()
    """What an earlier pass of the same schedule entry must provide."""
    conflicts_with: Iterable[str] = frozenset()
    """Names of passes that cannot be in the same schedule entry."""
    phase: Literal["fwd", "bwd", "both"] = "both"
    """Documentation only: every pass is called for forward and for backward graphs."""

    def __post_init__(self) -> None:
        for name in ("provides", "requires", "conflicts_with"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise PassOrderError(f"PassContract.{name} is a string: write {{{given!r}}}")
            object.__setattr__(self, name, frozenset(given))


class PassRegistry:
    """Named passes over those of a parent.

    Args:
        parent: passes that are known as well; None for the built-in ones alone.
    """

    def __init__(self, parent: PassRegistry | None = None) -> None:
        self._parent = parent
        self._own: dict[str, GraphPass] = {}

    def register(
        self, name: str, fn: Callable[..., Any] | GraphPass, contract: PassContract | None = None
    ) -> GraphPass:
        """Name a pass; a second registration replaces function and contract.

        Args:
            name: what schedules and configurations call it.
            fn: a function of one of the forms in `torchloom.deepcompile.forms`, or a `GraphPass`.
            contract: what it needs and gives; None: it may stand anywhere.

        Raises:
            PassOrderError: the name is one of torchloom's.
            PassError: a parameter of the function belongs to no form.
        """
        if name in PASSES or name in ALIASES or name in PHASES:
            raise PassOrderError(
                f"pass name {name!r} is one of torchloom's: choose another (to leave the built-in "
                "pass out, use compile.disable_passes)"
            )
        self._own[name] = made = _made(name, fn, contract)
        return made

    def known(self) -> Mapping[str, GraphPass]:
        """Return all passes by name."""
        return {**(PASSES if self._parent is None else self._parent.known()), **self._own}

    def of_function(self, fn: Callable[..., Any]) -> GraphPass:
        """Return the pass that a function was registered as, or an unnamed one made of it.

        Raises:
            PassOrderError: it was registered under several names.
            PassError: it is not registered, and no pass can be made of it.
        """
        found = [each for each in self.known().values() if _function_of(each) is fn]
        if len(found) > 1:
            names = " and ".join(repr(each.name) for each in found)
            raise PassOrderError(
                f"a scheduled function is registered as {names}: schedule it by one of the names"
            )
        if found:
            return found[0]
        name = str(getattr(fn, "__name__", None) or type(fn).__name__)
        return _made(name, fn, None)


REGISTRY = PassRegistry()
"""Passes of this process, known to every engine."""


def register_compile_pass(
    name: str, fn: Callable[..., Any] | GraphPass, contract: PassContract | None = None
) -> None:
    """Register the user's own pass under a name that schedules and configurations can use.

    It runs on the forward and on the backward graph of every captured fragment, after the split.

    Args:
        name: the name.
        fn: a function of any of these arguments, by name: `gm` or `graph`, `ctx`, `graph_id`,
            `graph_order`, `profiling_results`, `create_inputs_fn`, `mem_budget`, `param_manager`,
            `bwd`, `ds_optimizer`, `nz3`. It returns the graph, the graph module, a number of edits,
            or None for no change. A `GraphPass` is taken as well. Memory in `profiling_results` is all that a step
            has on the device, as planned, and `mem_budget` is what it may have: the one minus the other is what
            `nz3.set_persistent` may keep. More is an error that names the weights.
        contract: what it needs and gives.

    Raises:
        PassOrderError: the name is one of torchloom's.
        PassError: the function has a parameter that no form of a pass has.

    Example:
        >>> register_compile_pass("count", lambda graph, bwd: None)
    """
    REGISTRY.register(name, fn, contract)


def _made(
    name: str, fn: Callable[..., Any] | GraphPass, contract: PassContract | None
) -> GraphPass:
    if isinstance(fn, str) or not (isinstance(fn, GraphPass) or callable(fn)):
        raise PassError(f"pass {name!r} is a {type(fn).__name__}: register a function")
    made = (
        fn
        if isinstance(fn, GraphPass)
        else GraphPass(name=name, fn=adapt(name, fn), stage="lowered")
    )
    if made is fn and contract is None:
        return replace(made, name=name)
    given = contract or PassContract()
    return replace(
        made,
        name=name,
        provides=_ours(given.provides),
        requires=_ours(given.requires),
        conflicts_with=frozenset(ALIASES.get(each, each) for each in given.conflicts_with),
    )


def _ours(words: Iterable[str]) -> frozenset[str]:
    return frozenset(_CAPABILITIES.get(word, word) for word in words)


def _function_of(each: GraphPass) -> object:
    return each.fn.fn if isinstance(each.fn, Adapted) else each.fn


PRESETS: dict[int, tuple[str, ...]] = {
    0: ("chunk_loss", "dedupe_gathers", "elide_copies", "place", "bucket", "prefetch"),
    1: ("chunk_loss", "dedupe_gathers", "elide_copies", "zero1", "place", "bucket", "prefetch"),
    2: (
        "chunk_loss",
        "dedupe_gathers",
        "elide_copies",
        "cast_gathers",
        "zero2",
        "place",
        "selective_gather",
        "bucket",
        "prefetch",
    ),
    3: (
        "chunk_loss",
        "dedupe_gathers",
        "elide_copies",
        "cast_gathers",
        "zero3",
        "symmetric_gathers",
        "place",
        "selective_gather",
        "bucket",
        "prefetch",
    ),
}

# Names that DeepSpeed's schedules and config files use for what these passes do.
ALIASES: dict[str, str] = {
    **RENAMED,
    "zero1_compile": "zero1",
    "zero2_compile": "zero2",
    "zero3_compile": "zero3",
    "offload_adam_states": "offload_opt_states",
    "move_opt_states": "offload_opt_states",
}

# DeepSpeed's functions of `deepspeed.compile.passes`, where these have other names than their passes.
FUNCTIONS: dict[str, str] = {
    "add_z1_reduce": "zero1_compile",
    "add_z2_reduce": "zero2_compile",
    "add_z3_gather_release": "zero3_compile",
    "schedule_prefetch": "prefetch",
    "offload_parameter_fwd": "offload_parameters",
}

# Passes over the joint graph, and the one that finishes their work on the split graphs.
SECOND_HALF: dict[str, str] = {
    "offload_parameters": "overlap_copies",
    "offload_activation": "overlap_copies",
    "free_activation": "free_saved",
}

# DeepSpeed's `zero3_compile` stands for several passes of torchloom over losses, gathers and reductions;
# a list that names `bucket` or `chunk_loss` chooses its place, and its options, itself.
BASIS: tuple[str, ...] = ("chunk_loss", "dedupe_gathers", "elide_copies", "cast_gathers")
COMMUNICATION: dict[str, tuple[str, ...]] = {
    "zero1": ("place", "bucket"),
    "zero2": ("place", "bucket"),
    "zero3": ("symmetric_gathers", "place", "bucket"),
}

PassOptions = dict[str, dict[str, object]]
"""Options by the name of the pass."""

_BOXED = ("inductor", "aot_eager", "eager")
"""Routes whose code takes its inputs in a list that it empties."""


def derived_options(
    layout: Layout | None, backend: str | Callable[..., Any], network: Network
) -> PassOptions:
    """Return the options that no setting gives.

    Args:
        layout: how the model is sharded; None for graphs of a model that is not.
        backend: what the woven graphs are compiled with.
        network: what carries the collectives.
    """
    found: PassOptions = {"free_saved": {"keeps_inputs": backend not in _BOXED}}
    if layout is not None:
        found |= default_sizes(layout, network)
        found["zero1"] = {"params": _names(spec.name for spec in layout if spec.is_sliced)}
        found["offload_parameters"] = {"params": offloadable_params(layout)}
    return found


def offloadable_params(layout: Layout) -> tuple[str, ...]:
    """Return the names of the parameters whose shards can wait on the host: all that are sharded."""
    return _names(spec.name for spec in layout.sharded)


def joined_options(*parts: Mapping[str, Mapping[str, object]]) -> PassOptions:
    """Return all options; where two parts name the same one, the later part wins."""
    found: PassOptions = {}
    for part in parts:
        for name, options in part.items():
            found[name] = {**found.get(name, {}), **options}
    return found


def option_of(passes: Mapping[str, GraphPass], name: str, option: str) -> Any:
    """Return the value of a pass's option; the default if the pass does not run.

    Args:
        passes: those that run, by name.
        name: of the pass.
        option: its keyword.
    """
    return passes.get(name, PASSES[name]).option(option)


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
