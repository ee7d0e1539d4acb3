"""The memory of a step that Inductor compiled: its wrapper code, replayed without data.

Inductor fuses operators, lets results take the place of dead inputs, and orders its kernels: the
captured graph does not show what it allocates. The wrapper that it wrote does, line by line. It is
run on fake tensors with kernels that do nothing; a ledger adds what is allocated and subtracts what
Python's reference counts free.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchloom._torch.tensors import fake_mode, size_hint
from torchloom.graph import value_of
from torchloom.memory.ledger import Ledger, maker_of
from torchloom.memory.micro_step import RESULTS, is_kept
from torchloom.memory.storages import Transit, Weight, distinct_bytes, outputs_of
from torchloom.memory.workspace import WorkspaceTable
from torchloom.pieces.wrapper import load_wrapper

_TANGENT = "tangents"


@dataclass(frozen=True, slots=True)
class Interface:
    """What goes into and comes out of the two graphs of a step, without the graphs.

    Args:
        inputs: values of forward's inputs.
        outputs: names of forward's outputs, None for those that are no values.
        roles: of forward's outputs: the type names of AOTAutograd's descriptors.
        saved: names of backward's inputs.
        tangents: values of those of backward's inputs that forward does not make, by name.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[str | None, ...]
    roles: tuple[str, ...]
    saved: tuple[str, ...]
    tangents: dict[str, Any]


def interface_of(forward: fx.Graph, backward: fx.Graph) -> Interface:
    """Read the interface of split graphs before a compiler rewrites them."""
    placeholders = list(backward.find_nodes(op="placeholder"))
    outputs = outputs_of(forward)
    names = [node.name if isinstance(node, fx.Node) else None for node, _ in outputs]
    known = set(names)
    return Interface(
        inputs=tuple(_like(value_of(n)) for n in forward.find_nodes(op="placeholder")),
        outputs=tuple(names),
        roles=tuple(role for _, role in outputs),
        saved=tuple(node.name for node in placeholders),
        tangents={n.name: _like(value_of(n)) for n in placeholders if n.name not in known},
    )


def replay_peak(
    forward: str,
    backward: str,
    interface: Interface,
    workspaces: WorkspaceTable,
    transit: Transit | None = None,
    fetched: Collection[str] = (),
    *,
    is_recorded: bool = False,
) -> int | None:
    """Return the highest sum of bytes that a step allocates above what was live before it.

    Args:
        forward: the wrapper's source, see `load_wrapper`.
        backward: likewise.
        interface: of the graphs that they were made of.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        transit: what the transport holds besides results.
        fetched: parameters whose shards wait on the host.
        is_recorded: see `micro_step`.

    Returns:
        None where a wrapper is of a form that cannot be replayed.
    """
    refreshes: dict[Weight, int] = {}
    copied_bytes = 0
    for _ in range(2):  # the second time with what the first has met: operators, weights to gather
        ledger = Ledger(workspaces, transit, fetched=fetched, refreshes=refreshes)
        found_bytes = _replay(forward, backward, interface, ledger, is_recorded=is_recorded)
        if found_bytes is None:
            return None
        copied_bytes = found_bytes
        if transit is not None:
            found = transit.regathered_bytes(list(ledger.uses.values()))
            refreshes = dict(zip(ledger.uses, found, strict=True))
        if not workspaces.probe_calls(ledger.calls) and not any(refreshes.values()):
            break
    return ledger.peak_bytes + copied_bytes


def _like(value: Any) -> Any:
    if isinstance(value, Tensor):
        return maker_of(value)
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _made(value: Any) -> Any:
    return value() if isinstance(value, functools.partial) else value


def _replay(
    forward: str, backward: str, interface: Interface, ledger: Ledger, *, is_recorded: bool
) -> int | None:
    """Run both wrappers; return the bytes that a recording of them copies in and out, None where they cannot run."""
    run_forward = load_wrapper(forward, ledger.extern)
    run_backward = load_wrapper(backward, ledger.extern)
    if run_forward is None or run_backward is None:
        return None
    with fake_mode():
        inputs = [_made(each) for each in interface.inputs]
        ledger.ignore(inputs)
        try:
            with ledger:
                made = list(run_forward(list(inputs)))
                results = [
                    each
                    for each, role in zip(made, interface.roles, strict=True)
                    if role in RESULTS
                ]
                by_name = dict(zip(interface.outputs, made, strict=True))
                saved = made if is_recorded else []
                del made
                args, roots, seeds_bytes = [], [], 0
                for name in interface.saved:
                    value = by_name[name] if name in by_name else _made(interface.tangents[name])
                    if name.startswith(_TANGENT) and isinstance(value, Tensor) and is_kept(value):
                        roots.append(value)
                    seeds_bytes += distinct_bytes([value]) if name.startswith(_TANGENT) else 0
                    args.append(value)
                del by_name, value
                gradients = run_backward(args)
                ledger.settle()
                copied_bytes = seeds_bytes + distinct_bytes([*results, *gradients])
                del gradients, results, roots, saved
        except (RuntimeError, TypeError, NameError, AttributeError, ValueError, KeyError):
            return None  # a helper of the wrapper that is not known here
    return copied_bytes if is_recorded else 0
