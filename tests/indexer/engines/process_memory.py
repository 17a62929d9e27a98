"""How much memory a process and all that it started take, as it goes on."""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """The most of each that was seen at one moment."""

    pss_bytes: int = 0
    private_bytes: int = 0
    num_processes: int = 0


def run_and_watch(command: Sequence[object], folder: Path) -> tuple[Peak, str]:
    """Run a command in a session of its own; return what its processes took and what it said."""
    peak = Peak()
    with subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as started:
        while started.poll() is None:
            taken = [_taken(pid) for pid in members(started.pid)]
            pss, private = sum(each[0] for each in taken), sum(each[1] for each in taken)
            peak.pss_bytes = max(peak.pss_bytes, pss)
            peak.private_bytes = max(peak.private_bytes, private)
            peak.num_processes = max(peak.num_processes, len(taken))
            time.sleep(0.01)
        assert started.stdout is not None
        said = started.stdout.read()
    assert started.returncode == 0, said
    return peak, said


def members(session: int) -> list[int]:
    """Return the processes of a session that run."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if _session_of(pid) == session and is_alive(pid)]


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that ended and was not asked about does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _taken(pid: int) -> tuple[int, int]:
    """Return the proportional set size of a process, and that without mapped files."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
    return sizes.get("Pss", 0), sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)
