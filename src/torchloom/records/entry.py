"""The record of one entry: a compiled version of a function, with all that torch made for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Guard:
    """One condition under which an entry may be used."""

    source: str
    """The value that is checked, as Dynamo writes it: `L['x']`."""
    kind: str
    """Dynamo's name of the check, e.g. TENSOR_MATCH."""
    text: str
    """The check as code."""
    english: str
    user_line: str | None = None
    """`file:line` of the user's code that made the guard, where known."""
    num_fails: int = 0
    """How often it was the guard that rejected a call."""


@dataclass(kw_only=True, slots=True)
class Artifact:
    """A text from one stage of the compiler: a graph, generated code."""

    kind: str
    """dynamo, joint, forward, backward, inference, post_grad, output_code, runnable; body: what calls of it
    stand for, titled "NAME HALF: layer x CALLS"."""
    title: str
    text: str


@dataclass(kw_only=True, slots=True)
class Kernel:
    """One generated kernel."""

    name: str
    language: str
    source: str
    nodes: list[str] = field(default_factory=list)
    """What it computes: nodes of the graph; for C++ kernels, the operators in the kernel's name."""


@dataclass(kw_only=True, slots=True)
class Break:
    """A place where a graph had to end."""

    reason: str
    explanation: str
    hints: list[str]
    user_stack: list[str]
    """`file:line in function`, innermost last."""
    gb_type: str = ""
    """Upstream's id of this sort of break, e.g. GB0170, or its title."""
    doc_url: str | None = None
    count: int = 1
    """How often Dynamo met it; each recompile meets it again."""

    @property
    def place(self) -> str:
        """The innermost line of the user's code."""
        return self.user_stack[-1] if self.user_stack else "unknown"


@dataclass(kw_only=True, slots=True)
class Recompile:
    """Why an older entry did not fit the call that made a new one."""

    entry: str
    """Compile id of the older entry."""
    source: str
    expected: str
    actual: str
    text: str
    fix: str

    @property
    def sentence(self) -> str:
        """What the older entry expected, and what it got."""
        got = self.actual or "another value"
        return f"{self.source or 'the call'}: expected {self.expected}, got {got}"


@dataclass(kw_only=True, slots=True)
class Span:
    """A phase of a compile, in microseconds on the session's clock."""

    name: str
    start_us: float
    duration_us: float
    depth: int = 0


@dataclass(kw_only=True, slots=True)
class CacheUse:
    """What a cache of the compiler did."""

    cache: str
    """"fx_graph" or "aotautograd"."""
    outcome: str
    """hit, miss or bypass."""
    reason: str = ""


@dataclass(kw_only=True, slots=True)
class PassRun:
    """A torchloom pass over one graph of this entry."""

    name: str
    stage: str
    graph: str
    num_edits: int
    duration_s: float
    before: str | None = None
    """Text of the graph before the pass; None where it changed nothing."""
    after: str | None = None
    curve: list[int] | None = None
    """Bytes alive after each node of the graph after the pass: inputs and results, no memory reused."""


@dataclass(kw_only=True, slots=True)
class Continuation:
    """The code behind a graph break of an entry: one for each branch, taken or not."""

    name: str
    """Global name by which the entry calls it."""
    function: str
    line: int
    source: str
    """What it does, as readable pseudo-source."""
    num_entries: int = 0
    """Compiled versions when the watch ended; 0 if the branch was never taken or not compiled."""


@dataclass(kw_only=True, slots=True)
class Entry:
    """One compiled version of a function."""

    compile_id: str
    epoch: int = 0
    """Number of `torch._dynamo.reset()` calls before it; each resets the ids to 0/0."""
    backend: str = ""
    attempts: int = 1
    status: str = "live"
    """live, or why it is not: "invalidated: ...", "evicted", "failed: ..."."""
    trigger: dict[str, str] = field(default_factory=dict)
    """The arguments of the call that made it: tensors as dtype, shape, gradient; constants as guarded."""
    guards: list[Guard] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    passes: list[PassRun] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    """Why each older entry was rejected; empty for the first entry."""
    pseudo_source: str = ""
    """What the transformed bytecode does."""
    bytecode: str = ""
    """What runs, as Dynamo wrote it."""
    original_bytecode: str = ""
    """What Python compiled from the source."""
    continuations: list[Continuation] = field(default_factory=list)
    """The code behind its graph breaks, in the order of the calls."""
    stack: list[str] = field(default_factory=list)
    """The calls of the user's code that led to this compile: `file:line in function`, innermost last."""
    spans: list[Span] = field(default_factory=list)
    caches: list[CacheUse] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    num_hits: int = 0
    """Calls that used this entry during the watch."""
    is_counted: bool = True
    """Whether `num_hits` is known: calls are counted at graphs, and an entry may have none."""
    guard_check_us: float | None = None
    """Microseconds of one check of all guards with warm caches, measured right after they were built."""

    def artifact(self, kind: str) -> str | None:
        """Return the text of the last artifact of a kind, or None."""
        return next((a.text for a in reversed(self.artifacts) if a.kind == kind), None)

    @property
    def is_recompile(self) -> bool:
        """Whether torch made it because older entries did not fit."""
        forward = self.metrics.get("forward") or {}
        return bool(self.recompiles or forward.get("recompile_reason"))

    @property
    def compile_s(self) -> float:
        """Seconds that compiling took, backward graphs included where they were compiled."""
        return float(self.metrics.get("compile_s", 0.0))
