"""Build a compiled step from a description and a model, in this order:

share      move the weights into memory that ranks share, if a pass reads them there
stand      add up the device memory used outside the graphs; the budget for the graphs is what remains
plan       make a planner for that remainder, if there is a budget or a plan to follow
session    make the compile session: passes, context, planner, what custom passes may see
agree      compare on all ranks what they are about to weave
start      let calls of the model go through the session

Weights in shared memory stay the same parameters with the same values; no other rank writes their part. Eager code and
state dicts, which need whole weights, gather them as before.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

from torch import Tensor, nn

from torchloom.capture import Recordings
from torchloom.deepcompile.profile import Account
from torchloom.deepcompile.site import Book
from torchloom.events import StandingFound
from torchloom.graph import GraphPass, SharedWeights
from torchloom.log import get_logger
from torchloom.memory import WorkspaceTable
from torchloom.pipeline import CompileSession
from torchloom.pipeline.ragged import SharedPlan
from torchloom.pipeline.registry import option_of
from torchloom.runtime import Communicator, WeightStore, make_store
from torchloom.runtime.lines import tell_graph
from torchloom.runtime.transports import shm
from torchloom.shard import layout_of, owners_of
from torchloom.step.compiled import CompiledStep, start_compiled
from torchloom.step.description import StepDescription
from torchloom.step.interfaces import Driver
from torchloom.step.planner import TRANSIT, costs_of, make_planner
from torchloom.step.standing import standing_of


def build_step(
    description: StepDescription, model: nn.Module, comm: Communicator, driver: Driver
) -> CompiledStep:
    """Compile a sharded model in place as described. All ranks must call.

    Args:
        description: equal on all ranks.
        model: sharded; deleting it closes the session.
        comm: the model's communicator.
        driver: steps the model and exchanges facts with the other ranks.

    Raises:
        AgreementError: the ranks were given different passes or options.
        PlanError: the memory used outside the graphs alone exceeds the budget.
        ConfigError: two passes need settings that exclude each other.
    """
    ranks, optimizer = driver.ranks, driver.optimizer
    entry = description.timetable.due(driver.step)
    shared = share_weights(model, comm, description.timetable.all_passes)
    target = description.target
    # Of another device they are not known here; operators at its sizes may not fit this machine either.
    workspaces = WorkspaceTable(measures=target is None or target.device.name == "cpu")
    book = Book(
        layout=description.layout,
        parameters=owners_of(model),
        residency=comm.residents if driver.may_keep else None,
        optimizer=optimizer,
        table=target or costs_of(description.device, description.network),
    )
    driver.host.follow([each.name for each in entry.passes])
    with driver.as_shards():  # optimizer states have the shapes of what the optimizer steps
        standing = standing_of(
            description,
            model,
            driver,
            workspaces,
            copy_bytes=0 if shared is None else shared.copy_bytes,
        )
    planner = make_planner(
        standing, description, book.table, workspaces, over_steps=driver.keeps_over_micro_steps
    )
    book.account = Account(
        standing.base_bytes,
        description.accumulates,
        standing.base_bytes + standing.step_bytes,
        workspaces,
        TRANSIT,
    )
    running = {each.name: each for each in entry.passes}
    comm.residents.bucket_bytes = option_of(running, "bucket", "gather_bytes")
    session = CompileSession(
        passes=entry.passes,
        context=replace(
            description.context, shared_weights=None if shared is None else shared.facts
        ),
        backend=description.backend,
        options=description.inductor_options,
        regions=description.regions,
        recordings=Recordings() if description.cuda_graphs else None,
        strict=description.strict,
        regather=description.layout.stage == 3,
        debug_log=description.debug_log,
        announce=ranks.rank == 0,
        dump_dir=description.dump_dir,
        planner=planner,
        shared_plan=SharedPlan(ranks.rank, ranks.texts),
        book=book,
        standing=StandingFound(
            budget_bytes=standing.budget_bytes,
            base_bytes=standing.base_bytes,
            step_bytes=standing.step_bytes,
            parts=standing.parts,
        ),
        before_forward=driver.before_forward,
        keeps=None if shared is None else shared.store,
        backward_at_once=target is not None,
        tell=tell_graph,
    )
    # Dynamo never frees the code that it compiled for parts of a model; that code holds the session.
    weakref.finalize(model, session.close).atexit = False  # type: ignore[misc]
    ranks.check_facts(f"what {driver.name} weaves", session.facts)
    start_compiled(model, session, **description.compile_kwargs)
    return CompiledStep(
        model=model,
        session=session,
        description=description,
        entry=entry,
        ranks=ranks,
        host=driver.host,
        standing=standing,
        replan_step=description.replan_step,
    )


logger = get_logger(__name__)


@dataclass(frozen=True)
class Shared:
    """Weights in shared memory, and what passes may know of them."""

    store: WeightStore
    facts: SharedWeights
    copy_bytes: int
    """Size of the copies of this rank's shards in the compute dtype, in bytes; 0 without copies."""


def share_weights(
    model: nn.Module, comm: Communicator, passes: tuple[GraphPass, ...]
) -> Shared | None:
    """Move a model's shards into shared memory if its passes read them there.

    All ranks must call. Keep the result for as long as compiled code runs.

    Args:
        model: a sharded model.
        comm: its communicator.
        passes: the passes that run over its graphs.

    Returns:
        None if weights are gathered by copying; rank 0 logs why the ranks cannot share memory.
    """
    layout = layout_of(model)
    wants = any(each.name == "symmetric_gathers" for each in passes)
    if not wants or not comm.shares_memory or not layout.sharded:
        return None
    specs = layout.sharded
    try:
        store = make_store(
            comm, [spec.shard_numel for spec in specs], [spec.compute_dtype for spec in specs]
        )
    except shm.UnavailableError as error:
        if layout.rank == 0:
            logger.warning(
                "compile.symmetric_memory: %s; weights are gathered by copying through shared memory",
                error,
            )
        return None
    params, copy_bytes = owners_of(model), 0
    for spec, region in zip(specs, store.regions, strict=True):
        if spec.compute_dtype == spec.dtype:
            _move(params[spec.name], region.own)
        else:
            copy_bytes += region.own.nbytes
    facts = SharedWeights(
        name=store.name,
        handle=comm.handle,
        params=tuple((spec.name, spec.compute_dtype) for spec in specs),
    )
    return Shared(store, facts, copy_bytes)


def _move(param: nn.Parameter, place: Tensor) -> None:
    place.copy_(param.data)
    param.data = place
