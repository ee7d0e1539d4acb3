"""The text of a failed proof: which condition on sizes fails, where it is in the code, and what can be done."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch

from torchloom.serve.builder.prove import ProofVerdict, show_sizes
from torchloom.serve.contract.box import Box
from torchloom.serve.model.target import Target


def why_not_proven(target: Target, box: Box, failed: Collection[ProofVerdict]) -> str:
    """Say what fails, for which sizes, where, and what can be done.

    Args:
        target: the model.
        box: the sizes that it was to be one program for.
        failed: the conditions that do not hold for all of them.
    """
    lines = [f"{target.name} is not the same program for all of {box}:"]
    for verdict in list(failed)[:5]:
        where = f"\n    at {verdict.where}" if verdict.where else ""
        lines.append(f"  not true for {show_sizes(verdict.failing)}: {verdict.guard}{where}")
    if len(failed) > 5:
        lines.append(f"  and {len(failed) - 5} more")
    lines.append(
        "Move the decision out of the model, hide it in an operator (torchloom.custom_op), leave these "
        "sizes out of the contract, or let shapes='split' compile the parts apart."
    )
    lines += multiples_to_promise("\n".join(lines))
    return "\n".join(lines)


def why_not_compiled(target: Target, box: Box, shapes: str, error: BaseException) -> str:
    """Say in one sentence what a compiler's error is about: its reason, operator, line, and what else may work."""
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), "")
    operator = re.search(r"^\s*target: (\S+)", text, re.MULTILINE)
    at = f" of {operator[1]}" if operator else ""
    at += _last_place(text)
    others = {
        "split": "cuts ranges where sizes differ",
        "unbacked": "assumes nothing of sizes",
        "bucket": "compiles exact sizes, and pads smaller calls",
    }
    ways = ", ".join(f"shapes={name!r} ({what})" for name, what in others.items() if name != shapes)
    return (
        f"{target.name} cannot be compiled for {box} with shapes={shapes!r} because{at} the compiler says "
        f"{type(error).__name__}: {reason[:300]}; {ways} may work, as may the operator in one of your own "
        "(torchloom.custom_op)"
    )


def decision_by_value(target: Target, error: BaseException) -> str:
    """Say in one sentence that a model decides by a number that a tensor holds; nothing where an error is about more."""
    text = str(error)
    decision = re.search(r"Could not guard on data-dependent expression (.+?) \(unhinted", text)
    if decision is None:
        return ""
    return (
        f"{target.name} decides by a number that a tensor holds{_last_place(text)} ({decision[1]}), and one program cannot "
        "go both ways: compute both and choose with torch.where, or give the number as an argument, which the contract "
        "describes by a Dim or number(low, high)"
    )


def _last_place(text: str) -> str:
    """Return the innermost line outside of torch that an error names."""
    places = [
        f"{path}:{line} in {function}"
        for path, line, function in re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
        if not path.startswith(_TORCH)
    ]
    return f" at {places[-1]}" if places else ""


_TORCH = str(Path(torch.__file__).parent)


def multiples_to_promise(text: str) -> list[str]:
    """Return the advice for conditions of torch's that ask whether a size is a multiple of a number."""
    numbers = dict.fromkeys(re.findall(r"Eq\(Mod\(\w+, (\d+)\), 0\)", text))
    return [
        f"If sizes are multiples of {number}, promise it: Dim(..., multiple_of={number})"
        for number in numbers
    ]
