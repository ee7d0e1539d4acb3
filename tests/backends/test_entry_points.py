"""Backends that distributions announce: found lazily, loaded once, collisions told."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from torchloom.backends import (
    describe_backends,
    list_backends,
    lookup_backend,
    register_backend,
    unregister_backend,
)
from torchloom.errors import BackendConflictError, BackendLoadError

GOOD = "def compile(gm, example_inputs):\n    return gm.forward\n"


def row_of(name: str):
    return next(row for row in describe_backends() if row.name == name)


def fn(x):
    return x + 1


def test_listed_without_loading_and_usable_by_torch(distribution) -> None:  # B11
    distribution("loom_good", "good_ep", "loom_good:compile", GOOD)
    assert "good_ep" in list_backends()
    row = row_of("good_ep")
    assert (row.tags, row.is_available) == (None, True)
    assert str(row.origin) == "entry point, loom_good==1.0 (loom_good:compile)"
    assert "loom_good" not in sys.modules
    assert lookup_backend("good_ep") is lookup_backend("good_ep")
    assert row_of("good_ep").tags == ()
    assert row_of("good_ep").origin.kind == "entry point"
    assert torch.compile(fn, backend="good_ep")(torch.ones(1)).item() == 2


def test_a_module_that_registers_itself_works_the_first_time(distribution) -> None:  # R6
    source = (
        "from torch._dynamo import register_backend\n@register_backend(name='self_made')\n" + GOOD
    )
    distribution("loom_selfmade", "self_made", "loom_selfmade:compile", source)
    assert callable(lookup_backend("self_made"))
    assert torch.compile(fn, backend="self_made")(torch.ones(1)).item() == 2


def test_two_distributions_with_one_name(distribution, caplog) -> None:  # R7
    distribution("loom_b", "contested_ep", "loom_b:compile", GOOD)
    distribution("loom_a", "contested_ep", "loom_a:compile", GOOD)
    row = row_of("contested_ep")
    assert "loom_a==1.0" in str(row.origin)
    assert ["loom_b==1.0" in str(origin) for origin in row.hidden] == [True]
    with caplog.at_level(logging.WARNING, logger="torchloom"):
        lookup_backend("contested_ep")
    assert "announced by 2 distributions" in caplog.text
    assert "loom_a==1.0" in caplog.text
    assert "loom_b==1.0" in caplog.text
    assert "loom_a" in sys.modules
    assert "loom_b" not in sys.modules


def test_an_entry_point_never_hides_a_built_in(distribution) -> None:  # R8
    distribution("loom_shadow", "aot_eager", "loom_shadow:compile", GOOD)
    row = row_of("aot_eager")
    assert str(row.origin) == "built-in, torch"
    assert [origin.kind for origin in row.hidden] == ["entry point"]
    assert lookup_backend("aot_eager").__module__.startswith("torch.")


@pytest.mark.parametrize(
    ("dist", "value", "source", "cause", "why_not"),
    [
        (
            "loom_broken1",
            "loom_broken1:compile",
            "import no_such_module_x",
            "no_such_module_x",
            None,
        ),
        ("loom_broken2", "loom_broken2:missing", GOOD, "missing", None),
        ("loom_broken3", "loom_broken3 compile!", GOOD, "not of the form", "not of the form"),
        ("loom_broken4", "nowhere_at_all:compile", GOOD, "nowhere_at_all", "is not installed"),
        ("loom_broken5", "loom_broken5:NUMBER", "NUMBER = 3", "not a function", None),
    ],
)
def test_a_broken_one_fails_by_name_when_looked_up(
    distribution, dist, value, source, cause, why_not
) -> None:  # R9
    distribution(dist, dist + "_ep", value, source)
    assert dist + "_ep" in list_backends()
    found = row_of(dist + "_ep").why_not
    assert found is None if why_not is None else why_not in found
    for _ in range(2):  # the second time as the first
        with pytest.raises(BackendLoadError, match=f"{dist}_ep.*{dist}==1.0") as caught:
            lookup_backend(dist + "_ep")
        assert cause in str(caught.value)


def test_a_registration_hides_an_entry_point_and_gives_it_back(distribution, caplog) -> None:  # R10
    distribution("loom_hidden", "hidden_ep", "loom_hidden:compile", GOOD)

    def mine(gm, example_inputs):
        return gm.forward

    with caplog.at_level(logging.WARNING, logger="torchloom"):
        register_backend(mine, "hidden_ep")
    assert "hides the entry point, loom_hidden==1.0" in caplog.text
    assert lookup_backend("hidden_ep") is mine
    assert [origin.kind for origin in row_of("hidden_ep").hidden] == ["entry point"]
    unregister_backend("hidden_ep")
    assert lookup_backend("hidden_ep") is not mine
    register_backend(mine, "hidden_ep")  # in one order, also after it was loaded
    assert lookup_backend("hidden_ep") is mine
    with pytest.raises(BackendConflictError):
        register_backend(lambda gm, inputs: gm.forward, "hidden_ep")


def test_a_distribution_installed_later_is_seen(distribution) -> None:
    assert "later_ep" not in list_backends()
    distribution("loom_later", "later_ep", "loom_later:compile", GOOD)
    assert "later_ep" in list_backends()


def test_torchlooms_own_backend_is_no_collision() -> None:
    row = row_of("torchloom")
    assert str(row.origin) == "built-in, torchloom"
    assert row.hidden == ()


def test_why_built_ins_do_not_work_here() -> None:
    rows = {row.name: row for row in describe_backends()}
    assert rows["eager"].is_available
    assert rows["tvm"].why_not == "module 'tvm' is not installed"
    if not torch.cuda.is_available():
        assert rows["cudagraphs"].why_not == "it needs a CUDA device"
