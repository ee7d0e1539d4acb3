"""Records built by hand for the tests of the page, and that they are records."""

from __future__ import annotations

import random

from torchloom.records import (
    Artifact,
    Break,
    CacheUse,
    Entry,
    EventRow,
    Function,
    Guard,
    Kernel,
    PassRun,
    Recompile,
    Session,
    Span,
    from_json,
    to_json,
)

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"'><svg onload=document.title='owned'>",
    "{{ 7 * 7 }}{% raw %}",
    "<!--<script>",  # last: as markup it would hide what follows
)

_GRAPH = """class GraphModule(torch.nn.Module):
    def forward(self, L_x_: "f32[10][1]cpu"):
        l_x_ = L_x_

        # File: /home/me/f.py:2 in f, code: y = torch.exp(-x)
        neg: "f32[10][1]cpu" = -l_x_;  l_x_ = None
        y: "f32[10][1]cpu" = torch.exp(neg);  neg = None
        return (y,)
"""


def small_session() -> Session:
    """Return a record with one of everything."""
    shared = "\n".join(f"%v{i} : f32[4] = aten.neg(%v{i - 1})" for i in range(1, 40))
    broken = Break(
        reason="Data-dependent branching",
        explanation="Dynamo does not trace `if tensor`.",
        hints=["Use `torch.cond`."],
        user_stack=["/home/me/main.py:9 in main", "/home/me/f.py:3 in f"],
        gb_type="GB0170",
        doc_url="https://example.org/gb0170.html",
    )
    first = Entry(
        compile_id="0/0",
        backend="inductor",
        guards=[
            Guard(source="G['torch']", kind="ID_MATCH", text="same", english="global torch is same"),
            Guard(
                source="L['x']", kind="TENSOR_MATCH", text="check_tensor(x)", num_fails=1,
                english="argument x is a float32 tensor", user_line="/home/me/f.py:2",
            ),
        ],
        artifacts=[
            Artifact(kind="dynamo", title="captured by Dynamo", text=_GRAPH),
            Artifact(kind="output_code", title="generated code", text="def call(args):\n    pass\n"),
        ],
        kernels=[Kernel(name="k0", language="C++", source="void k() { return; }\n", nodes=["y"])],
        passes=[
            PassRun(
                name="place", stage="lowered", graph="graph0", num_edits=1, duration_s=0.01,
                before="%x : f32[4] = placeholder\n" + shared,
                after="%x : f32[4] = placeholder\n%z : f32[4] = aten.exp(%x)\n" + shared,
                curve=[16, 32, 48, 16],
            )
        ],
        breaks=[broken],
        pseudo_source="def f(x):\n    return g(x)\n",
        bytecode="RESUME\nRETURN_VALUE\n",
        spans=[Span(name="dynamo", start_us=1e15, duration_us=900.0),
               Span(name="backend", start_us=1e15 + 100, duration_us=500.0, depth=1)],
        caches=[CacheUse(cache="fx_graph", outcome="miss", reason="new")],
        metrics={"compile_s": 0.5, "forward": {"guard_count": 2}},
        num_hits=3,
        guard_check_us=1.5,
    )  # fmt: skip
    second = Entry(
        compile_id="0/1",
        recompiles=[Recompile(
            entry="0/0", source="argument x", expected="size(0) == 10", actual="8",
            text="size mismatch", fix="mark_dynamic(x, 0)",
        )],
    )  # fmt: skip
    rest = Function(name="torch_dynamo_resume_in_f_at_3", file="/home/me/f.py", line=3)
    rest.entries.append(Entry(compile_id="1/0"))
    source = "def f(x):\n    y = torch.exp(-x)\n    if y.sum() > 0:\n        return y\n"
    function = Function(name="f", file="/home/me/f.py", line=1, source=source)
    function.entries += [first, second]
    function.children.append(rest)
    event = EventRow(kind="PassesSkipped", at_s=1e9, data={"reason": "demo"})
    return Session(torchloom="0.1", torch="2.13", functions=[function], events=[event])


def hostile_session(text: str) -> Session:
    """Return a record whose every text is `text`."""

    def fill(value: object) -> object:
        if isinstance(value, str):
            return text
        if isinstance(value, list):
            return [fill(each) for each in value]
        if isinstance(value, dict):
            keep = {"schema", "version", "compile_id", "kind"}
            return {k: v if k in keep else fill(v) for k, v in value.items()}
        return value

    filled = fill(to_json(small_session()))
    assert isinstance(filled, dict)
    return from_json(filled)


def run_session() -> Session:
    """Return a record of a run of two steps on rank 1 of 2, with collectives that overlap."""
    session = small_session()
    session.rank, session.world_size = 1, 2
    for step in range(2):
        begin = 1e9 + step
        for phase, at in (("forward", 0.0), ("backward", 0.3), ("step", 0.8)):
            data = {"phase": phase, "step": step, "start_s": begin + at, "duration_s": 0.19}
            session.events.append(EventRow(kind="PhaseRan", at_s=begin + at, data=data))
        for i in range(6):
            start = begin + 0.05 * i
            data = {
                "op": "gather" if i % 2 else "reduce", "num_tensors": 3, "num_bytes": 1 << 20,
                "start_s": start, "wait_s": start + 0.04, "end_s": start + 0.07,
            }  # fmt: skip
            session.events.append(EventRow(kind="CollectiveRan", at_s=start, data=data))
        data = {"step": step + 1, "seconds": 1.0, "wait_seconds": 0.01}
        session.events.append(EventRow(kind="StepEnded", at_s=begin + 0.99, data=data))
    return session


def recompiled_session(num_entries: int) -> Session:
    """Return a record of a function whose text argument was another one at each compile."""
    function = Function(name="scale", file="/home/me/s.py", line=3, num_misses=num_entries)
    function.source = '@compile\ndef scale(x, mode):\n    """Scale\n    x."""\n    return x\n'
    for i in range(num_entries):
        recompiles = [
            Recompile(
                entry=f"0/{older}", source="argument mode", expected=f"== 'm{older}'",
                actual=f"'m{i}'", text=f"mode == 'm{older}'", fix="pass few",
            )
            for older in reversed(range(i))
        ]  # fmt: skip
        trigger = {"kw": "a `dict`", "mode": f"== 'm{i}'", "x": "a float32 tensor of shape [4]"}
        entry = Entry(compile_id=f"0/{i}", trigger=trigger, recompiles=recompiles, num_hits=2)
        function.entries.append(entry)
    function.entries[-1].status = "evicted"
    function.num_hits = 2 * num_entries
    return Session(torchloom="0.1", functions=[function])


def big_session(num_layers: int) -> Session:
    """Return a record the size of a sharded model's: joint, forward, backward, three passes."""
    random.seed(0)
    graph = _big_graph(num_layers)
    stages = ("joint", "forward", "backward", "post_grad", "before_post_grad", "output_code")
    artifacts = [
        Artifact(kind=kind, title=kind, text=graph.replace("view_", f"view{i}_"))
        for i, kind in enumerate(stages)
    ]
    text = _loom_graph(num_layers)
    passes, curve = [], [i * 1000 + random.randrange(1000) for i in range(num_layers * 60)]
    for name in ("place", "bucket", "prefetch"):
        after = text + f"%{name} : f32[1] = aten.neg(%v0_0)\n"
        passes.append(PassRun(
            name=name, stage="lowered", graph="graph0.forward", num_edits=1, duration_s=0.1,
            before=text, after=after, curve=curve,
        ))  # fmt: skip
        text = after
    guards = [
        Guard(
            source=f"L['self'].layers.{i}", kind="ID_MATCH", text=f"guard {i} " * 6, english=f"{i}"
        )
        for i in range(num_layers * 100)
    ]
    entry = Entry(compile_id="0/0", artifacts=artifacts, passes=passes, guards=guards)
    function = Function(name="Model", file="/home/me/model.py", line=1, entries=[entry])
    return Session(torchloom="0.1", functions=[function])


def _big_graph(num_layers: int) -> str:
    lines = [
        "class GraphModule(torch.nn.Module):",
        '    def forward(self, primals_1: "f32[8][1]cpu"):',
    ]
    last = "primals_1"
    for layer in range(num_layers):
        for i in range(130):
            if i % 4 == 0:
                lines += [
                    "",
                    f"        # File: /home/me/model.py:{i} in forward, code: x = f_{i}(x)",
                ]
            name = f"view_{layer}_{i}"
            handle = f"'layers.{layer}.attention.q{i}.weight'"
            width = random.randrange(1 << 20)
            lines.append(
                f'        {name}: "f32[{width}, 512][512, 1]cpu" = torch.ops.aten.f.default('
                f"{last}, [{width}, 512], torch.float32, {handle});  {last} = None"
            )
            last = name
    return "\n".join([*lines, f"        return ({last},)", ""])


def _loom_graph(num_layers: int) -> str:
    lines = ["%v0_0 : f32[8] = placeholder"]
    for layer in range(num_layers):
        lines += [
            f"%v{layer}_{i} : f32[{i}, 512] = aten.mul(%v0_0, %v{layer}_{i - 1})"
            for i in range(1, 60)
        ]
        lines.append(
            f"%v{layer + 1}_0 : f32[8] = torchloom.gather(%v{layer}_59, [8], f32, 'layers.{layer}.w')"
        )
    return "\n".join(lines) + "\n"


def test_the_records_of_the_page_tests_are_records():
    for session in (small_session(), run_session(), big_session(1)):
        assert from_json(to_json(session)) == session
