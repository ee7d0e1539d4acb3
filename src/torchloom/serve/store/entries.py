"""Writes a program as an entry of a store, plain data and names of objects, and makes it runnable again.

Nothing here imports a compiler: a process that loads programs does not pay for one.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from torchloom._torch.inductor import why_cache_is_open
from torchloom._torch.stored import graph_from_bytes as load_graph
from torchloom._torch.stored import graph_to_bytes, is_made_by_dynamo
from torchloom.errors import ArtifactError
from torchloom.pieces.build import Built, load_piece
from torchloom.pieces.plain import run_plain
from torchloom.pieces.shell import Shell
from torchloom.serve.call.eager import why_enforced
from torchloom.serve.call.padded import Padded
from torchloom.serve.call.program import OutOfRange, Program
from torchloom.serve.call.stitching import assembled
from torchloom.serve.call.variant import Variant
from torchloom.serve.call.weight_checks import with_weight_check
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.model.fingerprint import Fingerprint
from torchloom.serve.model.target import Target
from torchloom.serve.store.folder import Store

__all__ = ["dump_graph", "load_graph"]


def dump_graph(graph_module: fx.GraphModule) -> bytes:
    """Return a graph of public operators as bytes.

    Raises:
        ValueError: it calls functions that Dynamo made while it traced, such as those for NumPy's.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and is_made_by_dynamo(node.target):
            raise ValueError(f"{node.target!r} exists in the process that traced it alone")
    for node in graph_module.graph.nodes:
        for name in ("nn_module_stack", "source_fn_stack", "example_value", "stack_trace"):
            node.meta.pop(name, None)
    return graph_to_bytes(graph_module)


Call = Callable[..., Any]


def program_from(
    store: Store,
    name: str,
    entry: Mapping[str, Any],
    target: Target,
    contract: Contract,
    fingerprints: Iterable[Fingerprint],
    out_of_range: OutOfRange,
) -> Program:
    """Make a stored program ready to run; nothing is compiled.

    Args:
        store: where it is.
        name: of its entry.
        entry: what it is made of, as it was signed.
        target: the model.
        contract: what arguments look like.
        fingerprints: of its variants.
        out_of_range: what a call outside of the contract does.

    Raises:
        ArtifactError: a part of it is missing or damaged, or it cannot be made here.
    """
    if enforced := why_enforced():
        return Program(target, contract, [], out_of_range=out_of_range, key=name, enforced=enforced)
    started = time.perf_counter()
    try:
        variants = [*_variants(store, entry, target, contract, fingerprints)]
    except ArtifactError:
        raise
    except Exception as error:  # unpickling and the user's modules may raise anything
        raise ArtifactError(
            f"{store.root}: the program for it cannot be made in this process ({type(error).__name__}: {error}): build "
            "it again"
        ) from error
    counter.num_loads += 1
    return Program(
        *(target, contract, variants),
        out_of_range=out_of_range,
        key=name,
        origin="loaded",
        seconds=time.perf_counter() - started,
    )


def _variants(
    store: Store,
    entry: Mapping[str, Any],
    target: Target,
    contract: Contract,
    fingerprints: Iterable[Fingerprint],
) -> Iterator[Variant]:
    done: dict[str, Any] = {}

    def call(stored: Mapping[str, Any]) -> Any:
        known = json.dumps(stored, sort_keys=True)
        if known not in done:
            done[known] = loaded_piece(stored, store)
        return done[known]

    for stored, fingerprint in zip(entry["variants"], fingerprints, strict=True):
        shell, stitching, looks = pickle.loads(store.get(stored["code"]))
        around = Shell.from_bytes(shell).around
        compiled, recorded = assembled(
            stitching,
            [call(piece) for piece in stored["pieces"]],
            *(stored["recorded"], stored["fixed"], stored["written"]),
        )
        run = around(with_weight_check(compiled, looks), target.call)
        if padded := stored.get("padded"):
            axes = {path: tuple(axis) for path, axis in padded["axes"].items()}
            run = Padded(run, target, contract, contract.dims[padded["dim"]], padded["size"], axes)
        yield Variant(
            Box.from_json(stored["box"]),
            frozenset(stored["without"]),
            run,
            fingerprint,
            pieces=tuple(stored["digests"]),
            num_calls=stored["num_calls"],
            writes=stored["writes"],
            recorded=recorded,
            told=tuple(stored["verdicts"]),
            checks=tuple(stored["checks"]),
            asked=stored["asked"],
            looks=looks,
        )


def entry_part(variant: Variant, store: Store) -> dict[str, Any]:
    """Store the objects of a program for one box, and return what an entry says of it."""
    return {
        **variant.stored,
        "code": store.put(variant.stored["code"]),
        "fingerprint": store.put(variant.fingerprint.to_bytes()),
        "box": variant.box.to_json(),
        "checks": variant.checks,
        "asked": variant.asked,
        "without": sorted(variant.without),
        "digests": variant.pieces,
        "writes": variant.writes,
        "verdicts": variant.assumed,
        "num_calls": variant.num_calls,
    }


def faults_of(entry: Mapping[str, Any], store: Store) -> list[str]:
    """Say which parts of a program cannot be used."""
    return [text for digest in sorted(_objects(entry)) if (text := store.fault(digest))]


def _objects(entry: Mapping[str, Any]) -> set[str]:
    """Return the names of all objects that a program is made of."""
    found = set()
    for stored in entry["variants"]:
        found |= {stored["code"], stored["fingerprint"]}
        for piece in stored["pieces"]:
            found |= set(piece.values())
    return found


def describe_entry(entry: Mapping[str, Any], store: Store) -> tuple[list[str], list[str]]:
    """Say what an entry of unknown origin is made of, and what of it is damaged; nothing of it is followed."""
    try:
        factors = entry["factors"]
        machine = ", ".join(f"{name} {value}" for name, value in factors["machine"].items())
        names = _objects(entry)
        faults = faults_of(entry, store)
    except (KeyError, TypeError, AttributeError) as error:
        return ["no program of this version"], [f"its entry is incomplete ({error!r})"]
    content = f"{len(names)} objects: bytecode, generated sources, shared objects, tensors"
    return [f"{factors['model']} for {machine}", content], faults


def stored_piece(built: Built, store: Store) -> dict[str, str]:
    """Store a compiled piece and return where it is; nothing if it cannot be stored."""
    if built.plain is not None:
        return {"plain": store.put(pickle.dumps(built.plain))}
    if built.content is None:
        return {}
    kernels = {key: path.read_bytes() for key, path in built.kernels.items()}
    return {"compiled": store.put(pickle.dumps((built.content, kernels)))}


def stored_graph(graph_module: fx.GraphModule, store: Store) -> dict[str, str]:
    """Store a graph that runs as it is and return where it is."""
    return {"graph": store.put(dump_graph(graph_module))}


def loaded_piece(stored: Mapping[str, str], store: Store) -> Call:
    """Return the function of a stored piece; nothing is compiled.

    Raises:
        ArtifactError: a part of it is missing or damaged, or needs a compiler's cache that others can write to.
    """
    if "graph" in stored:
        return load_graph(store.get(stored["graph"])).forward
    try:
        if "plain" in stored:
            return run_plain(pickle.loads(store.get(stored["plain"])))
        if reason := why_cache_is_open():  # torch writes its sources there, and runs what is there
            raise ArtifactError(reason)
        return load_piece(*pickle.loads(store.get(stored["compiled"])))
    except LookupError as error:
        raise ArtifactError(
            f"a piece of the program is incomplete: {error}; build again"
        ) from error
