"""A trace made a program: its graph cut into pieces, each piece compiled, and all put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchloom.errors import ServeError, TorchloomError
from torchloom.serve.builder.options import BuildOptions
from torchloom.serve.builder.pieces.lower import Lowered, Lowerer
from torchloom.serve.builder.pieces.piece import Divided
from torchloom.serve.builder.pieces.split import divide
from torchloom.serve.builder.proof_errors import why_not_compiled
from torchloom.serve.builder.trace import Traced
from torchloom.serve.call.stitching import assembled
from torchloom.serve.call.variant import Variant
from torchloom.serve.call.weight_checks import looks_of, with_weight_check
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.target import Target, gradient_mode_of


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
            "shell": traced.graph.shell.to_bytes(),
            "stitching": divided.stitching.to_json(),
            "pieces": [each.stored for each in lowered],
            **how,
            "traced": (traced.first_box or traced.box).to_json(),
            "graph": traced.digest,
        }
    except TypeError as error:
        reasons.append(str(error))
    variant.why_not_stored = "; ".join(reasons)
