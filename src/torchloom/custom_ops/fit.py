"""A fake for an operator, found by watching it: formulas that fit the sizes of its results.

    x: (4, 8), n=3  ->  (7, 8)          sizes of the first result: x.shape[0] + n, x.shape[1]
    x: (5, 8), n=3  ->  (8, 8)          dtype of x, contiguous

Half of the calls are fitted, the other half must come out right. What comes of it is source text, to
be read before it is trusted: formulas that fit what was tried are no proof.
"""

from __future__ import annotations

import itertools
import linecache
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchloom.custom_ops.dims import free_dims
from torchloom.custom_ops.samples import Sample, family, sample_of
from torchloom.custom_ops.target import CheckedOperator, strides_of, target_of, tensors_in
from torchloom.errors import OpError

_FACTORS = (2, 3, 4, 8)
Row = dict[str, int]
"""Sizes and whole numbers that a call was given, by the expression that reads them."""


@dataclass(frozen=True)
class Proposal:
    """A fake that fits what was seen."""

    source: str
    """Python text of a function; read it before it is used."""
    fake: Callable[..., Any]
    """The function."""
    num_calls: int
    """How many calls it was fitted to and checked on."""


@dataclass(frozen=True)
class _Seen:
    """One call of the operator."""

    sample: Sample
    row: Row
    tensors: dict[str, Tensor]
    """Tensor arguments, by the expression that reads them."""
    result: Any


def propose_fake(
    op: Any, samples: Sequence[Sequence[Any] | Mapping[str, Any]], *, count: int = 80
) -> Proposal:
    """Propose a fake by fitting sizes, strides and dtypes of results over sampled inputs.

    Args:
        op: the operator; see `check_op`.
        samples: examples of its arguments: tuples, or dicts of keyword arguments.
        count: inputs to make of each example.

    Raises:
        OpError: no formula fits; the text says for what. Nothing is guessed.

    Example:
        >>> @torch.library.custom_op("docs::rows", mutates_args=())
        ... def rows(x: torch.Tensor, n: int) -> torch.Tensor:
        ...     return x.new_zeros(x.shape[0] + n, x.shape[1])
        >>> print(propose_fake(rows, [(torch.randn(4, 8), 3)]).source.splitlines()[-1])
            return x.new_empty((x.shape[0] + n, x.shape[1]))
    """
    target = target_of(op)
    if not samples:
        raise OpError(f"no fake can be proposed for {target.name} without samples of its arguments")
    seen: list[_Seen] = []
    for given in samples:
        example = sample_of((), given) if isinstance(given, Mapping) else sample_of(given)
        passed = target.named(list(example.args), dict(example.kwargs))
        left_out = {name: each for name, each in target.defaults.items() if name not in passed}
        seen += _watch(target, replace(example, kwargs={**example.kwargs, **left_out}), count)
    if len(seen) < 8:
        raise OpError(
            f"no fake can be proposed for {target.name}: it took only {len(seen)} of the inputs made "
            "from its samples; give more samples, of different sizes"
        )
    random.Random(0).shuffle(seen)  # layouts and sizes come in turns: each half needs all of them
    fitted, held_out = seen[::2], seen[1::2]
    lines = _body(target, fitted)
    source = "\n".join(
        [
            f"def fake_{target.name.rpartition('::')[2]}({target.signature}):",
            f'    """Fits {len(seen)} calls of {target.name}; read before use."""',
            *textwrap.indent("\n".join(lines), "    ").splitlines(),
        ]
    )
    fake = _compiled(source, target)
    for each in held_out:
        _verify(target, fake, each, source)
    return Proposal(source, fake, len(seen))


def _watch(target: CheckedOperator, example: Sample, count: int) -> Iterator[_Seen]:
    dims = free_dims(target, example)
    numbers = [example, *_other_numbers(example)]
    for sample in itertools.chain.from_iterable(family(each, dims, count) for each in numbers):
        args, kwargs = sample.make()
        try:
            result, _ = target.run(args, kwargs)
        except Exception:  # noqa: BLE001 - the operator takes no such input
            continue
        _check_values_do_not_matter(target, sample, result)
        yield _seen(target, sample, result)


def _check_values_do_not_matter(target: CheckedOperator, sample: Sample, result: Any) -> None:
    args, kwargs = sample.make()
    for tensor in tensors_in([*args, *kwargs.values()]):
        tensor.detach().zero_()
    try:
        other, _ = target.run(args, kwargs)
    except Exception:  # noqa: BLE001 - zeros may be refused where other values are not
        return
    sizes = [tuple(each.shape) for each in tensors_in(result)]
    if sizes != [tuple(each.shape) for each in tensors_in(other)]:
        raise OpError(
            f"no fake can be proposed for {target.name}: the sizes of its results depend on values, not on "
            "sizes alone; write one with torch.library.get_ctx().new_dynamic_size()"
        )


def _other_numbers(example: Sample) -> Iterator[Sample]:
    """Yield the example with other whole numbers as arguments."""
    for at, value in enumerate(example.args):
        if type(value) is int:
            for other in (value + 1, 2 * value + 1):
                args = (*example.args[:at], other, *example.args[at + 1 :])
                yield replace(example, args=args)
    for name, value in example.kwargs.items():
        if type(value) is int:
            for other in (value + 1, 2 * value + 1):
                yield replace(example, kwargs={**example.kwargs, name: other})


def _seen(target: CheckedOperator, sample: Sample, result: Any) -> _Seen:
    args, kwargs = sample.make()
    row: Row = {}
    tensors: dict[str, Tensor] = {}
    for name, value in target.named(args, kwargs).items():
        if type(value) is int:
            row[name] = value
        parts = [(name, value)]
        if isinstance(value, list):
            parts = [(f"{name}[{i}]", each) for i, each in enumerate(value)]
        for path, each in parts:
            if isinstance(each, Tensor):
                tensors[path] = each
                row |= {f"{path}.shape[{dim}]": size for dim, size in enumerate(each.shape)}
    return _Seen(sample, row, tensors, result)


def _body(target: CheckedOperator, seen: Sequence[_Seen]) -> list[str]:
    first = seen[0].result
    if first is None:
        return ["return None"]
    counts = {len(tensors_in(each.result)) for each in seen}
    if len(counts) != 1 or not all(
        isinstance(each, Tensor)
        for each in (first if isinstance(first, (list, tuple)) else [first])
    ):
        raise OpError(
            f"no fake can be proposed for {target.name}: it returns other things than a fixed number "
            "of tensors; write one"
        )
    made = [
        _expression(target, number, seen, [tensors_in(each.result)[number] for each in seen])
        for number in range(counts.pop())
    ]
    if isinstance(first, Tensor):
        return [f"return {made[0]}"]
    opening, closing = ("[", "]") if isinstance(first, list) else ("(", ",)")
    return [f"return {opening}", *(f"    {each}," for each in made), closing.lstrip(",")]


def _expression(
    target: CheckedOperator, number: int, seen: Sequence[_Seen], results: Sequence[Tensor]
) -> str:
    """Return the expression that makes one result."""

    def refuse(what: str, values: Any) -> OpError:
        return OpError(
            f"no fake can be proposed for {target.name}: no formula fits the {what} of result "
            f"{number}, seen: {values}; write the fake by hand"
        )

    ranks = {result.dim() for result in results}
    if len(ranks) != 1:
        raise refuse("number of dimensions", sorted(ranks))
    rows = [each.row for each in seen]
    shape = []
    for dim in range(ranks.pop()):
        sizes = [result.shape[dim] for result in results]
        found = _formula(rows, sizes)
        if found is None:
            raise refuse(f"size {dim}", sorted(set(sizes))[:8])
        shape.append(found)
    owners = list(seen[0].tensors)
    base = owners[0] if owners else None
    if base is None:
        raise refuse("device", "no tensor among its arguments")
    dtype = _dtype(seen, results)
    if dtype is None:
        raise refuse("dtype", sorted({str(result.dtype) for result in results}))
    same = [path for path in owners if _keeps_layout(seen, results, path)]
    options = "" if dtype == f"{base}.dtype" else f", dtype={dtype}"
    if all(result.is_contiguous() for result in results):
        tail = "," if len(shape) == 1 else ""
        return f"{base}.new_empty(({', '.join(shape)}{tail}){options})"
    if same:
        options = "" if dtype == f"{same[0]}.dtype" else f", dtype={dtype}"
        return f"torch.empty_like({same[0]}{options})"
    raise refuse("strides", sorted({result.stride() for result in results})[:8])


def _keeps_layout(seen: Sequence[_Seen], results: Sequence[Tensor], path: str) -> bool:
    return all(
        each.tensors[path].shape == result.shape
        and strides_of(torch.empty_like(each.tensors[path])) == strides_of(result)
        for each, result in zip(seen, results, strict=True)
    )


def _dtype(seen: Sequence[_Seen], results: Sequence[Tensor]) -> str | None:
    """Return the expression of a dtype."""
    paths = list(seen[0].tensors)
    for path in paths:
        if all(s.tensors[path].dtype == r.dtype for s, r in zip(seen, results, strict=True)):
            return f"{path}.dtype"
    if len({result.dtype for result in results}) == 1:
        return str(results[0].dtype)
    for one, other in itertools.combinations(paths, 2):
        if all(
            torch.promote_types(s.tensors[one].dtype, s.tensors[other].dtype) == r.dtype
            for s, r in zip(seen, results, strict=True)
        ):
            return f"torch.promote_types({one}.dtype, {other}.dtype)"
    return None


def _formula(rows: Sequence[Row], sizes: Sequence[int]) -> str | None:
    """Return the simplest expression over the rows that gives all sizes."""
    for text, value in _formulas(list(rows[0])):
        if all(value(row) == size for row, size in zip(rows, sizes, strict=True)):
            return text
    # A constant fits what never changed; it comes last but one, as sizes are rarely constants.
    if len(set(sizes)) == 1:
        return str(sizes[0])
    return _affine(rows, sizes)


def _formulas(names: Sequence[str]) -> Iterator[tuple[str, Callable[[Row], int]]]:
    for a in names:
        yield a, lambda row, a=a: row[a]
    for a, k in itertools.product(names, _FACTORS):
        yield f"{a} * {k}", lambda row, a=a, k=k: row[a] * k
        yield f"{a} // {k}", lambda row, a=a, k=k: row[a] // k
        yield f"({a} + {k - 1}) // {k}", lambda row, a=a, k=k: (row[a] + k - 1) // k
    for a, b in itertools.combinations(names, 2):
        yield f"{a} + {b}", lambda row, a=a, b=b: row[a] + row[b]
        yield f"{a} * {b}", lambda row, a=a, b=b: row[a] * row[b]
    for a, b in itertools.permutations(names, 2):
        yield f"{a} - {b}", lambda row, a=a, b=b: row[a] - row[b]
        yield f"{a} // {b}", lambda row, a=a, b=b: row[a] // row[b] if row[b] else -1
        yield f"{a} - {b} + 1", lambda row, a=a, b=b: row[a] - row[b] + 1


def _affine(rows: Sequence[Row], sizes: Sequence[int]) -> str | None:
    """Return a sum with whole factors, by least squares; None where none fits."""
    names = list(rows[0])
    matrix = torch.tensor(
        [[*(row[name] for name in names), 1] for row in rows], dtype=torch.float64
    )
    wanted = torch.tensor(sizes, dtype=torch.float64)
    # The smallest solution splits a factor among sizes that are always equal: take one of each.
    columns = list(range(len(names) + 1))
    for at in range(len(names)):
        twins = [i for i in columns if i < at and torch.equal(matrix[:, i], matrix[:, at])]
        if twins:
            columns.remove(at)
    solved = torch.linalg.lstsq(matrix[:, columns], wanted.unsqueeze(1), driver="gelsd").solution
    factors = [round(each) for each in solved.squeeze(1).tolist()]
    if not torch.equal(matrix[:, columns] @ torch.tensor(factors, dtype=torch.float64), wanted):
        return None
    terms = []
    for column, factor in zip(columns, factors, strict=True):
        if factor:
            name = names[column] if column < len(names) else ""
            terms.append(str(factor) if not name else name if factor == 1 else f"{factor} * {name}")
    return " + ".join(terms) or "0"


def _compiled(source: str, target: CheckedOperator) -> Callable[..., Any]:
    """Run the source; tracebacks and `inspect.getsource` find its lines."""
    filename = f"<fake of {target.name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(source, filename, "exec"), names)
    return next(value for name, value in names.items() if name.startswith("fake_"))


def _verify(target: CheckedOperator, fake: Callable[..., Any], seen: _Seen, source: str) -> None:
    args, kwargs = seen.sample.make()
    results = tensors_in(seen.result)
    try:
        proposed = tensors_in(fake(*args, **kwargs))
    except Exception as error:  # what is proposed runs for the first time and may raise anything
        raise OpError(
            f"no fake can be proposed for {target.name}: what fits one half of the calls fails on "
            f"{seen.sample}: {error}\n{source}"
        ) from error
    for real, like in zip(results, proposed, strict=True):
        is_same = (
            real.shape == like.shape
            and real.dtype == like.dtype
            and strides_of(real) == strides_of(like)
        )
        if not is_same:
            raise OpError(
                f"no fake can be proposed for {target.name}: what fits one half of the calls gives "
                f"{tuple(like.shape)} {like.dtype} on {seen.sample}, the operator "
                f"{tuple(real.shape)} {real.dtype}\n{source}"
            )
