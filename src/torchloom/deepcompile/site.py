"""The graph and model on which a DeepCompile pass runs, and the records of all graphs.

Book   one per session: every captured graph with its parameters and its profile, numbered in
       the order in which the graphs were first seen; a graph that is captured again, e.g. when
       a schedule switches, keeps its number
Spot   one graph of the book at one moment: gives a pass its arguments
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from torchloom import ops
from torchloom._torch.aot import copy_graph_module
from torchloom._torch.modes import without_modes
from torchloom.costs import CostTable
from torchloom.deepcompile.handles import GraphParams, OwnedParam, Residency, RuntimeHandle
from torchloom.deepcompile.profile import Account, ProfilingResult
from torchloom.errors import PassError
from torchloom.graph import PassContext, args_of, find, value_of
from torchloom.memory import distinct_bytes, real_like
from torchloom.shard import Layout


@dataclass(eq=False)
class Page:
    """One captured graph."""

    graph_id: int
    params: dict[str, str] = field(default_factory=dict)
    """Parameter by graph input."""
    profile: ProfilingResult = field(default_factory=ProfilingResult)
    manager: GraphParams | None = None

    def read_joint(
        self, gm: fx.GraphModule, needs_backward: bool, handle: str | None = None
    ) -> None:
        """Read from the joint graph which input holds which parameter of our model.

        Args:
            gm: the graph before the split.
            needs_backward: whether it also computes gradients.
            handle: the communicator of our model, where the graph may hold others' parameters;
                None: all.
        """
        self.profile = ProfilingResult(needs_backward=needs_backward)
        self.manager = None
        read = (args_of(n) for op in (ops.gather, ops.replicate) for n in find(gm.graph, op))
        self.params = {
            shard.name: str(param)
            for shard, *_, own, param in read
            if isinstance(shard, fx.Node) and shard.op == "placeholder" and handle in (None, own)
        }
        results: Any = gm.graph.output_node().args[0]
        num_results = len(results) if isinstance(results, list | tuple) else 1
        num_inputs = sum(
            not node.name.startswith("tangents") for node in gm.graph.find_nodes(op="placeholder")
        )
        # A joint graph returns a gradient, or None, for each of its inputs.
        self.profile.num_fwd_outputs = num_results - num_inputs if needs_backward else num_results


@dataclass(eq=False)
class Book:
    """The captured graphs of one session, and the parameters that passes asked to keep gathered."""

    layout: Layout | None = None
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    residency: Residency | None = None
    optimizer: Any = None
    table: CostTable = field(default_factory=CostTable)
    account: Account = field(default_factory=Account)
    residents: set[str] = field(default_factory=set)
    """Parameters that passes keep gathered."""
    asked: set[str] = field(default_factory=set)
    """Parameters that passes of this compile have asked to keep; passes see only these as resident."""
    is_repeated: bool = False
    """Whether passes run again for what they asked: with other times than before they may rank weights otherwise, and the
    first choice stands."""
    allowed_bytes: float = math.inf
    """The `mem_budget` of the pass that asked last."""
    registered: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _pages: dict[str, Page] = field(default_factory=dict)

    def page(self, digest: str) -> Page:
        """Return the page of a captured graph, a new one for a new graph."""
        return self._pages.setdefault(digest, Page(len(self._pages)))

    def bytes_before(self, page: Page, is_backward: bool) -> int:
        """Return what is on the device because of other graphs when one begins: backward graphs run from the last on."""
        pages = self._pages.values()
        total = self.account.base_bytes
        total += sum(each.profile.kept_bytes for each in pages if each.graph_id < page.graph_id)
        if is_backward and not self.account.counts_gradients:
            later = [each for each in pages if each.graph_id > page.graph_id]
            params = [self.parameters[name] for each in later for name in each.params.values()]
            total += distinct_bytes(param for param in params if param.requires_grad)
        return total

    @property
    def graph_order(self) -> list[tuple[int, bool]]:
        """Of each graph: its id and whether it has a backward, in the order of their capture."""
        return [(page.graph_id, page.profile.needs_backward) for page in self._pages.values()]

    @property
    def profiles(self) -> dict[int, ProfilingResult]:
        """The profiles by graph id."""
        return {page.graph_id: page.profile for page in self._pages.values()}

    @property
    def managers(self) -> dict[int, GraphParams]:
        """The parameters of each graph, by graph id."""
        pages = self._pages.values()
        return {page.graph_id: page.manager for page in pages if page.manager is not None}

    def owned(self) -> dict[str, OwnedParam]:
        """Return the model's parameters by name, with their ids."""
        return {
            spec.name: OwnedParam(self.parameters[spec.name], spec, index, self.asked)
            for index, spec in enumerate(self.layout or ())
            if spec.name in self.parameters
        }

    def handle(self, budget_bytes: float) -> RuntimeHandle:
        """Return the runtime handle that passes receive as `nz3`.

        Args:
            budget_bytes: what a step may allocate with the weights that passes keep.
        """
        specs = dict(enumerate(self.layout or ()))

        def keep(param: str) -> None:
            try:
                self.check_residents(self.residents | {param}, budget_bytes)
            except PassError:
                if self.is_repeated and param not in self.residents:
                    return
                raise
            self.allowed_bytes = budget_bytes
            self.asked.add(param)
            self.residents.add(param)

        return RuntimeHandle(specs, keep, self.registered, self.residency)

    def check_residents(self, params: Collection[str], budget_bytes: float) -> None:
        """Refuse weights that passes keep gathered beside a step that then needs more than its budget.

        Args:
            params: names of the weights.
            budget_bytes: what a step may allocate with them.

        Raises:
            PassError: it does, by the graphs known so far.
        """
        if self.layout is None or not params:
            return
        specs = [self.layout[name] for name in sorted(params)]
        held_bytes = sum(spec.numel * spec.compute_dtype.itemsize for spec in specs)
        peak = max([self.account.step_bytes, *(each.peak_bytes for each in self.profiles.values())])
        if peak + held_bytes > budget_bytes:
            raise PassError(
                f"nz3.set_persistent keeps {held_bytes:,} bytes gathered ({', '.join(each.name for each in specs)}), but a "
                f"step allocates {peak:,} bytes beside them and mem_budget is {budget_bytes:,.0f}: keep fewer, or raise it"
            )

    def start_over(self, *, forget: bool) -> None:
        """Begin another compile; `forget` also drops the resident parameters of earlier ones."""
        self.asked.clear()
        if forget:
            self.residents.clear()
        self.is_repeated = bool(self.residents)
        if self.residency is not None:
            self.residency.clear()  # the next plan may keep others


@dataclass(eq=False)
class Spot:
    """One graph as a pass is about to see it."""

    book: Book
    page: Page
    world_size: int
    default_budget_bytes: int
    batch_bytes: int = 0
    """Inputs of the graph that are neither parameters nor buffers."""
    _seen: str = ""

    def argument(self, name: str, gm: fx.GraphModule, ctx: PassContext) -> Any:
        """Return the value of one argument of a pass.

        Args:
            name: one of `forms.NAMES`.
            gm: the graph that the pass edits.
            ctx: what torchloom tells its own passes of it.
        """
        if name in _FIGURES:
            self._refresh(gm, ctx)
        budget = ctx.memory_budget_bytes
        budget = float(self.default_budget_bytes if budget is None else budget)
        values: dict[str, Callable[[], Any]] = {
            "gm": lambda: gm,
            "graph": lambda: gm.graph,
            "ctx": lambda: ctx,
            "graph_id": lambda: self.page.graph_id,
            "bwd": lambda: ctx.is_backward,
            "mem_budget": lambda: budget,
            "ds_optimizer": lambda: self.book.optimizer,
            "graph_order": lambda: self.book.graph_order,
            "profiling_results": lambda: self.book.profiles,
            "param_manager": lambda: self.book.managers,
            "nz3": lambda: self.book.handle(budget),
            "create_inputs_fn": lambda: lambda: _inputs_of(gm.graph),
        }
        return values[name]()

    def _refresh(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        """Update figures and parameters after earlier passes have changed the graph."""
        seen = f"{id(gm.graph)} {gm.graph!s}"
        if seen == self._seen:
            return
        self._seen = seen
        page, layout = self.page, self.book.layout
        start_bytes = self.book.bytes_before(page, ctx.is_backward) + self.batch_bytes
        page.profile.take(
            gm.graph,
            ctx.is_backward,
            self.book.table,
            self.world_size,
            self.book.account,
            start_bytes,
        )
        if layout is not None and not ctx.is_backward:
            page.manager = GraphParams(gm.graph, page.params, layout, self.book.owned())
            page.profile.param_indices = page.manager.indices

    def leave(self, gm: fx.GraphModule, ctx: PassContext) -> None:
        """Keep the graph as the passes left it, in a copy that no compiler changes.

        Raises:
            PassError: what passes keep gathered does not fit beside it.
        """
        if self._seen:
            kept = copy_graph_module(gm)
            self._seen = ""
            self._refresh(kept, ctx)
            self.book.check_residents(self.book.residents, self.book.allowed_bytes)


_FIGURES = ("profiling_results", "param_manager", "nz3")
"""Arguments for which a graph is measured, and each node gets its times and bytes in its meta."""


def _inputs_of(graph: fx.Graph) -> list[Any]:
    """Return real tensors that a graph can be run with: shards, a batch, what forward keeps."""
    with without_modes():  # compilers call passes under fake tensors
        return [real_like(value_of(node)) for node in graph.find_nodes(op="placeholder")]
