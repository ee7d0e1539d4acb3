"""The compile section on its own."""

from __future__ import annotations

import pytest
import torch

from torchloom.compiler import (
    COMPILE_CONFIG,
    CompileConfig,
    CompiledModuleWrapper,
    disable,
    get_compile_config,
    is_compile_supported,
)
from torchloom.errors import CompileError, ConfigError


def test_a_section_is_read_and_left_alone() -> None:  # D18
    rest = {"backend": "aot_eager", "strict": True}
    section = {"enabled": True, "kwargs": {"dynamic": True}, **rest}
    whole = {"compile": section}
    config = get_compile_config(whole)
    assert COMPILE_CONFIG == "compile"
    assert (config.enabled, config.backend, config.strict) == (True, "aot_eager", True)
    assert dict(config.kwargs) == {"dynamic": True}
    assert whole == {"compile": {"enabled": True, "kwargs": {"dynamic": True}, **rest}}


def test_passes_are_checked_against_the_stage() -> None:
    good = {"compile": {"passes": ["zero3"]}, "zero_optimization": {"stage": 3}}
    assert get_compile_config(good).passes == ("zero3",)
    with pytest.raises(ConfigError, match="zero3 contradicts"):
        get_compile_config({**good, "zero_optimization": {"stage": 1}})


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"enabled": "perhaps"}, "compile.enabled"),
        ({"kwargs": {"backend": "eager"}}, "compile.kwargs.backend"),
        ({"kwargs": {"dynamic": "so"}}, "compile.kwargs.dynamic"),
        ({"backend": 3}, "compile.backend"),
        ([], "compile"),
    ],
)
def test_bad_sections(section, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_compile_config({"compile": section})


def test_where_compiling_does_not_work(monkeypatch) -> None:  # D1, D14, D16
    monkeypatch.setattr(
        "torchloom.compiler.support.why_no_dynamo", lambda: "Python 3 is not supported"
    )
    assert not is_compile_supported()
    with pytest.raises(ConfigError, match="Python 3"):
        CompileConfig(enabled=True)
    with pytest.raises(ValueError, match="Python 3"):
        get_compile_config({"compile": {"enabled": True}})
    assert not get_compile_config({}).enabled
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CompileError, match="does not work here"):
        CompiledModuleWrapper(model, _enabled_anyway())
    wrapped = CompiledModuleWrapper(model, CompileConfig(enabled=False))
    assert wrapped(torch.ones(2)).shape == (2,)
    assert disable(len) is len


def _enabled_anyway() -> CompileConfig:
    config = CompileConfig()
    object.__setattr__(config, "enabled", True)
    return config


def test_disable_keeps_a_function_out_of_graphs() -> None:  # D14
    graphs = []

    def counting(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    @disable
    def outside(x):
        assert not torch.compiler.is_compiling()
        return x + 1

    def fn(x):
        return outside(x * 2) * 3

    assert torch.compile(fn, backend=counting)(torch.ones(1)).item() == 9
    assert len(graphs) == 2
    assert is_compile_supported()
