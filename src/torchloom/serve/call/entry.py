"""The function that a call goes through: a few comparisons, then the program for its sizes.

It is generated from the contract. For `Contract({"x": (Dim("batch", 1, 64), 16)})`:

    def _torchloom_checked(given_x):
        try:
            given_passes = (
                type(given_x) in PLAIN and len(s_given_x := given_x.shape) == 2 and given_x.dtype is dtype1 and given_x.is_cpu
                and 1 <= (n_batch := s_given_x[0]) <= 64 and s_given_x[1] == 16 and given_x.is_contiguous()
                and not is_grad_enabled() and STATE.holds()
            )
        except (AttributeError, KeyError, IndexError, TypeError, RuntimeError):
            given_passes = False
        if given_passes:
            if is_eager():
                return EAGER({'x': given_x})
            try:
                return table2[n_batch - 1](MODEL, given_x)
            except FAILURES as _error:
                return FAILED(_error, {'x': given_x})
        return SLOW({'x': given_x})
    def entry(x):
        return _torchloom_checked(x)

Whatever does not pass goes to `SLOW`, which finds out why, in words. `EAGER` runs the model as it is. `FAILED` finds out whether a program failed as
the model is another one now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchloom._torch.untraced import leave_alone
from torchloom.serve.call.conditions import Asked, conditions_of
from torchloom.serve.call.eager import is_eager
from torchloom.serve.call.entry_signature import EntrySignature
from torchloom.serve.call.weight_checks import OtherTensorsError
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.conditions import (
    UNLIKE,
    Condition,
    SpecConditions,
    put,
    why_refused,
)
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.target import Target

Run = Callable[..., Any]
Row = tuple[Box, Run, Sequence[str]]
_FAILURES = (OtherTensorsError, AttributeError, KeyError, IndexError, TypeError)
"""What programs raise that fetch weights from a model which is another one now."""
_MOST_TABLE = 1 << 16
"""Sizes that are looked up in a list; beyond, they are compared."""


class Otherwise(NamedTuple):
    """What calls go to that no program answers."""

    eager: Callable[[dict[str, Any]], Any]
    """Takes the arguments by name, of a call that passes while the model is to run as it is."""

    slow: Callable[[dict[str, Any]], Any]
    """Takes the arguments by name, of a call that does not pass."""
    failed: Callable[[Exception, dict[str, Any]], Any]
    """Takes an error that a program raised, and the arguments by name."""


def make_entry(
    target: Target,
    contract: Contract,
    variants: Sequence[Row],
    without: frozenset[str],
    state: Any,
    otherwise: Otherwise,
    *,
    writes: bool = False,
    asked: Asked = (),
) -> Run:
    """Return the function for calls.

    Args:
        target: what is served.
        contract: what calls have to look like.
        variants: programs, the sizes that they are for, and what is asked of sizes at each call; the first
            that covers a call runs. Without any, all calls go to `otherwise.slow`.
        without: paths of optional tensors that are None in these programs.
        state: of the model, a `LiveModel`. Calls go to `otherwise.slow` where
            `holds` says no, where `next_hook` is not the number of the process's next hook, and where the number
            of torch's function modes is not `num_modes`.
        otherwise: what calls go to that no program answers.
        writes: whether programs write to tensors: no argument may then be passed twice.
        asked: what programs rely on of arguments beside their tensors.
    """
    scope: dict[str, Any] = {"STATE": state}
    scope |= {"SLOW": otherwise.slow, "FAILED": otherwise.failed, "FAILURES": _FAILURES}
    scope |= {"EAGER": otherwise.eager, "is_eager": is_eager}
    scope["MODEL"] = target.owner
    signature = EntrySignature(target, contract, scope)
    specs = SpecConditions(scope, without)
    asks = conditions_of(target, contract, signature, specs, scope, writes=writes, asked=asked)
    own = ["HANDLE.next_id == STATE.next_hook", "STATE.holds()"]
    conditions = [*(each.text for each in asks), *own] if variants else ["False"]
    programs = _dispatch(contract, variants, signature.call(), specs.sizes, scope)
    text = _text(signature, conditions, programs)
    exec(compile(text, "<torchloom entry>", "exec"), scope)
    entry = scope["entry"]
    leave_alone(entry, "programs of torchloom.serve are compiled already")
    entry.source = text
    entry.why_refused = partial(_why_refused, signature, asks, specs.sizes, scope)
    return entry


def _why_refused(
    signature: EntrySignature,
    asks: Sequence[Condition],
    sizes: Mapping[str, str],
    scope: dict[str, Any],
    args: Mapping[str, Any],
) -> tuple[str, dict[str, Any]]:
    """Return why a call does not pass, nothing if it does, and what the conditions name."""
    values = signature.values(args)
    refusal = why_refused(asks, scope, values)
    return refusal, values


def _text(signature: EntrySignature, conditions: Sequence[str], programs: Sequence[str]) -> str:
    """Return the text of an entry.

    Args:
        signature: of the entry.
        conditions: for its programs to run.
        programs: the lines that pick and run one.
    """
    by_name = signature.by_name()
    # What is not there, a weight that was deleted for one, is for `slow` to name.
    lines = [
        f"def _torchloom_checked({', '.join(signature.given.values())}):",
        "    try:",
        f"        given_passes = {' and '.join(conditions)}",
        f"    except ({', '.join(each.__name__ for each in UNLIKE)}):",
        "        given_passes = False",
        "    if given_passes:",
        "        if is_eager():",
        f"            return EAGER({by_name})",
        "        try:",
        *(f"            {line}" for line in programs or ["pass"]),
        "        except FAILURES as _error:",
        f"            return FAILED(_error, {by_name})",
        *(
            f"    if {signature.given[name]} is MISSING:\n        raise TypeError(\"missing argument: '{name}'\")"
            for name in signature.missing
        ),
        f"    return SLOW({by_name})",
        f"def entry({signature.text}):",
        f"    return _torchloom_checked({', '.join(signature.given)})",
    ]
    return "\n".join(lines)


def _dispatch(
    contract: Contract,
    variants: Sequence[Row],
    call: str,
    sizes: Mapping[str, str],
    scope: dict[str, Any],
) -> list[str]:
    """Return the lines that pick and run a program.

    Args:
        contract: what varies.
        variants: the programs.
        call: the arguments of a program, as text.
        sizes: the variable that holds each varying size.
        scope: gets the programs.
    """
    varying = [dim for dim in contract.dims.values() if dim.min < dim.max]
    checked = any(checks for *_, checks in variants)
    is_short = len(varying) == 1 and len(varying[0].sizes) <= _MOST_TABLE
    if is_short and len(variants) > 1 and not checked:
        dim = varying[0]
        fixed = {each.name: each.min for each in contract.dims.values()}
        table = [
            next((run for box, run, _ in variants if {**fixed, dim.name: size} in box), None)
            for size in dim.sizes
        ]
        if None not in table:
            at = f"{sizes[dim.name]} - {dim.min}" if dim.min else sizes[dim.name]
            at = f"({at}) // {dim.multiple_of}" if dim.multiple_of > 1 else at
            return [f"return {put(scope, 'table', table)}[{at}]({call})"]
    scope |= {"math": math, "torch": torch}
    lines = []
    for box, run, checks in variants:
        tests = [
            f"{sizes[d.name]} == {d.min}"
            if d.min == d.max
            else f"{d.min} <= {sizes[d.name]} <= {d.max}"
            for d in box.dims
            if d != contract.dims[d.name]
        ]
        tests += [f"({check})" for check in checks]
        target = f"return {put(scope, 'run', run)}({call})"
        lines += [f"if {' and '.join(tests)}:", f"    {target}"] if tests else [target]
        if not tests:
            break
    return lines
