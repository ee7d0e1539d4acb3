"""A program for each bucket: proven for the sizes that it serves, padded, and tried with all kinds of padding."""

from __future__ import annotations

from collections.abc import Callable

from torchloom.errors import ContractError, ProofError
from torchloom.serve.builder.buckets.axes import axes_of, uncut_in
from torchloom.serve.builder.buckets.one_graph import trace_for_all_sizes
from torchloom.serve.builder.buckets.padding import check_padding, check_rows
from torchloom.serve.builder.compare.compare import result_at
from torchloom.serve.builder.options import Sizes
from torchloom.serve.builder.trace import Traced
from torchloom.serve.call.padded import Axes, Padded
from torchloom.serve.call.variant import Variant
from torchloom.serve.contract.box import Box, exact_boxes
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Dim
from torchloom.serve.model.target import Target, gradient_mode_of


def bucket_programs(
    target: Target,
    contract: Contract,
    sizes: Sizes,
    without: frozenset[str],
    program_for: Callable[[Box], Variant],
) -> list[Variant]:
    """Return a program for each size that serves the sizes below it too, down to the one before.

    Args:
        target: the model.
        contract: what arguments look like.
        sizes: of the buckets.
        without: paths of optional tensors that are None.
        program_for: builds the program for a box of one size.

    Raises:
        ContractError: several sizes vary, or the greatest has no bucket.
        ProofError: rows see one another, or results cannot be cut.
    """
    boxes = exact_boxes(contract, sizes)
    whole = Box.of(contract.dims.values())
    others = [*contract.derived, *contract.numbers()]
    simple = len(whole.varying) == 1 and not others
    if not simple or not boxes or boxes[-1].largest != whole.largest:
        raise ContractError(
            "shapes='bucket' takes one varying size, that no other size or number follows, and `sizes` up to the "
            f"greatest of it: the contract "
            f"is {contract}, sizes {sizes!r}"
        )
    (dim,) = whole.varying
    axes = _axes(target, contract, dim, without)
    parts = whole.cut(dim.name, [box.largest[dim.name] + 1 for box in boxes])
    variants, known = [], list[Traced]()
    traces = [trace_for_all_sizes(target, contract, part, without, known) for part in parts]
    # Sizes are recorded as they are built: the largest first.
    programs = [program_for(box) for box in reversed(boxes)][::-1]
    for covered, (traced, tried), variant in zip(parts, traces, programs, strict=True):
        size = covered.largest[dim.name]
        padded = Padded(variant.run, target, contract, dim, size, axes)
        check_padding(target, contract, padded, covered, without, tried)
        if traced is not None:
            check_rows(target, contract, covered, traced, without)
        variant.box, variant.run = covered, padded
        variant.stored["padded"] = {"dim": dim.name, "size": size, "axes": axes}
        variants.append(variant)
    return variants


def _axes(target: Target, contract: Contract, dim: Dim, without: frozenset[str]) -> Axes:
    """Find a dim in the model's result by running it for two sizes."""
    sizes = (max(dim.min, 1), dim.max)
    with gradient_mode_of(contract):
        small, large = (result_at(target, contract, {dim.name: size}, without) for size in sizes)
    if uncut := uncut_in(large):
        raise ProofError(
            f"{target.name} cannot be padded: {uncut}, of which padding cannot be cut off. Return tensors in "
            "tuples, lists, dicts or dataclasses, or use shapes='split'"
        )
    return axes_of(small, large, sizes, dim.name)
