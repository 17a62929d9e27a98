"""Running a command while the memory of its whole process tree, and its disk, are sampled (Linux).

Memory is what the system cannot take back: anonymous and shared pages of the process and of all
that descend from it, summed at one moment. Pages of mapped files are told beside, summed over
processes, so that a page that two of them have mapped counts twice.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

INTERVAL_S: Final = 0.1
_DISK_EVERY: Final = 20
"""Samples of memory for each of the disk, which takes a walk through folders."""

_SUSPENDED_S: Final = 10.0
"""Between two samples: whoever takes them was stopped meanwhile, and so was, in all likelihood, the
command, as when a machine sleeps."""

_KIB: Final = 1 << 10
_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """The memory of a process tree at one moment, in bytes, and its processor time so far.

    Attributes:
        own: anonymous and shared pages.
        mapped: resident pages of mapped files.
        processes: how many there are.
        processor_s: that they have taken, and those that have ended.
    """

    own: int = 0
    mapped: int = 0
    processes: int = 0
    processor_s: float = 0.0


def tree_of(pid: int) -> Iterator[int]:
    """Yield a process and all that descend from it; those that end meanwhile may be missing."""
    yield pid
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield from tree_of(int(child))


def memory_of_tree(pid: int) -> TreeMemory:
    """Sum up the memory of a process tree."""
    own = mapped = processes = ticks = 0
    for each in tree_of(pid):
        with suppress(OSError, KeyError):
            fields = _status(each)
            own += fields["RssAnon"] + fields["RssShmem"]
            mapped += fields["RssFile"]
            processes += 1
            ticks += _ticks(each)
    return TreeMemory(own, mapped, processes, ticks / _TICKS_PER_S)


def _ticks(pid: int) -> int:
    """Return the processor time of a process and of its children that have ended."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


def _status(pid: int) -> dict[str, int]:
    """Return the sizes in a process's status, in bytes; a process that has ended has none."""
    lines = (line.split() for line in (_PROC / str(pid) / "status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * _KIB for words in lines if words[-1] == "kB"}


def bytes_on_disk(folder: Path) -> int:
    """Return the disk space of all files in a folder that are there while it is walked."""
    blocks = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                blocks += os.lstat(os.path.join(place, name)).st_blocks  # noqa: PTH118  (many)
    return blocks * 512


@dataclass(slots=True)
class Peaks:
    """The most that was sampled, in bytes, and where.

    Attributes:
        own: of memory that cannot be taken back.
        mapped: of mapped files' pages, at its own moment.
        disk: of the watched folder.
        processes: of the tree.
        own_by_stage: the most memory in each stage, in order.
        seconds_by_stage: how long samples named each.
        suspended_s: while nothing was sampled for long; counts in no stage.
        processor_s: of the whole tree.
        samples: how many were taken.
    """

    own: int = 0
    mapped: int = 0
    disk: int = 0
    processes: int = 0
    own_by_stage: dict[str, int] = field(default_factory=dict)
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    suspended_s: float = 0.0
    processor_s: float = 0.0
    samples: int = 0

    def add(self, memory: TreeMemory, stage: str, seconds: float) -> None:
        """Count a sample that stands for so many seconds."""
        self.own = max(self.own, memory.own)
        self.mapped = max(self.mapped, memory.mapped)
        self.processes = max(self.processes, memory.processes)
        self.processor_s = max(self.processor_s, memory.processor_s)
        self.own_by_stage[stage] = max(self.own_by_stage.get(stage, 0), memory.own)
        if seconds > _SUSPENDED_S:
            self.suspended_s += seconds
            seconds = 0.0
        self.seconds_by_stage[stage] = self.seconds_by_stage.get(stage, 0.0) + seconds
        self.samples += 1

    def to_json(self) -> dict[str, Any]:
        """Return the peaks for machines to read; sizes in MiB."""
        return {
            "memory_mib": _mib(self.own),
            "mapped_files_mib": _mib(self.mapped),
            "disk_mib": _mib(self.disk),
            "processes": self.processes,
            "memory_mib_by_stage": {name: _mib(own) for name, own in self.own_by_stage.items()},
            "seconds_by_stage": {
                name: round(seconds, 1) for name, seconds in self.seconds_by_stage.items()
            },
            "suspended_s": round(self.suspended_s, 1),
            "processor_s": round(self.processor_s, 1),
            "samples": self.samples,
        }


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 1)


@dataclass(frozen=True, slots=True)
class Watched:
    """A command that was run.

    Attributes:
        status: its exit status; negative for a signal.
        output: what it wrote to standard output.
        seconds: that it took, those in which all was suspended not counted.
        peaks: what was sampled.
        killed_in: the stage in which it was killed, or empty.
    """

    status: int
    output: str
    seconds: float
    peaks: Peaks
    killed_in: str

    def to_json(self) -> dict[str, Any]:
        """Return the figures for machines to read."""
        killed = {"killed_in": self.killed_in} if self.killed_in else {}
        return {"seconds": round(self.seconds, 1), **killed, **self.peaks.to_json()}


OnSample = Callable[[Watched, str, TreeMemory, int], None]
"""Called with the run so far, the stage, memory, and the disk's bytes."""


def watched(
    command: Sequence[str],
    folder: Path,
    stage_of: Callable[[], str],
    on_sample: OnSample,
    kill_when: Callable[[str, float], bool] = lambda *_: False,
) -> Watched:
    """Run a command in a session of its own and sample it until it ends.

    Args:
        command: what to run; its standard error is that of this process.
        folder: whose space on disk is sampled.
        stage_of: names the stage that the command is in.
        on_sample: is told of each sample.
        kill_when: says, by the stage and the seconds in it, that the whole tree is to be killed.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(_all_of(process)))
        reader.start()
        try:
            peaks, killed_in = _sampled(process, folder, stage_of, on_sample, kill_when)
        except BaseException:
            kill_tree(process.pid)
            raise
        status = process.wait()
        reader.join()
    seconds = time.perf_counter() - began - peaks.suspended_s
    return Watched(status, "".join(said), seconds, peaks, killed_in)


def _all_of(process: "subprocess.Popen[str]") -> str:
    return process.stdout.read() if process.stdout else ""


def _sampled(
    process: "subprocess.Popen[str]",
    folder: Path,
    stage_of: Callable[[], str],
    on_sample: OnSample,
    kill_when: Callable[[str, float], bool],
) -> tuple[Peaks, str]:
    peaks, began = Peaks(), time.perf_counter()
    last = began
    while process.poll() is None:
        stage, memory = stage_of(), memory_of_tree(process.pid)
        if peaks.samples % _DISK_EVERY == 0:
            disk = bytes_on_disk(folder)
            peaks.disk = max(peaks.disk, disk)
        now = time.perf_counter()
        peaks.add(memory, stage, now - last)
        last = now
        so_far = Watched(0, "", now - began - peaks.suspended_s, peaks, "")
        on_sample(so_far, stage, memory, disk)
        if kill_when(stage, peaks.seconds_by_stage[stage]):
            kill_tree(process.pid)
            return peaks, stage
        with suppress(subprocess.TimeoutExpired):
            process.wait(INTERVAL_S)
    peaks.disk = max(peaks.disk, bytes_on_disk(folder))
    return peaks, ""


def kill_tree(pid: int) -> None:
    """Kill a process and all that descend from it, at once and without warning."""
    tree = [*tree_of(pid)]
    for each in tree:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
