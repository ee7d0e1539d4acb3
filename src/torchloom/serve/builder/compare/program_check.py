"""Checks that a program is its model: compared at the edges of its box, and where floats vary at values of these.

Where a program differs, either the size is one at which the model behaves in its own way, and gets a program of its
own, or there is another cause, which is told: forward changes what it reads, or it draws random numbers.

Models whose calls change what the next call reads are refused. A trace reads `self.n` once, so a program does in each
call what the first one did. The model is called, and what its programs were traced from is compared again. Where it has
changed, model and program are called twice in a row with other arguments: a constant that the first call makes
(`if self.cos is None: self.cos = ...`) gives the same in both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import product
from typing import Any

import torch

from torchloom.errors import ProofError, ServeError
from torchloom.serve.builder.compare.compare import (
    call_model,
    call_program,
    copied_args,
    differences_at,
    is_random,
)
from torchloom.serve.builder.compare.differences import Difference, first_difference
from torchloom.serve.builder.prove import show_sizes
from torchloom.serve.call.variant import Variant
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.facts import changed_facts
from torchloom.serve.model.snapshot import ModelSnapshot
from torchloom.serve.model.target import Target, gradient_mode_of


def difference_in_box(
    target: Target, contract: Contract, variant: Variant
) -> tuple[dict[str, Any], Difference] | None:
    """Return the first sizes at which a program differs from the model, and in what; None if there are none.

    Args:
        target: the model; it is what it was before.
        contract: what arguments look like.
        variant: the program.

    Raises:
        ServeError: the model fails, or changes what it reads.
        ProofError: the model draws random numbers.
    """
    for sizes in _trials(contract, variant.box):
        with gradient_mode_of(contract):
            found = differences_at(target, contract, variant.run, sizes, variant.without)
        if found is None:
            continue
        refuse_changed(target, contract, variant)
        with gradient_mode_of(contract):
            draws = found.is_of_values and is_random(target, contract, sizes, variant.without)
        if draws:
            raise ProofError(
                f"compiled for {variant.box}, {target.name} differs from itself run eagerly at "
                f"{show_sizes([sizes])}: {found}. It draws random numbers (as dropout does in training), and compiled "
                "code draws others than eager code for the same seed: options={'fallback_random': True} lets it draw "
                "the same ones, check='off' leaves the comparison out"
            )
        return sizes, found
    return None


def _trials(contract: Contract, box: Box) -> Iterator[dict[str, Any]]:
    """Yield sizes, and floats that vary, at which a program is compared with the model."""
    floats, draw = contract.floats(), random.Random(0)
    if not floats:
        yield from box.edges()
        return
    values = [each.trials(draw) for each in floats]
    edges = list(box.edges())
    for number in range(max(len(edges), *map(len, values))):
        chosen = {
            each.path: its[number % len(its)] for each, its in zip(floats, values, strict=True)
        }
        yield {**edges[number % len(edges)], **chosen}


Lines = AbstractSet[str]
"""What differs from what was traced, in words."""


def check_state(target: Target, contract: Contract, variants: Sequence[Variant]) -> None:
    """Refuse a model whose calls change what its programs were traced from.

    Args:
        target: the model; it is what it was before.
        contract: what arguments look like.
        variants: all of its programs.

    Raises:
        ServeError: they do, in a way that the second of two calls shows; or the model itself fails.
    """
    for first in variants:
        if lines := _changed_by(target, contract, first, variants):
            for second in variants:
                if not _is_settled(target, contract, (first, second), variants):
                    raise _refusal(lines)


def refuse_changed(target: Target, contract: Contract, variant: Variant) -> None:
    """Refuse a model of which building itself has changed what a program was traced from.

    Args:
        target: the model; it is what it was before.
        contract: what arguments look like.
        variant: the program.

    Raises:
        ServeError: something could not be put back.
    """
    if lines := _lines(target, contract, [variant], contract.fixed):
        raise _refusal(lines)


def _refusal(lines: Lines) -> ServeError:
    shown = sorted(lines)
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ServeError(
        f"forward changes what it reads: {'; '.join(shown[:3])}{more} after a call. A program does in each call what "
        "it did when it was traced: keep what calls hand on in a buffer that is written in place, or set it outside of "
        "forward"
    )


def _changed_by(
    target: Target, contract: Contract, first: Variant, variants: Sequence[Variant]
) -> Lines:
    """Return what a call of the model changes of what programs were traced from."""
    args = contract.example(first.box.largest, without=first.without)
    before = ModelSnapshot(target)
    copies = copied_args(target, args)
    try:
        call_model(target, copies)
        found = _lines(target, contract, variants, copies)
    finally:
        before.restore()
    # What was another thing before the call already says nothing of it.
    return found and found - _lines(target, contract, variants, copied_args(target, args))


def _is_settled(
    target: Target,
    contract: Contract,
    pair: tuple[Variant, Variant],
    variants: Sequence[Variant],
) -> bool:
    """Say whether a second call changes nothing more, and is the program's second call."""
    first, second = pair
    for sizes in product(_ends(first), _ends(second)):
        given = [
            contract.example(chosen, seed, without=each.without)
            for seed, (each, chosen) in enumerate(zip(pair, sizes, strict=True))
        ]
        before = ModelSnapshot(target)
        try:
            copies = _copied_in_a_row(target, contract, given)
            call_model(target, copies[0])
            once = _lines(target, contract, variants, copies[0])
            wanted = call_model(target, copies[1], 1)
            if _lines(target, contract, variants, copies[1]) != once:
                return False
            before_program = before.written()
            before.restore()
            copies = _copied_in_a_row(target, contract, given)
            call_program(first.run, target, copies[0])
            found = call_program(second.run, target, copies[1], 1)
            after = before.written()
            if first_difference(wanted, found, "result") or first_difference(
                _now(before_program), _now(after), "written"
            ):
                return False
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # noqa: BLE001 - forward may raise anything for what the first call left
            return False
        finally:
            before.restore()
    return True


def _copied_in_a_row(
    target: Target, contract: Contract, given: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return copies of the arguments of calls in a row, which get the same objects where these are fixed."""
    first, *rest = (copied_args(target, args) for args in given)
    fixed = {name: first[name] for name in contract.fixed}
    return [first, *({**args, **fixed} for args in rest)]


def _now(written: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {name: now for name, (_, now) in sorted(written.items())}


def _ends(variant: Variant) -> Iterator[dict[str, int]]:
    least = {dim.name: dim.min for dim in variant.box.dims}
    yield least
    if least != variant.box.largest:
        yield variant.box.largest


def _lines(
    target: Target, contract: Contract, variants: Sequence[Variant], given: Mapping[str, Any]
) -> Lines:
    """Return what differs from what programs were traced from.

    Args:
        target: the model.
        contract: what arguments look like.
        variants: the programs; those of one trace share its facts.
        given: arguments of a call; those that the contract fixes are looked at.
    """
    found: set[str] = set()
    for each in {id(variant.facts): variant for variant in variants}.values():
        blank = contract.blank(each.box.largest, each.without)
        scope = target.scope({**blank, **{name: given[name] for name in contract.fixed}})
        found.update(changed_facts(each.facts, scope))
    return found
