"""A leak that is planted in the samples of a soaked service is found; noise is not one."""

import numpy as np
import pytest

from benchmarks.serving.soak.report import TOLERANCE, Soaked, verdicts_of
from benchmarks.serving.soak.samples import level

NAMES = ("rss_mib", "anonymous_mib")


def samples(growth: float) -> list[dict[str, float]]:
    """Ten minutes that grow by a share, noisily, after a warm-up that doubles."""
    rng, made = np.random.default_rng(3), []
    for at in range(1, 601):
        warm = min(1.0, 0.5 + at / 200)
        value = 250 * warm * (1 + growth * at / 600) + rng.normal(0, 5)
        made.append({"at_s": float(at), **dict.fromkeys(NAMES, value)})
    return made


@pytest.mark.parametrize(("growth", "is_flat"), [(0.0, True), (0.05, False), (-0.05, False)])
def test_growth_is_found_and_noise_is_not_growth(growth: float, is_flat: bool) -> None:  # noqa: FBT001
    assert level(samples(growth), "rss_mib").is_flat(TOLERANCE) == is_flat


def test_each_fault_fails_its_verdict() -> None:
    quiet = {"descriptors": 26.0, "sessions": 0.0, "log_failures": 0.0}
    good = Soaked(samples(0.0), [quiet, quiet, quiet])
    assert all(verdicts_of(good).values())
    bad = {"descriptors": 27.0, "sessions": 1.0, "log_failures": 1.0}
    soaked = Soaked(samples(0.05), [quiet, quiet, bad])
    soaked.errors["NOT_FOUND"] += 1
    assert not any(verdicts_of(soaked).values())
