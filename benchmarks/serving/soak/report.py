"""The report of a soaked service, and whether it passes."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks.serving.soak.board import Counts
from benchmarks.serving.soak.samples import WARM_UP, level

TOLERANCE: Final = 0.02
"""Memory may change by so much, as a share."""

MEMORY: Final = ("rss_mib", "anonymous_mib")
"""Judged: all pages that are resident, and those alone that no file stands behind. The proportional
share (pss_mib) is noted and not judged: it moves with the callers that map the same libraries."""

PERCENTS: Final = (50, 99)
"""Of latencies."""


@dataclass(slots=True)
class Soaked:
    """What was seen.

    Attributes:
        samples: one a second.
        quiet: samples without callers: before, after the warm-up, and at the end.
        errors: what should not have happened, by message.
        total: what all callers counted after the warm-up.
    """

    samples: list[dict[str, float]] = field(default_factory=list)
    quiet: list[dict[str, float]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    total: Counts | None = None


def verdicts_of(soaked: Soaked) -> dict[str, bool]:
    """Tell what of all that is asked of a service is so."""
    levels = {name: level(soaked.samples, name) for name in MEMORY}
    _, warm, end = soaked.quiet
    return {
        **{f"{name} flat": each.is_flat(TOLERANCE) for name, each in levels.items()},
        "no descriptor leaked": end["descriptors"] <= warm["descriptors"],
        "no session left": not end["sessions"],
        "no error": not soaked.errors,
        "the log refused nothing": not end["log_failures"],
    }


def figures_of(soaked: Soaked) -> dict[str, Any]:
    """Return what a run came to, with its verdicts."""
    names = [
        *MEMORY,
        "pss_mib",
        "file_mib",
        "beside_mib",
        "generations_mib",
        "session_mib",
        "log_mib",
        "threads",
    ]
    total = soaked.total or Counts.read([])
    p50_ms, p99_ms = total.latencies_ms(PERCENTS)
    return {
        "levels": {name: asdict(level(soaked.samples, name)) for name in names},
        "quiet": soaked.quiet,
        "drafts": total.drafts,
        "refused": total.refused,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        **_busy(soaked.samples),
        "errors": dict(soaked.errors),
        "verdicts": verdicts_of(soaked),
    }


def _busy(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return how many cores worked after the warm-up: for the service, and in all."""
    first = next(at for at in samples if at["at_s"] > WARM_UP * samples[-1]["at_s"])
    seconds = samples[-1]["at_s"] - first["at_s"]
    return {
        f"{whose}_cores": round(
            (samples[-1][f"{whose}_cpu_s"] - first[f"{whose}_cpu_s"]) / seconds, 2
        )
        for whose in ("service", "machine")
    }
