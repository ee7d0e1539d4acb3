"""A program: the model compiled for every call that its contract allows."""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from torchloom._torch.modes import function_modes, num_function_modes
from torchloom.errors import ContractError, ServeError
from torchloom.events import ProgramReady, emit
from torchloom.serve.call.eager import eager, is_eager, why_eager
from torchloom.serve.call.entry import Otherwise, Run, make_entry
from torchloom.serve.call.live_model import LiveModel, next_hook, writes_state
from torchloom.serve.call.variant import Variant, shown_variant
from torchloom.serve.call.warm_up import record_sizes
from torchloom.serve.call.weight_checks import ChangedError, OtherTensorsError
from torchloom.serve.contract.conditions import argument_at
from torchloom.serve.contract.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.model.facts import changed_facts
from torchloom.serve.model.target import Target

log = logging.getLogger(__name__)

OutOfRange = Literal["raise", "eager"]


class Program:
    """What `build` and `load` return: called like the model.

    Args:
        target: the model.
        contract: what calls have to look like.
        variants: the programs for boxes of sizes; the first one that covers a call runs.
        out_of_range: what a call outside of the contract does.
        key: its name in a store.
        origin: "built" or "loaded".
        seconds: how long that took.
        enforced: why it has no variants, and calls run the model as it is: compiling was turned off when it was built
            or loaded.

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
        enforced: str = "",
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
        self._enforced = enforced
        self.folder: Path | None = None
        """The store that holds it."""
        self.live = LiveModel(target, (each.facts for each in self.variants))
        self._own_writes: set[str] = set()
        """Facts that runs of the program itself make another thing."""
        self._default_device = torch.get_default_device()
        self._entries: dict[frozenset[str], Any] = {}
        """By which optional tensors are None; each passes on what it is not for."""
        self._entry = self._make_entry()
        self._tell()
        if enforced:
            log.info("%s runs as it is: %s", target.name, enforced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for these arguments.

        Raises:
            ContractError: the call breaks the contract, or the model has changed, and `out_of_range`
                is "raise".
        """
        return self._entry(*args, **kwargs)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model as it is for these arguments, as a call within `torchloom.serve.eager()` does.

        Contract and changes of the model are not looked at; arguments that the contract fixes need not be passed.
        """
        with eager():
            return self._entry(*args, **kwargs)

    @property
    def why_eager(self) -> str:
        """Why a call would run the model as it is; empty if it would not."""
        return self._enforced or why_eager()

    def __repr__(self) -> str:
        if self._enforced:
            return f"Program of {self.target.name}, not compiled ({self._enforced}): calls run the model as it is"
        lines = [
            f"{shown_variant(v)}: {v.num_calls} pieces, {len(v.pieces)} different"
            for v in self.variants
        ]
        place = f"stored in {self.folder} as {self.key}" if self.folder else "not stored"
        head = f"Program of {self.target.name}, {self.origin} in {self.seconds:.1f} s, {place}"
        return "\n  ".join([head, *lines])

    @property
    def entry(self) -> Run:
        """The generated function that calls go through; `entry.source` is its text."""
        return self._entry

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """Return a program of a copy of the model, with weights of its own.

        Raises:
            ServeError: it is recorded as CUDA graphs, which read these weights wherever they are.
        """
        if any(variant.recorded for variant in self.variants):
            raise ServeError(
                "a program with CUDA graphs cannot be copied: build one for the copied model"
            )
        call, owner = self.target.call, self.target.owner
        if owner is not None:
            own: Any = copy.deepcopy(owner, memo)
            call = own if call is owner else getattr(own, self.target.function.__name__)
        return Program(
            Target(call),
            self.contract,
            self.variants,
            out_of_range=self.out_of_range,
            key=self.key,
            origin=self.origin,
            seconds=self.seconds,
            enforced=self._enforced,
        )

    def warm_up(self, **given: Any) -> None:
        """Record the CUDA graphs of all exact sizes before the first call; nothing else is changed by it.

        Args:
            given: arguments that calls pass at the same address each time, such as caches that the model
                writes to: their graphs are recorded for these. They hold afterwards what they held.

        Raises:
            ContractError: one is in no contract.
        """
        record_sizes(self.target, self.contract, self.variants, given)

    def changed(self) -> list[str]:
        """Say what of the model is no longer what was compiled, one line each."""
        lines: list[str] = []
        if Target(self.target.call).function is not self.target.function:
            lines.append(f"what a call of {self.target.name} runs is another function")
        for variant in self.variants:
            scope = self.target.scope(self.contract.blank(variant.box.largest, variant.without))
            found = changed_facts(variant.facts, scope)
            lines += [line for line in found if line not in lines]
        return lines

    def _tell(self) -> None:
        emit(
            ProgramReady(
                model=self.target.name,
                origin=self.origin,
                key=self.key,
                contract=str(self.contract),
                seconds=self.seconds,
                boxes=tuple(map(shown_variant, self.variants)),
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

    def _settling(self, run: Run, *programs: Run) -> Run:
        """Return a function that takes what it writes for no change of the model, if some programs write anything."""
        if not any(map(writes_state, programs)):
            return run

        @functools.wraps(run)
        def settling(*args: Any, **kwargs: Any) -> Any:
            found = run(*args, **kwargs)
            if not self.live.still_holds():
                self._own_writes |= set(map(_subject, self.changed()))
                self.live.drop_changed()
            return found

        return settling

    def _make_entry(self) -> Run:
        """Return the entries of all patterns of optional arguments, each passing on what it is not for."""
        entry: Run | None = None
        patterns = sorted({variant.without for variant in self.variants}, key=sorted, reverse=True)
        # What the model writes in a call that its programs answer is what these write: builds compare that.
        as_it_is = self._settling(self._eager, *(each.run for each in self.variants))
        for without in patterns or [frozenset()]:
            rows = [
                (each.box, self._settling(each.run, each.run), each.checks)
                for each in self.variants
                if each.without == without
            ]
            slow = self._slow if entry is None else partial(self._pass_on, entry)
            alike = [each for each in self.variants if each.without == without]
            entry = make_entry(
                *(self.target, self.contract, rows, without, self.live),
                Otherwise(as_it_is, slow, self._failed),
                writes=any(each.writes for each in self.variants),
                asked=[line for each in alike for line in each.asked],
            )
            self._entries[without] = entry
        assert entry is not None, "there is a pattern"
        return entry

    def _slow(self, args: dict[str, Any]) -> Any:
        """Find out why a call did not pass, and do what `out_of_range` says."""
        if self._enforced or is_eager():
            return self._eager(args)
        try:
            self._explain(args)
        except ContractError as refusal:
            return self._outside(refusal, args)
        return self._pass_on(self._entry, args)  # an attribute was set to what it was before

    def _pass_on(self, entry: Run, args: dict[str, Any]) -> Any:
        places, rest = self.target.divided(args)
        return entry(*places, **rest)

    def _failed(self, error: Exception, args: dict[str, Any]) -> Any:
        """Say that a program failed as the model has changed, or let the error go on."""
        changed = self.live.differences()
        if isinstance(error, OtherTensorsError):  # nothing has run
            return self._outside(ChangedError(changed) if changed else error, args)
        if not changed:
            raise error
        raise ChangedError(changed) from error

    def _outside(self, refusal: ContractError, args: dict[str, Any]) -> Any:
        """Do what `out_of_range` says of a call that no program answers."""
        if self.out_of_range == "raise":
            counter.num_refused_calls += 1
            raise refusal
        return self._eager(args)

    def _eager(self, args: dict[str, Any]) -> Any:
        counter.num_eager_calls += 1
        places, rest = self.target.divided(args)
        with eager():
            return self.target.call(*places, **rest)

    def _explain(self, args: dict[str, Any]) -> None:
        """Refuse a call that did not pass, or note what else let it fail: what changed reads the same."""
        live, number = self.live, next_hook()
        if number != live.next_hook:
            _refuse(live.differences())
            live.next_hook = number  # somebody else's hooks
        elif not live.still_holds():
            _refuse([line for line in self.changed() if _subject(line) not in self._own_writes])
            live.compare_anew()
        elif num_function_modes() != live.num_modes and not function_modes():
            if torch.get_default_device() != self._default_device:
                raise ContractError(
                    f"torch's default device is {torch.get_default_device()}, the program was made under "
                    f"{self._default_device}: build it again, or set it back"
                )
            live.num_modes = num_function_modes()
        else:
            self._refuse(args)

    def _refuse(self, args: dict[str, Any]) -> None:
        """Say why a call is none that a program was built for.

        Raises:
            ContractError: always.
        """
        without = frozenset(
            path
            for path, spec in self.contract.tensors()
            if spec.optional and argument_at(args, path) is None
        )
        entry: Any = self._entries.get(without, self._entry)
        refusal, values = entry.why_refused(args)
        if refusal:
            raise ContractError(refusal)
        sizes = {name: values[f"n_{name}"] for name in self.contract.dims}
        known = {name: each for name, each in values.items() if name[:2] in ("n_", "f_")}
        for variant in self.variants:
            if variant.without == without and sizes in variant.box:
                _refuse_sizes(variant, known)
        raise ContractError(
            f"the call is none that the program was built for: the contract is {self.contract}, and the programs are "
            f"for {'; '.join(map(shown_variant, self.variants))}"
        )


def _refuse_sizes(variant: Variant, known: dict[str, Any]) -> None:
    """Refuse sizes for which does not hold what was assumed of them and tried for some only."""
    for check in variant.checks:
        if not eval(
            check, {"math": math, "torch": torch}, known
        ):  # of the build, signed in a store
            there = ", ".join(f"{name.removeprefix('n_')} {size}" for name, size in known.items())
            said = re.sub(r"\bn_(\w+)", r"\1", check)
            raise ContractError(
                f"the program for {variant.box} assumes {said}, which held for all sizes that were tried and does "
                f"not for {there}: cut the contract there with `ranges`"
            )


def _subject(line: str) -> str:
    return line.partition(" was ")[0]


def _refuse(changed: Sequence[str]) -> None:
    if changed:
        raise ChangedError(changed)
