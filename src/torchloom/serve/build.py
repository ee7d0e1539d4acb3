"""A program for every call of a contract: traced, proven, compiled, compared, stored.

contract ──boxes──▶ trace ──guards──▶ prove ──pieces──▶ compile ──edges──▶ compare with eager ──▶ store
             ▲                          │                                       │
             └────────── cut where it fails (shapes="split") ◀──────────────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Literal, get_args

from torchloom.errors import ContractError, ProofError, ServeError
from torchloom.serve.box import Box, exact_boxes, first_boxes
from torchloom.serve.bucket import Axes, Padded, axes_of
from torchloom.serve.compare import Difference, differences_at, result_at
from torchloom.serve.contract import Contract, Dim
from torchloom.serve.counter import counter
from torchloom.serve.cudagraph import CudaGraphs, assembled
from torchloom.serve.lower import Backend, Lowerer
from torchloom.serve.patches import resolved, spelled
from torchloom.serve.program import OutOfRange, Program, Variant
from torchloom.serve.prove import Verdict, cuts, show_sizes
from torchloom.serve.saved import Saved, key_of
from torchloom.serve.split import divide
from torchloom.serve.store import Store
from torchloom.serve.target import Target, as_promised
from torchloom.serve.trace import Traced, trace

log = logging.getLogger(__name__)

Shapes = Literal["prove", "split", "unbacked", "bucket"]
_MOST_BOXES = 16
"""Parts that a contract may be split into: beyond, the model decides by size in too many ways."""
_MOST_OPTIONAL = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """How programs are built."""

    sizes: Sequence[int] | Mapping[str, Sequence[int]] = ()
    """Sizes that get a program of their own."""
    ranges: Sequence[tuple[int, int]] | Mapping[str, Sequence[tuple[int, int]]] | None = None
    """Parts of the contract that get a program each; the whole contract if None."""
    shapes: Shapes = "prove"
    unbacked: tuple[str, ...] = ()
    """Dims that nothing may branch on, by name; all of them with shapes="unbacked"."""
    backend: Backend = "inductor"
    splitting_ops: tuple[str, ...] = ()
    layers: bool = True
    """Whether layers that repeat are compiled once."""
    patches: Mapping[str, Any] = field(default_factory=dict)
    """Inductor's options."""
    check: Literal["edges", "off"] = "edges"
    cuda_graphs: CudaGraphs = "off"
    level: int = 2

    def to_json(self) -> dict[str, Any]:
        """Return what of them enters a key."""
        return {
            "sizes": _plain(self.sizes),
            "ranges": _plain(self.ranges),
            "shapes": self.shapes,
            "unbacked": list(self.unbacked),
            "backend": self.backend if isinstance(self.backend, str) else "a function",
            "splitting_ops": list(self.splitting_ops),
            "layers": self.layers,
            "patches": spelled(self.patches),
            "cuda_graphs": self.cuda_graphs,
            "level": self.level,
        }


def build(  # noqa: PLR0913 - each is an independent choice of the user
    model: Callable[..., Any],
    contract: Contract,
    *,
    sizes: Sequence[int] | Mapping[str, Sequence[int]] = (),
    ranges: Sequence[tuple[int, int]] | Mapping[str, Sequence[tuple[int, int]]] | None = None,
    shapes: Shapes = "prove",
    unbacked: Sequence[str] = (),
    out_of_range: OutOfRange = "raise",
    backend: Backend = "inductor",
    splitting_ops: Sequence[str] = (),
    layers: bool = True,
    options: Mapping[str, Any] | None = None,
    check: Literal["edges", "off"] = "edges",
    cuda_graphs: CudaGraphs = "off",
    level: int = 2,
    store: str | Path | Store | None = None,
) -> Program:
    """Compile a model for every call that a contract allows; no call ever compiles again.

    Args:
        model: a module, a bound method or a function.
        contract: what its arguments look like.
        sizes: sizes that get a program of their own, for the only varying dim or by name of the dim.
        ranges: parts of the contract that get a program each, like [(1, 16), (17, 512)].
        shapes: "prove": one program for each range, refused unless all that it assumes of sizes holds for
            each of them; "split": ranges are cut where an assumption begins to fail; "unbacked": nothing
            may be assumed of sizes at all (slower code); "bucket": one program for each of `sizes`, smaller
            calls are padded.
        unbacked: dims of which nothing may be assumed, by name.
        out_of_range: what a call outside of the contract does: "raise" a `ContractError`, or run "eager".
        backend: "inductor", "eager" (the traced graph as it is), or a function that takes a graph and its
            inputs.
        splitting_ops: operators that run as they are, between pieces of the graph.
        layers: whether layers that repeat are compiled once.
        options: Inductor's; passes of one's own are functions, or names like "module:function", under the
            names of Inductor's hooks, e.g. "post_grad_custom_post_pass".
        check: "edges" compares each program with the model itself at the least and greatest sizes, at 0,
            1 and 2; "off" runs nothing.
        cuda_graphs: "full" records programs of exact sizes as one CUDA graph, "pieces" each piece between
            `splitting_ops`.
        level: 0 traces and proves but compiles nothing; 1 compiles, without exact sizes and CUDA graphs;
            2 does as asked; 3 also searches for the fastest kernels for exact sizes.
        store: a folder that programs are loaded from and saved to.

    Raises:
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
    chosen = Options(
        sizes=sizes if level > 1 or shapes == "bucket" else (),
        ranges=ranges,
        shapes=shapes,
        unbacked=tuple(contract.dims) if shapes == "unbacked" else tuple(unbacked),
        backend=backend if level else "eager",
        splitting_ops=tuple(splitting_ops),
        layers=layers,
        patches=resolved(options or {}),
        check=check,
        cuda_graphs=cuda_graphs if level > 1 else "off",
        level=level,
    )
    target = Target(model)
    _check(chosen, contract, target)
    if store is None:
        return _built(target, contract, chosen, None, out_of_range, "")
    store = store if isinstance(store, Store) else Store(store)
    factors = key_of(target, contract, chosen.to_json())
    saved = Saved(store, factors)
    with store.building(saved.key):
        found = saved.load(target, contract, out_of_range)
        if found is not None:
            return found
        program = _built(target, contract, chosen, store, out_of_range, saved.key)
        saved.save(program)
    return program


def _check(options: Options, contract: Contract, target: Target) -> None:
    if options.shapes not in get_args(Shapes):
        raise ServeError(f"shapes is one of {', '.join(get_args(Shapes))}, not {options.shapes!r}")
    for name in options.unbacked:
        if name not in contract.dims:
            raise ContractError(
                f"unbacked names {name!r}, the contract has {', '.join(contract.dims) or 'no dims'}"
            )
    module = target.module
    if module is not None and module.training is not contract.training:
        wanted = "train()" if contract.training else "eval()"
        raise ContractError(
            f"the model is in {'training' if module.training else 'evaluation'} mode, the contract wants "
            f"the other: call model.{wanted}"
        )
    if options.cuda_graphs not in get_args(CudaGraphs):
        raise ServeError(
            f"cuda_graphs is one of {', '.join(get_args(CudaGraphs))}, not {options.cuda_graphs!r}"
        )
    names = {parameter.name for parameter in target.parameters}
    takes_any = target.rest is not None
    for name in (*contract.args, *contract.fixed):
        if name not in names and not takes_any:
            raise ContractError(
                f"the contract names {name!r}, {target.name} takes {', '.join(sorted(names))}"
            )


def _built(
    target: Target,
    contract: Contract,
    options: Options,
    store: Store | None,
    out_of_range: OutOfRange,
    key: str,
) -> Program:
    builder = _Builder(target, contract, options, Lowerer(options.backend, options.patches, store))
    variants: list[Variant] = []
    if options.shapes == "bucket":
        for without in _patterns(contract):
            variants += builder.buckets(without)
        return Program(target, contract, variants, out_of_range=out_of_range, key=key)
    for without in _patterns(contract):
        # Exact sizes come first: the first program that covers a call runs.
        for box in exact_boxes(contract, options.sizes):
            variants += builder.variants(box, without)
        for box in first_boxes(contract, options.ranges):
            variants += builder.variants(box, without)
    return Program(target, contract, variants, out_of_range=out_of_range, key=key)


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


@dataclass
class _Builder:
    """Builds the programs of a contract."""

    target: Target
    contract: Contract
    options: Options
    lowerer: Lowerer

    def variants(self, box: Box, without: frozenset[str]) -> list[Variant]:
        """Return programs that cover a box together; one unless sizes split it."""
        waiting, done = [box], []
        while waiting:
            part = waiting.pop()
            parts, variant = self._one(part, without)
            if variant is not None:
                done.append(variant)
            waiting += parts
            if len(done) + len(waiting) > _MOST_BOXES:
                raise ProofError(
                    f"{self.target.name} decides by size in more than {_MOST_BOXES} ways for {box}; the "
                    f"parts so far: {'; '.join(str(each.box) for each in done[:4])}, ...: narrow the "
                    "contract, or hide the decision in a custom operator"
                )
        return sorted(done, key=lambda variant: [dim.min for dim in variant.box.dims])

    def buckets(self, without: frozenset[str]) -> list[Variant]:
        """Return a program for each size that serves the sizes below it too, down to the one before.

        Raises:
            ContractError: several sizes vary, or the greatest has no bucket.
            ProofError: rows see one another, or results cannot be cut.
        """
        boxes = exact_boxes(self.contract, self.options.sizes)
        whole = Box.of(self.contract.dims.values())
        if len(whole.varying) != 1 or not boxes or boxes[-1].largest != whole.largest:
            raise ContractError(
                "shapes='bucket' takes one varying size, and `sizes` up to the greatest of it: the contract "
                f"is {self.contract}, sizes {self.options.sizes!r}"
            )
        (dim,) = whole.varying
        axes = self._axes(dim, without)
        variants, low = [], dim.min
        for box in boxes:
            size = box.largest[dim.name]
            _, variant = self._one(box, without)
            assert variant is not None, "nothing varies, so nothing can be cut"
            padded = Padded(variant.run, self.target, self.contract, dim, size, axes)
            covered = whole.cut(dim.name, [low, size + 1])[1 if low > dim.min else 0]
            self._try_padding(padded, covered, without)
            variant.box, variant.run = covered, padded
            variant.stored["padded"] = {"dim": dim.name, "size": size, "axes": axes}
            variants.append(variant)
            low = size + 1
        return variants

    def _axes(self, dim: Dim, without: frozenset[str]) -> Axes:
        """Find a dim in the model's result by running it for two sizes."""
        sizes = (max(dim.min, 1), dim.max)
        with as_promised(self.contract):
            small, large = (
                result_at(self.target, self.contract, {dim.name: size}, without) for size in sizes
            )
        return axes_of(small, large, sizes, dim.name)

    def _try_padding(self, padded: Padded, box: Box, without: frozenset[str]) -> None:
        """Compare with the model while the padding is NaN."""
        padded.poison = True
        try:
            for sizes in box.edges():
                with as_promised(self.contract):
                    found = differences_at(self.target, self.contract, padded, sizes, without)
                if found is not None:
                    raise ProofError(
                        f"{self.target.name} cannot be padded to {padded.size}: at {sizes} {found}. Rows see one "
                        "another (a mean over the batch, a softmax over it), or padding is read: use "
                        "shapes='split'"
                    )
        finally:
            padded.poison = False

    def _one(self, box: Box, without: frozenset[str]) -> tuple[list[Box], Variant | None]:
        """Return the program for a box, or the parts that need one each."""
        traced = trace(
            self.target,
            self.contract,
            box,
            unbacked=self.options.unbacked,
            without=without,
        )
        if parts := self._cut(traced, traced.verdicts()):  # before anything is compiled
            return parts, None
        variant = self._lowered(traced, without)
        if parts := self._cut(traced, variant.verdicts):  # compilers assume more
            return parts, None
        if self.options.check == "edges":
            for sizes in box.edges():
                with as_promised(self.contract):
                    found = differences_at(self.target, self.contract, variant.run, sizes, without)
                if found is not None:
                    return self._without_size(box, sizes, found), None
        return [], variant

    def _lowered(self, traced: Traced, without: frozenset[str]) -> Variant:
        divided = divide(
            traced.graph.graph_module,
            self.options.splitting_ops,
            layers=self.options.layers and self.options.backend == "inductor",
        )
        with as_promised(self.contract):
            is_exact = not traced.box.varying
            lowered = [
                self.lowerer.lower(
                    piece,
                    unbacked=bool(self.options.unbacked),
                    tuned=is_exact and self.options.level == 3,
                )
                for piece in divided.pieces
            ]
        counter.num_compiles += 1
        recorded = self.options.cuda_graphs if is_exact else "off"
        fixed = [None if each.is_kept else sorted(each.fixed) for each in divided.pieces]
        compiled = assembled(divided.stitching, [each.call for each in lowered], recorded, fixed)
        variant = Variant(
            traced.box,
            without,
            traced.graph.shell.around(compiled, self.target.call),
            traced.facts,
            traced.sources,
            tuple(traced.verdicts()),
            tuple(piece.digest for piece in divided.pieces),
            divided.num_calls,
            divided.writes,
        )
        reasons = [each.why_not for each in lowered if each.why_not]
        try:
            variant.stored = {
                "shell": traced.graph.shell.to_bytes(),
                "stitching": divided.stitching.to_json(),
                "pieces": [each.stored for each in lowered],
                "recorded": recorded,
                "fixed": fixed,
            }
        except TypeError as error:
            reasons.append(str(error))
        variant.why_not_stored = "; ".join(reasons)
        return variant

    def _cut(self, traced: Traced, verdicts: Iterable[Verdict]) -> list[Box]:
        """Return parts of a box whose trace does not hold for all of it; none if it holds.

        Raises:
            ProofError: it does not hold, and boxes are not to be cut, or cannot be.
        """
        failed = [verdict for verdict in verdicts if not verdict.holds]
        if not failed:
            return []
        if self.options.shapes != "split":
            raise ProofError(_told(self.target, traced.box, failed))
        for dim in traced.box.varying:
            starts = cuts(failed, dim)
            if starts:
                log.info("%s: %s is cut at %s", self.target.name, traced.box, starts)
                return traced.box.cut(dim.name, starts)
        raise ProofError(_told(self.target, traced.box, failed))

    def _without_size(self, box: Box, sizes: Mapping[str, int], found: Difference) -> list[Box]:
        """Return parts of a box, one of which is only the size at which the program is wrong."""
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        text = f"compiled for {box}, {self.target.name} differs from itself run eagerly at {shown}: {found}"
        if self.options.shapes != "split" or not box.varying:
            hint = (
                "an operator in it behaves in its own way at this size (squeeze, is_contiguous and "
                "others do at 1); shapes='split' compiles such sizes apart"
                if box.varying
                else "this is a fault of the compiler, or the model is not deterministic"
            )
            raise ProofError(f"{text}. {hint}")
        dim = min(box.varying, key=lambda dim: sizes[dim.name])
        size = sizes[dim.name]
        log.info("%s; %s %d gets a program of its own", text, dim.name, size)
        return box.cut(dim.name, [size, size + 1])


def _told(target: Target, box: Box, failed: Collection[Verdict]) -> str:
    """Say what fails, for which sizes, where, and what can be done."""
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
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
