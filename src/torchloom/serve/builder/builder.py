"""Programs for boxes of sizes: traced, proven, compiled, compared; cut where that fails.

contract ──boxes──▶ trace ──guards──▶ prove ──pieces──▶ compile ──edges──▶ compare with eager
             ▲                          │                                       │
             └────────── cut where it fails (shapes="split") ◀──────────────────┘
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchloom.errors import ProofError, ServeError, TorchloomError
from torchloom.pieces.build import StopBuild
from torchloom.serve.builder.buckets import bucket_programs
from torchloom.serve.builder.compare.differences import Difference
from torchloom.serve.builder.compare.program_check import (
    check_state,
    difference_in_box,
)
from torchloom.serve.builder.options import BuildOptions
from torchloom.serve.builder.pieces.lower import Lowered, Lowerer
from torchloom.serve.builder.pieces.piece import Divided
from torchloom.serve.builder.pieces.split import divide
from torchloom.serve.builder.prove import (
    ProofVerdict,
    cuts,
    multiples_to_promise,
    why_not_compiled,
    why_not_proven,
)
from torchloom.serve.builder.trace import Traced, trace
from torchloom.serve.call.stitching import assembled
from torchloom.serve.call.variant import Variant
from torchloom.serve.call.weight_checks import looks_of, with_weight_check
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.model.target import Target, gradient_mode_of

log = logging.getLogger(__name__)


def compiled_program(
    target: Target,
    contract: Contract,
    options: BuildOptions,
    lowerer: Lowerer,
    traced: Traced,
    without: frozenset[str],
    look: Callable[[], None],
) -> Variant:
    """Return the program of a trace.

    Args:
        target: the model.
        contract: what arguments look like.
        options: how programs are built.
        lowerer: compiles pieces; equal ones once.
        traced: the trace.
        without: paths of optional tensors that are None.
        look: called before code is generated for a piece, when the trace's graph knows what tracing the
            piece assumed of sizes. It may raise to end the build.

    Raises:
        ServeError: the graph cannot be cut or compiled, or the compiler's cache is open to others.
    """
    # A float among the numbers of a graph can be no input of a part of it.
    layers = options.layers and options.backend == "inductor" and not contract.floats()
    divided = divide(traced.graph.graph_module, options.splitting_ops, layers=layers)
    looks = looks_of(traced.graph.graph_module)
    known = divided.stitching.only_from({each.place for each in looks}, len(divided.pieces))
    is_exact = not traced.box.varying
    try:
        with gradient_mode_of(contract):
            lowered = [
                lowerer.lower(
                    piece,
                    traced.graph,
                    unbacked=bool(options.unbacked),
                    tuned=is_exact and options.level == 3,
                    look=look,
                    known=places,
                )
                for piece, places in zip(divided.pieces, known, strict=True)
            ]
    except TorchloomError:
        raise
    except Exception as error:  # compilers raise anything
        shapes = options.shapes
        raise ServeError(why_not_compiled(target, traced.box, shapes, error)) from error
    how = options.cuda_graphs if is_exact else "off"
    fixed = [None if each.is_kept else sorted(each.fixed) for each in divided.pieces]
    written = [sorted(each.written) for each in divided.pieces]
    calls = [each.call for each in lowered]
    compiled, recorded = assembled(divided.stitching, calls, how, fixed, written)
    verdicts = tuple(traced.verdicts(guard for each in lowered for guard in each.guards))
    variant = Variant(
        traced.box,
        without,
        traced.graph.shell.around(with_weight_check(compiled, looks), target.call),
        traced.fingerprint,
        verdicts,
        tuple(piece.digest for piece in divided.pieces),
        divided.num_calls,
        divided.writes,
        recorded=recorded,
        checks=tuple(each.code for each in verdicts if not each.is_exhaustive),
        asked=traced.asked,
        looks=looks,
    )
    stored = {"recorded": how, "fixed": fixed, "written": written}
    _add_stored(variant, traced, divided, lowered, stored)
    return variant


def _add_stored(
    variant: Variant, traced: Traced, divided: Divided, lowered: list[Lowered], how: dict[str, Any]
) -> None:
    """Give a program what a store needs to make it again, or the reason why it cannot be stored.

    Args:
        variant: the program.
        traced: its trace.
        divided: its graph in pieces.
        lowered: the pieces, compiled.
        how: what of them is recorded.
    """
    reasons = [each.why_not for each in lowered if each.why_not]
    reasons += [
        f"it relies on {each}, which cannot be looked up again" for each in traced.unwritten
    ]
    try:
        variant.stored = {
            "code": pickle.dumps((traced.graph.shell.to_bytes(), divided.stitching, variant.looks)),
            "pieces": [each.stored for each in lowered],
            **how,
            "traced": (traced.first_box or traced.box).to_json(),
            "graph": traced.digest,
        }
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        reasons.append(str(error))
    variant.why_not_stored = "; ".join(reasons)


_MOST_BOXES = 32
"""Parts that a contract may be split into: beyond, the model decides by size in too many ways."""
_MOST_SECONDS = 1800
"""How long the parts of a box may take to build: beyond, the next cut is refused."""


class _Cut(StopBuild):
    """Ends a build for a box that has to be cut."""

    def __init__(self, parts: list[Box], error: ProofError | None = None) -> None:
        super().__init__()
        self.parts = parts
        self.error = error
        """Why it cannot be."""


class Builder:
    """Builds the programs of a contract.

    Args:
        target: the model.
        contract: what arguments look like.
        options: how programs are built.
        lowerer: compiles pieces of graphs.
    """

    def __init__(
        self, target: Target, contract: Contract, options: BuildOptions, lowerer: Lowerer
    ) -> None:
        self.target, self.contract, self.options = target, contract, options
        self._lowerer = lowerer
        self._last_cut = self._why_cut = ""
        """What the last cut was made for; the whole text."""

    def variants(self, box: Box, without: frozenset[str]) -> list[Variant]:
        """Return programs that cover a box together; one unless sizes split it.

        Raises:
            ProofError: the model decides by size, and ranges are not to be cut, or it does so in too many ways.
            ServeError: the model is not one graph, or fails.
        """
        waiting: list[tuple[Box, Traced | None]] = [(box, None)]
        done: list[Variant] = []
        started = time.perf_counter()
        while waiting:
            try:
                parts, variant = self._one(*waiting.pop(), without)
            except ServeError as error:
                if not self._why_cut:
                    raise
                raise ProofError(f"{error}\n{self._why_cut}") from error
            waiting += parts
            seconds = time.perf_counter() - started
            if variant is not None:
                done.append(variant)
                text = "%s: the program for %s is built, %d parts are left (%.0f s)"
                log.info(text, self.target.name, variant.box, len(waiting), seconds)
            is_late = bool(parts) and seconds > _MOST_SECONDS
            if len(done) + len(waiting) > _MOST_BOXES or is_late:
                bound = (
                    f"half an hour for {box} allows" if is_late else f"{_MOST_BOXES} ways for {box}"
                )
                raise ProofError(
                    f"{self.target.name} decides by size in more than {bound}; the "
                    f"parts so far: {'; '.join(str(each.box) for each in done[:4])}, ...{self._last_cut}: narrow the "
                    "contract, or hide the decision (a loop over a size, such as a scan, is one) in an operator of "
                    "your own (torchloom.custom_op)"
                    + "".join(f". {each}" for each in multiples_to_promise(self._last_cut))
                )
        return sorted(done, key=lambda variant: [dim.min for dim in variant.box.dims])

    def check_calls(self, variants: Sequence[Variant]) -> None:
        """Refuse a model whose calls change what its programs were traced from.

        Raises:
            ServeError: they do; or the model itself fails.
        """
        if self.options.check == "edges":
            with gradient_mode_of(self.contract):
                check_state(self.target, self.contract, variants)
            for each in variants:
                each.forget_recordings()

    def buckets(self, without: frozenset[str]) -> list[Variant]:
        """Return a program for each of the sizes that serves the sizes below it too.

        Raises:
            ContractError: several sizes vary, or the greatest has no bucket.
            ProofError: rows see one another, or results cannot be cut.
        """

        def program_for(box: Box) -> Variant:
            _, variant = self._one(box, None, without)
            assert variant is not None, "nothing varies, so nothing can be cut"
            return variant

        return bucket_programs(self.target, self.contract, self.options.sizes, without, program_for)

    def _one(
        self, box: Box, traced: Traced | None, without: frozenset[str]
    ) -> tuple[list[tuple[Box, Traced | None]], Variant | None]:
        """Return the program for a box, or the parts that need one each.

        Args:
            box: the sizes.
            traced: a trace that stands for them, if there is one.
            without: paths of optional tensors that are None.
        """
        if traced is None:
            unbacked = self.options.unbacked
            traced = trace(self.target, self.contract, box, unbacked=unbacked, without=without)
        try:
            self._refuse_or_cut(traced, traced.verdicts())  # before anything is compiled
            variant = compiled_program(
                *(self.target, self.contract, self.options, self._lowerer, traced, without),
                look=lambda: self._refuse_or_cut(traced, traced.verdicts()),
            )
            self._refuse_or_cut(traced, variant.verdicts)  # compilers assume more
        except _Cut as cut:
            if cut.error is not None:
                raise cut.error from None
            return self._with_traces(cut.parts, traced), None
        is_checked = self.options.check == "edges"
        if is_checked and (found := difference_in_box(self.target, self.contract, variant)):
            return self._with_traces(self._without_size(box, *found), traced), None
        variant.forget_recordings()
        counter.num_compiles += 1
        return [], variant

    def _with_traces(self, parts: Iterable[Box], traced: Traced) -> list[tuple[Box, Traced | None]]:
        """Return parts of a box, each with its trace where that stands for the part."""
        return [(part, traced.within(part)) for part in parts]

    def _refuse_or_cut(self, traced: Traced, verdicts: Iterable[ProofVerdict]) -> None:
        """End the compilation of a trace that does not hold for all of its box.

        Raises:
            _Cut: it does not; names the parts, or says why there can be none.
        """
        failed = [verdict for verdict in verdicts if not verdict.holds]
        if not failed:
            return
        why = why_not_proven(self.target, traced.box, failed)
        dims = traced.box.varying if self.options.shapes == "split" else ()
        for dim in dims:
            if starts := cuts(failed, dim):
                cause = next(each for each in failed if cuts([each], dim))
                # The first says what to expect.
                level = logging.INFO if self._last_cut else logging.WARNING
                at = f" at {cause.where}" if cause.where else ""
                self._last_cut, self._why_cut = f"; last cut by {cause.guard}{at}", why
                text = "%s: %s is cut at %s; each part is a program, of at most %d in %d s%s"
                bounds = (_MOST_BOXES, _MOST_SECONDS, self._last_cut)
                log.log(level, text, self.target.name, traced.box, starts, *bounds)
                raise _Cut(traced.box.cut(dim.name, starts))
        raise _Cut([], ProofError(why))

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
