"""Which implementation each matrix product of a graph should run on.

    captured graph  ->  its products  ->  measured where the table lacks them  ->  choices

All of this happens before any pass runs, on the rank that comes first: the pass `choose_kernels` only obeys.
What the search for products misses keeps torch's own product.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchloom import ops
from torchloom._torch.onednn import has_onednn_linear
from torchloom.files import write_whole
from torchloom.graph import graph_text
from torchloom.log import get_logger
from torchloom.ops.compute import DEFAULT_KERNEL, KERNELS, Product
from torchloom.ops.library import load_bodies
from torchloom.plan.costs.products import find_products
from torchloom.plan.costs.share import share_once
from torchloom.plan.costs.signature import value_text
from torchloom.plan.costs.store import cache_dir, load_table, save_table
from torchloom.plan.costs.table import CostTable
from torchloom.plan.costs.timing import medians_us

logger = get_logger(__name__)

MARGIN = 0.95
"""Another implementation must take at most this part of the default's time to be chosen."""

Choice = tuple[tuple[str, str], ...]
"""Pairs of (key of a product, name of its implementation), sorted."""


@dataclass
class KernelChooser:
    """Chooses implementations for the products of captured graphs.

    Example:
        >>> chooser = KernelChooser(shared=False)
        >>> chooser(gm, example_inputs)  # doctest: +SKIP
        (('matmul f32 1024x512x1408 nt', 'onednn'),)
    """

    shared: bool = True
    """Whether one rank chooses for all that run a graph; each chooses for itself otherwise."""
    budget_s: float = 0.4
    """Seconds to spend on measuring one product, about."""
    announce: bool = field(default=True)
    """Whether this rank says in the log what was measured."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Choice:
        """Return the choices for one graph, equal on all ranks.

        Raises:
            AgreementError: the rank that chooses failed.
        """

        def make() -> str:
            return json.dumps(self._choose(gm, example_inputs))

        if not self.shared:
            text = make()
        else:  # by content: ranks may capture different graphs, or the same at different times
            text = share_once(_digest(gm, example_inputs), "the choice of kernels", make)
        return tuple((str(key), str(kernel)) for key, kernel in json.loads(text))

    def _choose(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Choice:
        kernels = available_kernels()
        if not kernels:
            return ()
        products = _remembered(gm, example_inputs)
        table = load_table()
        started = time.perf_counter()
        num_measured = measure_products(products, table, kernels, self.budget_s)
        if num_measured:
            if self.announce:
                took = time.perf_counter() - started
                logger.info("measured %d matrix products in %.1f s", num_measured, took)
            try:
                save_table(table)
            except OSError as error:
                logger.warning("measured products cannot be kept: %s", error)
        return fastest(products, table, kernels)


def available_kernels() -> tuple[str, ...]:
    """Return the implementations besides torch's own that this process can use.

    None where the user allows products of lower precision, which torch has faster kernels for.
    """
    if torch.get_float32_matmul_precision() != "highest" or not has_onednn_linear():
        return ()
    load_bodies()  # a plain `torch.compile(backend="torchloom")` has not
    return KERNELS


def measure_products(
    products: Iterable[Product],
    table: CostTable,
    kernels: Sequence[str] = KERNELS,
    budget_s: float = 0.4,
) -> int:
    """Measure each product that the table lacks on each implementation; return how many.

    Random operands of the product's shapes are used; random number generators stay as they were.
    """
    num_measured = 0
    for product in products:
        names = [DEFAULT_KERNEL, *kernels]
        if all(product.entry(name) in table.ops for name in names):
            continue
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            calls = {name: call_of(product, name) for name in names}
            measured = medians_us(calls, torch.device("cpu"), budget_s)
        table.ops.update({product.entry(name): us for name, us in measured.items()})
        num_measured += 1
    return num_measured


def fastest(products: Iterable[Product], table: CostTable, kernels: Sequence[str]) -> Choice:
    """Return the implementations that beat torch's own by the margin; a pure function."""
    chosen = []
    for product in sorted(set(products)):
        default = table.ops.get(product.entry(DEFAULT_KERNEL))
        times = [
            (table.ops[product.entry(kernel)], kernel)
            for kernel in kernels
            if product.entry(kernel) in table.ops
        ]
        if default is not None and times and min(times)[0] <= MARGIN * default:
            chosen.append((product.key, min(times)[1]))
    return tuple(chosen)


def call_of(product: Product, kernel: str) -> Callable[[], torch.Tensor]:
    """Return a call of a product on random operands."""
    a = _operand(product.m, product.k, product.a_layout)
    b = _operand(product.k, product.n, product.b_layout)
    bias = torch.randn(product.n) if product.has_bias else None
    if kernel != DEFAULT_KERNEL:
        return lambda: ops.matmul(a, b, bias, kernel)
    return lambda: torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _operand(rows: int, columns: int, layout: str) -> torch.Tensor:
    return torch.randn(rows, columns) if layout == "n" else torch.randn(columns, rows).t()


def _remembered(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Product]:
    """Return a graph's products, from disk if the graph was seen before."""
    path = cache_dir() / "products" / f"{_digest(gm, example_inputs)}.json"
    known = _read_products(path)
    if known is not None:
        return known
    try:
        found = find_products(gm, example_inputs)
    except Exception as error:  # noqa: BLE001  whatever user code raises without data
        logger.warning(
            "no kernels are chosen, as the graph cannot run on tensors without data: %s",
            str(error).partition("\n")[0],
        )
        return []
    _write(path, json.dumps({"products": found}))
    return found


def _read_products(path: Path) -> list[Product] | None:
    try:
        return [Product(*each) for each in json.loads(path.read_text())["products"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        logger.warning("the products of a graph cannot be kept in %s: %s", path, error)


def _digest(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Return a short hash of all that a graph's products depend on."""
    inputs = [(value_text(each), getattr(each, "requires_grad", None)) for each in example_inputs]
    inner = [graph_text(each.graph) for each in gm.modules() if isinstance(each, fx.GraphModule)]
    weights = [(name, value_text(each)) for name, each in gm.named_parameters()]
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.__version__)
    text = repr((inputs, inner, weights, modes))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
