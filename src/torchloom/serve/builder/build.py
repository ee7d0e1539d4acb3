"""`build`: the program for a contract, from a store if one fits, else compiled and saved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchloom import envs
from torchloom._torch.modes import modes_kept
from torchloom.errors import ArtifactError, ContractError, ServeError
from torchloom.serve.builder.load import Saved, fit_in_trace
from torchloom.serve.builder.options import BuildOptions, Ranges, Shapes, Sizes, check_options
from torchloom.serve.builder.pieces.inductor_options import resolved
from torchloom.serve.call.cuda_graphs import CudaGraphs
from torchloom.serve.call.eager import why_eager, why_enforced
from torchloom.serve.call.program import OutOfRange, Program
from torchloom.serve.call.variant import Variant
from torchloom.serve.contract.box import exact_boxes, first_boxes
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.snapshot import generators_kept
from torchloom.serve.model.target import Target
from torchloom.serve.store.folder import Store
from torchloom.serve.store.misses import Compare, fit_of, key_of, why_miss

if TYPE_CHECKING:
    from torchloom.serve.builder.builder import Builder
    from torchloom.serve.builder.pieces.lower import Backend

log = logging.getLogger(__name__)

_MOST_OPTIONAL = 3
_STORE = "TORCHLOOM_STORE"
_DISABLE_STORE = "TORCHLOOM_DISABLE_STORE"
_FORCE_LOAD = "TORCHLOOM_FORCE_LOAD"


def build(  # noqa: PLR0913 - each is an independent choice of the user
    model: Callable[..., Any],
    contract: Contract,
    *,
    sizes: Sizes = (),
    ranges: Ranges | None = None,
    shapes: Shapes = "split",
    unbacked: Sequence[str] = (),
    out_of_range: OutOfRange = "raise",
    backend: Backend = "inductor",
    splitting_ops: Sequence[str] = (),
    layers: bool = True,
    options: Mapping[str, Any] | None = None,
    check: Literal["edges", "trace", "off"] = "edges",
    cuda_graphs: CudaGraphs = "off",
    level: int = 2,
    store: str | Path | Store | None = None,
    name: str = "",
) -> Program:
    """Compile a model for every call that a contract allows; no call ever compiles again.

    Where compiling is turned off now (`torchloom.serve.eager()`, torch's stance `force_eager`,
    TORCHLOOM_ENFORCE_EAGER=1) nothing is traced or loaded, and the program is the model as it is: `why_eager` says so.

    Args:
        model: a module, a bound method or a function.
        contract: what its arguments look like.
        sizes: sizes that get a program of their own, for the only varying dim or by name of the dim.
        ranges: parts of the contract that get a program each, like [(1, 16), (17, 512)].
        shapes: "split": ranges are cut where what a program assumes of sizes begins to fail, into 32 parts and for
            half an hour at most; "prove": one program for each range, refused unless all that it assumes holds
            for each of its sizes; "unbacked": nothing may be assumed of sizes at all (slower code); "bucket":
            one program for each of `sizes`, smaller calls are padded.
        unbacked: dims of which nothing may be assumed, by name.
        out_of_range: what a call outside of the contract does: "raise" a `ContractError`, or run "eager".
        backend: "inductor", "eager" (the traced graph as it is), or a function that takes a graph and its
            inputs.
        splitting_ops: operators that run as they are, between pieces of the graph.
        layers: whether layers that repeat are compiled once.
        options: Inductor's; passes of one's own are functions, or names like "module:function", under the
            names of Inductor's hooks, e.g. "post_grad_custom_post_pass".
        check: "edges" compares each program with the model itself at the least and greatest sizes, at 0,
            1 and 2; "off" runs nothing. "trace" does as "edges", and where a store has a program, captures the
            model again and compares the graphs instead of fingerprints.
        cuda_graphs: "full" records programs of exact sizes as one CUDA graph, "pieces" each piece between
            `splitting_ops`.
        level: 0 traces and proves but compiles nothing; 1 compiles, without exact sizes and CUDA graphs;
            2 does as asked; 3 also searches for the fastest kernels for exact sizes.
        store: a folder that programs are loaded from and saved to. A build leaves its record there, in
            `records/`, for `torchloom report`. Left out, the folder that TORCHLOOM_STORE names, if any;
            TORCHLOOM_DISABLE_STORE=1 uses none, TORCHLOOM_FORCE_LOAD=1 loads and never compiles.
        name: tells programs of one model and contract in one store apart; `load` takes it, too.

    Raises:
        ArtifactError: programs are only to be loaded, and the store holds none that fits.
        ContractError: sizes or ranges are not of the contract.
        ProofError: the model decides by size; the text names line, sizes and ways out.
        ServeError: the model cannot be compiled as one graph.

    Example:
        >>> import torch
        >>> batch = Dim("batch", 1, 64)
        >>> model = torch.nn.Linear(16, 4).eval()
        >>> program = build(model, Contract({"input": (batch, 16)}), backend="eager")
        >>> with torch.no_grad():
        ...     [len(program(torch.ones(n, 16))) for n in (1, 7, 64)]
        [1, 7, 64]
    """
    if level not in range(4):
        raise ServeError(f"level is 0, 1, 2 or 3, not {level!r}")
    if check not in ("edges", "trace", "off"):
        raise ServeError(f'check is "edges", "trace" or "off", not {check!r}')
    chosen = BuildOptions(
        sizes=sizes if level > 1 or shapes == "bucket" else (),
        ranges=ranges,
        shapes=shapes,
        unbacked=tuple(contract.dims) if shapes == "unbacked" else tuple(unbacked),
        backend=backend if level else "eager",
        splitting_ops=tuple(splitting_ops),
        layers=layers,
        patches=resolved(options or {}),
        check="off" if check == "off" else "edges",
        cuda_graphs=cuda_graphs if level > 1 else "off",
        level=level,
    )
    target = Target(model)
    check_options(chosen, contract, target)
    if enforced := why_eager() or why_enforced():
        return Program(target, contract, [], out_of_range=out_of_range, enforced=enforced)
    store = _store(store)
    if store is None:
        return _built(target, contract, chosen, None, out_of_range, "")
    factors = key_of(target, contract, chosen.to_json(), name)
    saved = Saved(store, factors)
    compare = fit_in_trace if check == "trace" else fit_of
    if envs.is_on(_FORCE_LOAD):
        return _loaded(saved, target, contract, out_of_range, name, compare)
    if store.is_read_only:
        found = saved.load(target, contract, out_of_range, compare)
        if found is None:
            log.warning(
                "%s is built and not stored: %s cannot be written to by this user",
                target.name,
                store.root,
            )
        return found or _built(target, contract, chosen, None, out_of_range, "")
    with store.building(saved.key):
        found = saved.load(target, contract, out_of_range, compare)
        if found is not None:
            found.folder = store.root
            return found
        from torchloom.inspect import watch  # needs Dynamo, as building does

        with watch(store.record_path(saved.key)):
            program = _built(target, contract, chosen, store, out_of_range, saved.key)
        saved.save(program)
        program.folder = store.root
    return program


def _store(given: str | Path | Store | None) -> Store | None:
    """Return the store to use: the one that was given, or the environment's; None if there is to be none.

    Raises:
        ServeError: programs are to be loaded, and there is no store to load them from.
    """
    if envs.is_on(_DISABLE_STORE):
        given = None
    elif given is None:
        given = envs.get_str(_STORE, "") or None
    if given is None and envs.is_on(_FORCE_LOAD):
        why = (
            f"{_DISABLE_STORE}=1"
            if envs.is_on(_DISABLE_STORE)
            else f"neither `store` nor {_STORE} names one"
        )
        raise ServeError(
            f"{_FORCE_LOAD}=1 loads programs and compiles none, but there is no store: {why}"
        )
    return given if isinstance(given, Store) or given is None else Store(given)


def _loaded(
    saved: Saved,
    target: Target,
    contract: Contract,
    out_of_range: OutOfRange,
    name: str,
    compare: Compare,
) -> Program:
    """Return a stored program; nothing is compiled.

    Raises:
        ArtifactError: there is none that fits.
    """
    found = saved.load(target, contract, out_of_range, compare)
    if found is not None:
        return found
    reasons = why_miss(saved.store, target, contract, name, compare) or [
        "it was built with other options"
    ]
    raise ArtifactError(
        f"{saved.store.root} holds no program for {target.name}, and {_FORCE_LOAD}=1 forbids to build one: "
        f"{'; '.join(reasons[:6])}"
    )


def _built(
    target: Target,
    contract: Contract,
    options: BuildOptions,
    store: Store | None,
    out_of_range: OutOfRange,
    key: str,
) -> Program:
    # Here, and not above: a program that is found in a store needs no compiler.
    from torchloom.serve.builder.builder import Builder
    from torchloom.serve.builder.pieces.lower import Lowerer

    started = time.perf_counter()
    builder = Builder(target, contract, options, Lowerer(options.backend, options.patches, store))
    with modes_kept(), generators_kept():
        variants = _variants(builder, contract, options)
        builder.check_calls(variants)
    seconds = time.perf_counter() - started
    return Program(target, contract, variants, out_of_range=out_of_range, key=key, seconds=seconds)


def _variants(builder: Builder, contract: Contract, options: BuildOptions) -> list[Variant]:
    variants: list[Variant] = []
    for without in _patterns(contract):
        if options.shapes == "bucket":
            variants += builder.buckets(without)
            continue
        # Ranges come last: the first program that covers a call runs. Sizes are recorded as they are built: the
        # largest first.
        ranges = first_boxes(contract, options.ranges)
        boxes = exact_boxes(contract, options.sizes)
        exact = [builder.variants(box, without) for box in reversed(boxes)]
        variants += chain(*reversed(exact), *(builder.variants(box, without) for box in ranges))
    return variants


def _patterns(contract: Contract) -> list[frozenset[str]]:
    """Return which optional tensors may be None together: all combinations."""
    optional = [path for path, spec in contract.tensors() if spec.optional]
    if len(optional) > _MOST_OPTIONAL:
        raise ContractError(
            f"{len(optional)} tensors may be None, which makes {2 ** len(optional)} programs: fix some of "
            "them to None with `fixed`"
        )
    chosen = chain.from_iterable(combinations(optional, n) for n in range(len(optional) + 1))
    return [frozenset(each) for each in chosen]
