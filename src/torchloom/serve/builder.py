"""Programs for boxes of sizes: traced, proven, compiled, compared; cut where that fails.

contract ──boxes──▶ trace ──guards──▶ prove ──pieces──▶ compile ──edges──▶ compare with eager
             ▲                          │                                       │
             └────────── cut where it fails (shapes="split") ◀──────────────────┘
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchloom.errors import ContractError, ProofError
from torchloom.pieces.build import StopBuild
from torchloom.pieces.fullgraph import FullGraph
from torchloom.serve.box import Box, exact_boxes
from torchloom.serve.bucket import Axes, Padded, axes_of, uncut_in
from torchloom.serve.compare import Difference, check_order, differences_at, is_random, result_at
from torchloom.serve.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.cudagraph import Pool, assembled
from torchloom.serve.dims import Dim
from torchloom.serve.exact import at_sizes
from torchloom.serve.inputs import looked_at, looks_of
from torchloom.serve.lower import Lowerer
from torchloom.serve.options import Options
from torchloom.serve.padding import check_padding, check_rows
from torchloom.serve.program import Variant
from torchloom.serve.prove import Verdict, cuts, show_sizes
from torchloom.serve.split import Divided, divide
from torchloom.serve.stand import same_for_all, told
from torchloom.serve.stateful import check_state, refuse_changed
from torchloom.serve.target import Target, as_promised
from torchloom.serve.trace import Traced, trace

log = logging.getLogger(__name__)

_MOST_BOXES = 16
"""Parts that a contract may be split into: beyond, the model decides by size in too many ways."""


class _Cut(StopBuild):
    """Ends a build for a box that has to be cut."""

    def __init__(self, parts: list[Box], error: ProofError | None = None) -> None:
        super().__init__()
        self.parts = parts
        self.error = error
        """Why it cannot be."""


@dataclass
class Builder:
    """Builds the programs of a contract."""

    target: Target
    contract: Contract
    options: Options
    lowerer: Lowerer
    _divided: dict[int, tuple[FullGraph, Divided]] = field(default_factory=dict)
    """Each graph in pieces, by its identity."""
    _pool: Pool = field(default_factory=Pool)
    _last_cut: str = ""
    """What the last cut was made for."""
    _traces: dict[frozenset[str], list[Traced]] = field(default_factory=dict)
    """By which optional tensors are None."""

    def variants(self, box: Box, without: frozenset[str]) -> list[Variant]:
        """Return programs that cover a box together; one unless sizes split it."""
        waiting: list[tuple[Box, Traced | None]] = [(box, None)]
        done: list[Variant] = []
        while waiting:
            parts, variant = self._one(*waiting.pop(), without)
            if variant is not None:
                done.append(variant)
            waiting += parts
            if len(done) + len(waiting) > _MOST_BOXES:
                raise ProofError(
                    f"{self.target.name} decides by size in more than {_MOST_BOXES} ways for {box}; the "
                    f"parts so far: {'; '.join(str(each.box) for each in done[:4])}, ...{self._last_cut}: narrow the "
                    "contract, or hide the decision (a loop over a size, such as a scan, is one) in an operator of "
                    "your own (torchloom.custom_op)"
                )
        return sorted(done, key=lambda variant: [dim.min for dim in variant.box.dims])

    def check_calls(self, variants: Sequence[Variant]) -> None:
        """Refuse a model whose calls change what its programs were traced from.

        Raises:
            ServeError: they do; or the model itself fails.
        """
        if self.options.check == "edges":
            with as_promised(self.contract):
                check_state(self.target, self.contract, variants)
            self._pool.forget()

    def buckets(self, without: frozenset[str]) -> list[Variant]:
        """Return a program for each size that serves the sizes below it too, down to the one before.

        Raises:
            ContractError: several sizes vary, or the greatest has no bucket.
            ProofError: rows see one another, or results cannot be cut.
        """
        boxes = exact_boxes(self.contract, self.options.sizes)
        whole = Box.of(self.contract.dims.values())
        others = [*self.contract.derived, *self.contract.numbers()]
        simple = len(whole.varying) == 1 and not others
        if not simple or not boxes or boxes[-1].largest != whole.largest:
            raise ContractError(
                "shapes='bucket' takes one varying size, that no other size or number follows, and `sizes` up to the "
                f"greatest of it: the contract "
                f"is {self.contract}, sizes {self.options.sizes!r}"
            )
        (dim,) = whole.varying
        axes = self._axes(dim, without)
        variants, low, known = [], dim.min, list[Traced]()
        for box in boxes:
            size = box.largest[dim.name]
            covered = whole.cut(dim.name, [low, size + 1])[1 if low > dim.min else 0]
            traced, tried = same_for_all(self.target, self.contract, covered, without, known)
            _, variant = self._one(box, None, without)
            assert variant is not None, "nothing varies, so nothing can be cut"
            padded = Padded(variant.run, self.target, self.contract, dim, size, axes)
            check_padding(self.target, self.contract, padded, covered, without, tried)
            if traced is not None:
                check_rows(self.target, self.contract, covered, traced, without)
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
        if uncut := uncut_in(large):
            raise ProofError(
                f"{self.target.name} cannot be padded: {uncut}, of which padding cannot be cut off. Return tensors in "
                "tuples, lists, dicts or dataclasses, or use shapes='split'"
            )
        return axes_of(small, large, sizes, dim.name)

    def _one(
        self, box: Box, traced: Traced | None, without: frozenset[str]
    ) -> tuple[list[tuple[Box, Traced | None]], Variant | None]:
        """Return the program for a box, or the parts that need one each.

        Args:
            box: the sizes.
            traced: a trace that stands for them, if there is one.
            without: paths of optional tensors that are None.
        """
        traced = traced or self._traced(box, without)
        if parts := self._cut(traced, traced.verdicts()):  # before anything is compiled
            return self._with_traces(parts, traced), None
        try:
            variant = self._lowered(traced, without)
        except _Cut as cut:  # tracing a piece assumed what does not hold
            if cut.error is not None:
                raise cut.error from None
            return self._with_traces(cut.parts, traced), None
        if variant is None:
            self._traces[without] = [
                t for t in self._traces[without] if t.graph is not traced.graph
            ]
            return [(box, None)], None
        if parts := self._cut(traced, variant.verdicts):  # compilers assume more
            return self._with_traces(parts, traced), None
        if self.options.check == "edges":
            for sizes in self._trials(box):
                with as_promised(self.contract):
                    found = differences_at(self.target, self.contract, variant.run, sizes, without)
                if found is not None:
                    self._refuse_other_causes(variant, sizes, found)
                    parts = self._without_size(box, sizes, found)
                    return self._with_traces(parts, traced), None
            with as_promised(self.contract):
                check_order(self.target, self.contract, box.largest, without)
            if not self._is_blind_to_identity(variant, without):
                variant.asked = [*variant.asked, ["apart"]]
            self._pool.forget()
        else:
            variant.asked = [*variant.asked, ["apart"]]
        counter.num_compiles += 1
        return [], variant

    def _is_blind_to_identity(self, variant: Variant, without: frozenset[str]) -> bool:
        """Say whether tensors that look alike may be one object: whether the model then does the same."""
        if variant.writes or ["apart"] in variant.asked:
            return True  # calls are asked already
        filled = {path for path, spec in self.contract.tensors() if spec.fill is not None}
        groups = self.contract.alike(without)
        if any(filled & set(group) for group in groups):
            return False  # the values of one may be none of another's
        try:
            with as_promised(self.contract):
                return not any(
                    differences_at(
                        *(self.target, self.contract, variant.run, variant.box.largest, without),
                        one_object=group,
                    )
                    for group in groups
                )
        except Exception:  # noqa: BLE001 - the model's own: it does not take one tensor for two
            return False

    def _trials(self, box: Box) -> Iterator[dict[str, Any]]:
        """Yield sizes, and floats that vary, at which a program is compared with the model."""
        floats, draw = self.contract.floats(), random.Random(0)
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

    def _traced(self, box: Box, without: frozenset[str]) -> Traced:
        """Return a trace for a box: one that is there, if it stands for it, or a new one."""
        known = self._traces.setdefault(without, [])
        if not box.varying:
            for each in known:
                if box.largest in each.box and (found := self._within(each, box)):
                    return found
        made = trace(
            self.target, self.contract, box, unbacked=self.options.unbacked, without=without
        )
        known.append(made)
        return made

    def _with_traces(self, parts: Iterable[Box], traced: Traced) -> list[tuple[Box, Traced | None]]:
        """Return parts of a box, each with its trace where that stands for the part."""
        return [(part, self._within(traced, part)) for part in parts]

    def _within(self, traced: Traced, part: Box) -> Traced | None:
        """Return a trace as one for a part of its box, if it stands for it."""
        # Which inputs need gradients is not kept where symbols become numbers.
        return None if self.contract.grad == "grad" else traced.within(part)

    def _in_pieces(self, traced: Traced) -> Divided | None:
        """Return a graph cut into pieces; None if equal pieces would not be equal at its exact sizes."""
        known = self._divided.get(id(traced.graph))
        if known is None:
            divided = divide(
                traced.graph.graph_module,
                self.options.splitting_ops,
                # A float among the numbers of a graph can be no input of a part of it.
                layers=self.options.layers
                and self.options.backend == "inductor"
                and not self.contract.floats(),
            )
            known = self._divided[id(traced.graph)] = (traced.graph, divided)
        if traced.numbers is None:
            return known[1]
        return at_sizes(known[1], traced.graph, traced.numbers)

    def _lowered(self, traced: Traced, without: frozenset[str]) -> Variant | None:
        """Return the program of a trace; None if there has to be another trace."""
        divided = self._in_pieces(traced)
        if divided is None:
            return None

        def look() -> None:
            try:
                parts = self._cut(traced, traced.verdicts())
            except ProofError as error:  # which compilers would wrap in errors of their own
                raise _Cut([], error) from error
            if parts:
                raise _Cut(parts)

        looks = looks_of(traced.graph.graph_module)
        known = divided.stitching.only_from({each.place for each in looks}, len(divided.pieces))
        with as_promised(self.contract):
            is_exact = not traced.box.varying
            lowered = [
                self.lowerer.lower(
                    piece,
                    traced.graph,
                    unbacked=bool(self.options.unbacked),
                    tuned=is_exact and self.options.level == 3,
                    look=look,
                    known=places,
                )
                for piece, places in zip(divided.pieces, known, strict=True)
            ]
        recorded = self.options.cuda_graphs if is_exact else "off"
        fixed = [None if each.is_kept else sorted(each.fixed) for each in divided.pieces]
        written = [sorted(each.written) for each in divided.pieces]
        calls = [each.call for each in lowered]
        compiled = assembled(divided.stitching, calls, recorded, fixed, written, self._pool)
        verdicts = tuple(traced.verdicts(guard for each in lowered for guard in each.guards))
        variant = Variant(
            traced.box,
            without,
            traced.graph.shell.around(looked_at(compiled, looks), self.target.call),
            traced.facts,
            traced.codes,
            verdicts,
            tuple(piece.digest for piece in divided.pieces),
            divided.num_calls,
            divided.writes,
            is_recorded=recorded != "off",
            checks=tuple(each.code for each in verdicts if not each.is_exhaustive),
            asked=traced.asked,
            looks=looks,
        )
        reasons = [each.why_not for each in lowered if each.why_not]
        reasons += [
            f"it relies on {each}, which cannot be looked up again" for each in traced.unwritten
        ]
        try:
            variant.stored = {
                "shell": traced.graph.shell.to_bytes(),
                "stitching": divided.stitching.to_json(),
                "pieces": [each.stored for each in lowered],
                "recorded": recorded,
                "fixed": fixed,
                "written": written,
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
            raise ProofError(told(self.target, traced.box, failed))
        for dim in traced.box.varying:
            starts = cuts(failed, dim)
            if starts:
                at = f" at {failed[0].where}" if failed[0].where else ""
                self._last_cut = f"; last cut by {failed[0].guard}{at}"
                log.info("%s: %s is cut at %s", self.target.name, traced.box, starts)
                return traced.box.cut(dim.name, starts)
        raise ProofError(told(self.target, traced.box, failed))

    def _refuse_other_causes(
        self, variant: Variant, sizes: Mapping[str, Any], found: Difference
    ) -> None:
        """Refuse a model that is no other one at a size, where a program differs from it for another reason.

        Raises:
            ServeError: it changes what it reads.
            ProofError: it draws random numbers.
        """
        refuse_changed(self.target, self.contract, variant)
        with as_promised(self.contract):
            draws = found.is_of_values and is_random(
                self.target, self.contract, sizes, variant.without
            )
        if draws:
            raise ProofError(
                f"compiled for {variant.box}, {self.target.name} differs from itself run eagerly at "
                f"{show_sizes([sizes])}: {found}. It draws random numbers (as dropout does in training), and compiled "
                "code draws others than eager code for the same seed: options={'fallback_random': True} lets it draw "
                "the same ones, check='off' leaves the comparison out"
            )

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
