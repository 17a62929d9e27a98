"""A service's own memory, on a small scale."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.index.residency import measure, opening
from indexer.build import build_from_tokens
from indexer.reader import Vocabulary


@pytest.mark.soak
def test_what_a_service_holds_does_not_grow_with_the_index(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    paths = [tmp_path / "small", tmp_path / "large"]
    for path, size in zip(paths, (20, 4000), strict=True):
        documents = [(str(i), rng.integers(0, 500, 1000)) for i in range(size)]
        build_from_tokens(documents, path, Vocabulary(500, "ab" * 32))
    base, small, large, both = measure(paths, 300, ())["memory_mib"]
    assert base["mib"] == 0
    assert large["mib"] > 20 + small["mib"]
    for name in ("at_rest", "after_drafts"):
        grown = large[name]["anonymous"] - small[name]["anonymous"]
        assert grown < 0.05 * large["mib"] + 1
        assert base[name]["anonymous"] <= both[name]["anonymous"]


def test_opening_times_are_of_an_index_of_so_many_segments(tmp_path: Path) -> None:
    times = opening(3, tmp_path)
    assert times["segments"] == 3
    assert 0 < times["index_ms"] < times["drafter_ms"] < 1000
