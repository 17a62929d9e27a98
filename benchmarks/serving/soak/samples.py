"""Samples of a process's memory and descriptors, each second, and whether they stay level."""

import os
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

WARM_UP: Final = 0.2
"""Share of the time in which a service may still grow."""

_MIB: Final = 1 << 20
_KIB: Final = 1024
_METRICS: Final = {
    "sessions": "foredraft_sessions",
    "session_mib": "foredraft_session_bytes",
    "generations_mib": "foredraft_generations_bytes",
    "tenants": "foredraft_tenants",
    "log_failures": "foredraft_log_failures_total",
}
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A service that is sampled.

    Attributes:
        pid: its process.
        web: address of its metrics and status page.
        state: its state directory.
    """

    pid: int
    web: str
    state: Path

    def sample(self) -> dict[str, float]:
        """Return what it holds now; memory in MiB. Metrics and the page are asked for."""
        metrics = self._metrics()
        return {**self._memory(), **self._handles(), **self._times(), **metrics, **self._log()}

    def _memory(self) -> dict[str, float]:
        status = _fields(Path(f"/proc/{self.pid}/status").read_text())
        rollup = _fields(Path(f"/proc/{self.pid}/smaps_rollup").read_text())
        kib = {
            "rss_mib": status["VmRSS"],
            "anonymous_mib": status["RssAnon"],
            "file_mib": status["RssFile"],
            "pss_mib": rollup["Pss"],
        }
        return {name: round(value / _KIB, 3) for name, value in kib.items()}

    def _handles(self) -> dict[str, float]:
        kinds = [_target(path) for path in Path(f"/proc/{self.pid}/fd").iterdir()]
        threads = len(list(Path(f"/proc/{self.pid}/task").iterdir()))
        sockets = sum(kind.startswith("socket:") for kind in kinds)
        return {
            "descriptors": len(kinds),
            "other_descriptors": len(kinds) - sockets,
            "threads": threads,
        }

    def _metrics(self) -> dict[str, float]:
        found = dict(re.findall(r"^(foredraft_\w+) (\S+)$", self._page("metrics"), re.MULTILINE))
        self._page("")
        return {
            name: round(float(found[metric]) / (_MIB if name.endswith("_mib") else 1), 3)
            for name, metric in _METRICS.items()
        }

    def _page(self, name: str) -> str:
        with urllib.request.urlopen(f"http://{self.web}/{name}", timeout=_TIMEOUT_S) as page:
            return str(page.read().decode())

    def _log(self) -> dict[str, float]:
        held = sum(_allocated(path) for path in self.state.iterdir())
        return {"log_mib": round(held / _MIB, 3)}

    def _times(self) -> dict[str, float]:
        """Return the seconds that cores have worked so far: for the process, and for all."""
        own = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        times = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]))
        second = os.sysconf("SC_CLK_TCK")
        busy = sum(times) - times[3] - times[4]  # neither idle nor waiting for a disk
        return {
            "service_cpu_s": (int(own[11]) + int(own[12])) / second,
            "machine_cpu_s": busy / second,
        }


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return "gone"


def _fields(text: str) -> dict[str, int]:
    """Return what stands in KiB in a table of the kernel's."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(value) for name, value in found}


@dataclass(frozen=True, slots=True)
class Level:
    """How something went after the warm-up.

    Attributes:
        begin: median of the second fifth of the time.
        end: median of the last fifth.
        change: the one over the other, minus one.
        slope_per_hour: by regression over all of it.
        slope_change: what the regression makes of it over the time, as a share of its mean.
    """

    begin: float
    end: float
    change: float
    slope_per_hour: float
    slope_change: float

    def is_flat(self, tolerance: float) -> bool:
        """Tell whether both ways of looking stay within a share."""
        return max(abs(self.change), abs(self.slope_change)) <= tolerance


def level(samples: Sequence[dict[str, float]], name: str) -> Level:
    """Return how a figure of samples, each with its time `at_s`, went after the warm-up."""
    end_s = samples[-1]["at_s"]
    times_s = np.array([each["at_s"] for each in samples])
    values = np.array([each[name] for each in samples])
    begin = float(np.median(values[(times_s >= WARM_UP * end_s) & (times_s < 2 * WARM_UP * end_s)]))
    end = float(np.median(values[times_s >= (1 - WARM_UP) * end_s]))
    kept = times_s >= WARM_UP * end_s
    slope_per_s, _ = np.polyfit(times_s[kept], values[kept], 1)
    return Level(
        round(begin, 2),
        round(end, 2),
        round(end / begin - 1, 4) if begin else 0.0,
        round(float(slope_per_s) * 3600, 2),
        round(float(slope_per_s) * (1 - WARM_UP) * end_s / float(values[kept].mean() or 1), 4),
    )


def draw(samples: Sequence[dict[str, float]], path: Path) -> None:
    """Draw memory, what is held and latency against time."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (loading it takes a second)

    figure = Figure(figsize=(8, 9), layout="constrained")
    rows: list[Any] = list(figure.subplots(4, 1, sharex=True, height_ratios=[3, 2, 2, 2]))
    drawn = (
        ("MiB", ("rss_mib", "pss_mib", "anonymous_mib", "file_mib")),
        ("MiB", ("generations_mib", "session_mib", "log_mib")),
        ("open", ("sessions", "descriptors", "threads")),
        ("ms", ("p50_ms", "p99_ms")),
    )
    times_s = [each["at_s"] for each in samples]
    for axes, (label, names) in zip(rows, drawn, strict=True):
        for name in names:
            axes.plot(times_s, [each[name] for each in samples], label=name, linewidth=1)
        axes.axvline(WARM_UP * times_s[-1], color="grey", linestyle=":")
        axes.set(ylabel=label, ylim=(0, None))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    rows[2].set(yscale="symlog")
    rows[3].set(yscale="linear", xlabel="seconds")
    figure.savefig(path, dpi=110)
