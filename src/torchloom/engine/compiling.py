"""`Engine.compile` compiles the model, and the engine tells of its graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchloom.engine.state import EngineState
from torchloom.errors import EngineError
from torchloom.log import get_logger
from torchloom.loop.compile import compile_step
from torchloom.pipeline import CompileReport, PassContract, PassItem, Schedule
from torchloom.plan import Plan
from torchloom.step import CompileCall, Driver

logger = get_logger(__name__)


class Compiling(EngineState):
    """Part of `Engine`: it compiles the model."""

    def register_compile_pass(
        self, name: str, fn: Callable[..., Any], contract: PassContract | None = None
    ) -> None:
        """Give a pass a name that this engine's schedules can use.

        Other engines do not know the pass.

        Args:
            name: the name.
            fn: the pass; see `torchloom.register_compile_pass` for its arguments.
            contract: what it needs and provides.

        Raises:
            PassOrderError: the name is one of torchloom's.
            PassError: the function has a parameter that no form of a pass has.
        """
        self._passes.register(name, fn, contract)

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
        compiled_autograd_enabled: bool = False,
        passes: Sequence[PassItem] | None = None,
    ) -> None:
        """Compile the model in place; passes weave sharding and communication into its graphs.

        Args:
            backend: "inductor" (default), "aot_eager", "eager", any registered backend, a path
                "package.module.function", or a callable `(gm, example_inputs) -> callable`.
            compile_kwargs: more arguments for `torch.compile`, e.g. `{"dynamic": True}`.
            schedule: `[(step, [pass, ...]), ...]`: the passes to run from each optimizer step on. A pass is a
                name, a function, a `GraphPass`, or a pair of one of them and a memory budget.
            compiled_autograd_enabled: accepted for DeepSpeed compatibility; no effect, as backward graphs
                are compiled anyway.
            passes: passes to run from the start, instead of the stage's preset or a schedule.

        Raises:
            CompileError: torch.compile does not work here.
            ConfigError: the backend cannot be found, or both passes and a schedule are given.
            EngineError: the engine is compiled already.
            PassOrderError: the passes are unknown, contradict each other, or lack what they need.
            AgreementError: the ranks were given different passes or options.
        """
        if self._compiled is not None:
            asks = backend or compile_kwargs or passes or schedule
            is_configured = self.config.compile.enabled
            if is_configured and not asks:
                return  # initialize() has done it, as the config asked
            raise EngineError(
                "this engine is compiled already: call engine.compile() once, with all options"
                + (", or drop compile.enabled" if is_configured else "")
            )
        call = CompileCall(
            backend=backend,
            compile_kwargs=compile_kwargs,
            passes=passes,
            schedule=schedule,
            registry=self._passes,
        )
        if compiled_autograd_enabled:
            logger.warning("compiled_autograd_enabled has no effect: backward graphs are compiled")
        if self.config.batch.accumulation_steps == 1:
            self.local.average_in_backward(self.module)
        rounding = self.offloads.rounding
        with self._account.charged():
            driver = Driver(
                ranks=self._agreement,
                host=self.offloads,
                optimizer=self.optimizer,
                update=None if rounding is None else rounding.update,
                step=self.global_steps,
                as_shards=self.local.as_shards,
            )
            self._compiled = compile_step(
                self.config, call, self.module, self.world.comm, self.world.device, driver
            )

    @property
    def is_compiled(self) -> bool:
        """Whether `compile()` has been called."""
        return self._compiled is not None

    def is_deepcompile_enabled(self) -> bool:
        """Whether the config enables `compile.deepcompile`."""
        return self.config.compile.deepcompile

    def is_deepcompile_active(self) -> bool:
        """Whether `compile()` has been called, so that passes weave the model's graphs."""
        return self.is_compiled

    def compile_report(self) -> CompileReport:
        """Return a record of each graph so far: woven, taken from a cache, or left to run eagerly."""
        return CompileReport() if self._compiled is None else self._compiled.session.report

    def plan(self) -> Plan:
        """Return the memory plan of the graphs compiled so far; see `compile.memory_budget`."""
        if self._compiled is None:
            return Plan(world_size=self.world.comm.world_size, budget_bytes=None, base_bytes=0)
        return self._compiled.session.plan()

    def get_compile_time(self) -> list[tuple[str, int, int, float]]:
        """Return `("fwd" or "bwd", place, graph id, compile seconds)` of each compiled graph."""
        return self.compile_report().compile_time

    def _advance(self) -> None:
        """Tell the compiled step, if there is one, which optimizer step comes next."""
        if self._compiled is not None:
            with self._account.charged():
                self._compiled.advance(self.global_steps)
