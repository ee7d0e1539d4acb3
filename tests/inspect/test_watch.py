"""What a watch sees, and that it changes nothing."""

from __future__ import annotations

import json
import weakref

import pytest
import torch

import torchloom
from torchloom.errors import InspectError
from torchloom.records import load_record


def modified_sigmoid(inputs):
    x = inputs["x"]
    y = inputs["y"]
    x = 1.0 / (torch.exp(-x) + 5)
    if x.mean() > 0.5:
        x = x / 1.1
    return x * y


def arguments(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {name: torch.randn(size, generator=generator, requires_grad=True) for name in ("x", "y")}


def call(compiled, size: int) -> torch.Tensor:
    given = arguments(size)
    out = compiled(given)
    out.sum().backward()
    return torch.cat([out.detach(), given["x"].grad, given["y"].grad])


@pytest.fixture(scope="module")
def walk_through(tmp_path_factory):
    """The walk-through example, compiled with Inductor once for all tests of its record."""
    torch._dynamo.reset()
    path = tmp_path_factory.mktemp("record") / "record.json"
    compiled = torch.compile(modified_sigmoid)
    with torchloom.watch(path) as w:
        results = [call(compiled, size) for size in (10, 8, 10)]
    for result, size in zip(results, (10, 8, 10), strict=True):
        torch.testing.assert_close(result, call(modified_sigmoid, size))
    return w.record, path


def test_the_entries_of_the_walk_through(walk_through) -> None:
    record, _ = walk_through
    assert [entry.compile_id for entry in record.entries()] == ["0/0", "0/1", "1/0", "1/1"]
    (root,) = record.functions
    (resume,) = root.children
    assert root.name == "modified_sigmoid"
    assert root.source.startswith("def modified_sigmoid(inputs):")
    assert resume.name.startswith("torch_dynamo_resume_in_modified_sigmoid_at_")
    assert resume.line == root.line + 4
    assert [entry.num_hits for entry in root.entries] == [1, 2]  # the dynamic one serves 10 again
    assert all(entry.status == "live" and entry.backend == "inductor" for entry in record.entries())
    assert record.num_recompiles == 2


def test_graphs_kernels_and_caches(walk_through) -> None:
    record, _ = walk_through
    for entry in record.entries():
        for kind in ("dynamo", "joint", "forward", "backward", "post_grad", "runnable"):
            assert entry.artifact(kind), (entry.compile_id, kind)
        titles = [a.title for a in entry.artifacts if a.kind == "output_code"]
        assert titles == ["generated code, forward", "generated code, backward"]
        assert len(entry.kernels) == 2
        assert all("float" in kernel.source for kernel in entry.kernels)
        assert entry.kernels[0].nodes
        assert {use.cache for use in entry.caches} == {"fx_graph", "aotautograd"}
        assert entry.compile_s > 0
        names = {span.name for span in entry.spans}
        assert {"entire_frame_compile", "backend_compile"} <= names
        whole = max(span.duration_us for span in entry.spans if span.name == "entire_frame_compile")
        assert whole / 1e6 == pytest.approx(
            entry.metrics["forward"]["entire_frame_compile_time_s"], rel=0.2
        )
    assert "exp" in record["modified_sigmoid"].entries[0].artifact("joint")


def test_the_break(walk_through) -> None:
    record, _ = walk_through
    (brk,) = record.breaks()
    line = record.functions[0].line + 4
    assert brk.gb_type == "GB0170"
    assert brk.place.endswith(f"test_watch.py:{line} in modified_sigmoid")
    assert "torch.cond" in " ".join(brk.hints)
    assert brk.doc_url
    assert brk.doc_url.endswith("gb0170.html")


def test_the_recompile(walk_through) -> None:
    record, _ = walk_through
    (reason,) = record["modified_sigmoid"].entries[1].recompiles
    assert (reason.entry, reason.source) == ("0/0", "argument inputs['x']")
    assert (reason.expected, reason.actual) == ("size(0) == 10", "8")
    assert "compiling modified_sigmoid with dynamic=True" in reason.fix  # a graph break follows


def test_guards_in_words_with_their_lines(walk_through) -> None:
    record, _ = walk_through
    first, second = record["modified_sigmoid"].entries
    english = {guard.english: guard for guard in first.guards}
    tensor = english["argument inputs['x'] is a float32 tensor of shape [10] that requires grad"]
    assert tensor.user_line
    assert tensor.user_line.endswith(f"test_watch.py:{record.functions[0].line + 3}")
    assert any("global torch.exp is the same object" in text for text in english)
    dynamic = [g for g in second.guards if "inputs['x'] is a float32" in g.english]
    assert "of shape [any]" in dynamic[0].english
    failed = [guard.english for guard in first.guards if guard.num_fails]
    assert failed == [tensor.english]  # the one that size 8 met, and none around it
    text = json.dumps([guard.text for entry in record.entries() for guard in entry.guards])
    assert "0x7" not in text


def test_what_the_bytecode_does(walk_through) -> None:
    record, _ = walk_through
    text = record["modified_sigmoid"].entries[0].pseudo_source
    assert text.startswith("def modified_sigmoid(inputs):")
    assert "__compiled_fn_" in text
    assert text.count("return __resume_at_") == 2
    assert "pregraph" not in text
    assert "inputs['y']" in text


def test_the_record_survives_a_file(walk_through) -> None:
    record, path = walk_through
    assert load_record(path) == record
    assert path.stat().st_size < 500_000


def test_the_summary_fits_a_screen(walk_through) -> None:
    from torchloom.records.summary import summary

    record, _ = walk_through
    text = summary(record)
    assert "2 functions, 4 entries, 1 graph break, 2 recompiles" in text
    assert "expected size(0) == 10, got 8" in text
    assert len(text.splitlines()) < 40


def test_watching_changes_no_entry_and_no_result() -> None:
    compiled = torch.compile(modified_sigmoid, backend="aot_eager")
    expected = [call(compiled, size) for size in (10, 8)]
    before = [entry.compile_id for entry in torchloom.entries(compiled, resume=True)]
    with torchloom.watch() as w:
        again = [call(compiled, size) for size in (10, 8)]
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert [entry.compile_id for entry in torchloom.entries(compiled, resume=True)] == before
    assert list(w.record.entries()) == []


def test_no_hook_is_left_after_an_exception(tmp_path) -> None:
    w = torchloom.watch(tmp_path)
    with pytest.raises(ValueError, match="inside"), w:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        raise ValueError("inside")
    assert len(list(w.record.entries())) == 1
    assert load_record(tmp_path / "record.json") == w.record


def test_watches_nest() -> None:
    def outer_fn(x):
        return x + 1

    def inner_fn(x):
        return x * 2

    with torchloom.watch() as outer:
        one = torch.compile(outer_fn, backend="eager")
        one(torch.ones(2))
        with torchloom.watch() as inner:
            two = torch.compile(inner_fn, backend="eager")
            two(torch.ones(2))
            two(torch.ones(2))
        two(torch.ones(2))
    assert [f.name for f in inner.record.functions] == ["inner_fn"]
    assert [f.name for f in outer.record.functions] == ["outer_fn", "inner_fn"]
    assert inner["inner_fn"].num_hits == 2
    assert outer["inner_fn"].num_hits == 3
    assert outer["outer_fn"].num_hits == 1
    assert torch.equal(two(torch.ones(2)), torch.full((2,), 2.0))


def test_a_failed_compile_is_in_the_record() -> None:
    def broken(gm, example_inputs):
        raise RuntimeError("no luck today")

    with torchloom.watch() as w, pytest.raises(Exception, match="no luck today"):
        torch.compile(lambda x: x + 1, backend=broken)(torch.ones(2))
    (function,) = w.record.functions
    assert function.entries == []
    assert "no luck today" in str(function.skipped)


def test_reading_a_record_too_early() -> None:
    w = torchloom.watch()
    with w, pytest.raises(InspectError, match="after that"):
        _ = w.record
    with w, pytest.raises(InspectError, match="open already"), w:
        pass


def test_a_watch_keeps_no_local_variable_of_the_program() -> None:
    def fn(x):
        print(end="")
        return x + 1

    def loop(compiled):
        for size in (2, 3, 4):
            x = torch.ones(size)
            gone = weakref.ref(x)
            compiled(x)
            del x
            assert gone() is None

    with torchloom.watch() as w:
        loop(torch.compile(fn, backend="eager", dynamic=False))
    assert w.record.num_recompiles
