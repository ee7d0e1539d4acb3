"""A model made ready for every call that its contract allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchloom.errors import ContractError, ServeError
from torchloom.events import ProgramReady, emit
from torchloom.serve.attributes import unwatch_attributes, watch_attributes
from torchloom.serve.box import Box
from torchloom.serve.bypass import bypassed
from torchloom.serve.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.entry import Run, make_entry
from torchloom.serve.facts import Facts, Sources, changed_facts
from torchloom.serve.target import Target

if TYPE_CHECKING:
    from torchloom.serve.prove import Verdict

OutOfRange = Literal["raise", "eager"]


@dataclass
class Variant:
    """The program for a box of sizes."""

    box: Box
    without: frozenset[str]
    """Paths of optional tensors that are None."""
    run: Run
    """Takes what the model's forward takes, the model first."""
    facts: Facts
    sources: Sources
    verdicts: tuple[Verdict, ...] = ()
    """What was assumed of sizes, and that it holds; none for a program that was loaded."""
    pieces: tuple[str, ...] = ()
    """Digests of the graphs that it calls, equal ones once."""
    num_calls: int = 1
    """How many graphs run in a call."""
    writes: bool = False
    """Whether it may write to its arguments or to buffers."""
    told: tuple[str, ...] = ()
    """What the verdicts were, for a program that was loaded."""
    stored: dict[str, Any] = field(default_factory=dict)
    """What a store needs to make it again."""
    why_not_stored: str = ""

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was assumed of sizes, in words."""
        return self.told or tuple(map(str, self.verdicts))


@dataclass
class State:
    """What sends calls off the short way."""

    is_stale: bool = False
    """An attribute of the model was set since its facts were last checked."""


class Program:
    """What `build` and `load` return: called like the model.

    Example:
        >>> import torchloom
        >>> from torchloom.serve import Contract, Dim, build
        >>> batch = Dim("batch", 1, 8)
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> program = build(model, Contract({"input": (batch, 4)}), backend="eager")
        >>> with torch.no_grad():
        ...     program(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        target: Target,
        contract: Contract,
        variants: Sequence[Variant],
        *,
        out_of_range: OutOfRange = "raise",
        key: str = "",
        origin: str = "built",
        seconds: float = 0.0,
    ) -> None:
        self.target = target
        self.contract = contract
        self.variants = list(variants)
        self.out_of_range = out_of_range
        self.key = key
        """Its name in a store."""
        self.origin = origin
        """"built" or "loaded"."""
        self.seconds = seconds
        """How long that took."""
        self.state = State()
        self.is_frozen = False
        self._entry = self._make_entry()
        self._tell()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for these arguments.

        Raises:
            ContractError: the call breaks the contract, or the model has changed, and `out_of_range`
                is "raise".
        """
        return self._entry(*args, **kwargs)

    @property
    def entry(self) -> Run:
        """The generated function that calls go through; `entry.source` is its text."""
        return self._entry

    def variant_for(self, **sizes: int) -> Variant:
        """Return the program that runs for given sizes.

        Raises:
            ContractError: none does.
        """
        for variant in self.variants:
            if sizes in variant.box:
                return variant
        raise ContractError(f"no program is for {sizes}: the contract is {self.contract}")

    def freeze(self) -> Program:
        """Notice from now on when an attribute of the model is set, and return the program.

        Nothing is ever compiled by a call, frozen or not.
        """
        if self.target.module is not None and not self.is_frozen:
            watch_attributes(self.target.module, self._note)
        self.is_frozen = True
        return self

    def unfreeze(self) -> None:
        """Undo `freeze`."""
        if self.target.module is not None:
            unwatch_attributes(self.target.module)
        self.is_frozen = False

    def changed(self) -> list[str]:
        """Say what of the model is no longer what was compiled, one line each."""
        lines: list[str] = []
        for variant in self.variants:
            scope = self.target.scope(self.contract.blank(variant.box.largest, variant.without))
            for line in changed_facts(variant.facts, scope):
                if line not in lines:
                    lines.append(line)
        return lines

    def _tell(self) -> None:
        emit(
            ProgramReady(
                model=self.target.name,
                origin=self.origin,
                key=self.key,
                contract=str(self.contract),
                seconds=self.seconds,
                boxes=tuple(map(_shown, self.variants)),
                num_calls=tuple(variant.num_calls for variant in self.variants),
                num_graphs=len({digest for each in self.variants for digest in each.pieces}),
                verdicts=tuple(
                    dict.fromkeys(
                        f"{variant.box}: {text}"
                        for variant in self.variants
                        for text in variant.assumed
                    )
                ),
            )
        )

    def _note(self) -> None:
        self.state.is_stale = True

    def _make_entry(self) -> Run:
        """Return the entries of all patterns of optional arguments, each passing on what it is not for."""
        entry: Run | None = None
        patterns = sorted({variant.without for variant in self.variants}, key=sorted, reverse=True)
        for without in patterns:
            rows = [(each.box, each.run) for each in self.variants if each.without == without]
            slow = self._slow if entry is None else _passed_on(entry)
            writes = any(each.writes for each in self.variants)
            entry = make_entry(
                self.target, self.contract, rows, without, self.state, slow, writes=writes
            )
        if entry is None:
            raise ServeError("a program needs at least one variant")
        return entry

    def _slow(self, args: dict[str, Any]) -> Any:
        """Find out why a call did not pass, and do what `out_of_range` says."""
        try:
            self._explain(args)
        except ContractError:
            if self.out_of_range == "raise":
                counter.num_refused_calls += 1
                raise
            counter.num_eager_calls += 1
            return self._eager(args)
        return _passed_on(self._entry)(args)  # an attribute was set to what it was before

    def _eager(self, args: dict[str, Any]) -> Any:
        several = [args.pop(name) for name in list(args) if name.startswith("*")]
        with bypassed():
            return self.target.call(*itertools.chain(*several), **args)

    def _explain(self, args: dict[str, Any]) -> None:
        if self.state.is_stale:
            changed = self.changed()
            if changed:
                raise ContractError(
                    f"the model has changed since it was compiled: {'; '.join(changed[:4])}: build it "
                    "again, or set it back"
                )
            self.state.is_stale = False
            return
        self.contract.sizes_of(args)
        self._explain_rest(args)

    def _explain_rest(self, args: dict[str, Any]) -> None:
        contract, module = self.contract, self.target.module
        if contract.grad == "inference" and not torch.is_inference_mode_enabled():
            raise ContractError("the contract wants calls under torch.inference_mode()")
        if contract.grad == "no_grad" and torch.is_grad_enabled():
            raise ContractError(
                "the contract wants calls under torch.no_grad() or inference_mode()"
            )
        if contract.grad == "grad" and not torch.is_grad_enabled():
            raise ContractError(
                "the contract wants calls with gradients, under torch.enable_grad()"
            )
        if any(map(torch.is_autocast_enabled, self.target.device_types(contract))):
            raise ContractError(
                "the program was built without autocast, and the call is under it: enter autocast in the "
                "model's forward, where it becomes part of the program"
            )
        if module is not None and module.training is not contract.training:
            wanted = "train()" if contract.training else "eval()"
            raise ContractError(
                f"the contract wants the model in another mode: call model.{wanted}"
            )
        self._explain_twice(args)
        known = {*contract.args, *contract.fixed}
        defaults = {p.name: p.default for p in self.target.parameters_for(contract)}
        for name, value in args.items():
            if name in known:
                continue
            if name.startswith("*"):
                if value:
                    raise ContractError(
                        f"{len(value)} more positional arguments are in no contract"
                    )
            elif name not in defaults:
                raise ContractError(f"{name!r} is in no contract: name it in `args` or `fixed`")
            elif value is not defaults[name]:
                raise ContractError(
                    f"{name!r} is {value!r}, the program is for its default {defaults[name]!r}: name it "
                    "in the contract's `fixed`"
                )
        raise ContractError(
            f"the call is none that the program was built for: the contract is {contract}, and tensors "
            "have to be plain ones"
        )

    def _explain_twice(self, args: dict[str, Any]) -> None:
        """Refuse a tensor that is two arguments of a program that writes."""
        if not any(variant.writes for variant in self.variants):
            return
        seen: dict[int, str] = {}
        for name, value in args.items():
            if isinstance(value, torch.Tensor) and id(value) in seen:
                raise ContractError(
                    f"{seen[id(value)]!r} and {name!r} are one tensor, and the program may write to it: pass "
                    "a clone() of it as one of them"
                )
            seen[id(value)] = name


def _shown(variant: Variant) -> str:
    without = f", without {', '.join(sorted(variant.without))}" if variant.without else ""
    return f"{variant.box}{without}"


def _passed_on(entry: Run) -> Callable[[dict[str, Any]], Any]:
    def slow(args: dict[str, Any]) -> Any:
        several = [args.pop(name) for name in list(args) if name.startswith("*")]
        return entry(*itertools.chain(*several), **args)

    return slow
