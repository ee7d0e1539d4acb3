"""What is kept beside the compiler's caches comes back as it was; damage is as good as nothing."""

from __future__ import annotations

import json

import pytest

from torchloom.memory import PeakContents
from torchloom.memory.alive import PeakGroup
from torchloom.pipeline import sidecar
from torchloom.plan import GraphPlan

PLAN = GraphPlan(
    graph="g",
    budget_bytes=100,
    peak_bytes=90,
    graph_peak_bytes=80,
    saved_bytes=10,
    min_peak_bytes=50,
    compute_us=1.0,
    extra_us=0.0,
    bound_us=0.0,
    resident={"w": 3},
)
PEAK = PeakContents(
    80, "backward", "mm_1", "layers.0", (PeakGroup("activations", "layers.0", 80, 2),)
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "torchloom" / "key.json"


def test_plan_and_peak_come_back() -> None:
    decided = sidecar.Decided(PLAN, True, PEAK)
    sidecar.save("key", decided)
    assert sidecar.load("key") == decided


@pytest.mark.parametrize("peak", [[], {}, {"groups": [1]}, {"groups": [["a", "b", "c", "d"]]}, 3])
def test_a_damaged_peak_is_nothing(cache, peak) -> None:
    sidecar.save("key", sidecar.Decided(PLAN, False, PEAK))
    cache.write_text(json.dumps({**json.loads(cache.read_text()), "peak": peak}))
    assert sidecar.load("key") is None
