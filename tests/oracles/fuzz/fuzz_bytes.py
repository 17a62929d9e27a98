"""Give bytes from strangers to all that reads such, guided by the code that they reach.

    python -m tests.oracles.fuzz.fuzz_bytes --runs 1000000 --seconds 180

Readers: `calls` (messages of all calls, through all that stands around the servicer), `headers`
(what is no token), `replies` and `explanations` (of servers that mean ill), `credentials` (access
files, certificates), `records` (of Redis) and `log` (of the state directory). Each runs in a
process of its own. Ends with status 1 at an input that a reader does not bear, which stays in
`--corpus`; `python -m tests.oracles.fuzz.byte_fuzzer READER FOLDER FILE` reads it once more.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer

from benchmarks.comparison import circumstances

READERS: Final = (
    "calls",
    "headers",
    "replies",
    "explanations",
    "credentials",
    "records",
    "log",
)
_LIBRARY: Final = "atheris"
_LATEST: Final = re.compile(r"^#\d+\s.*cov: (\d+) ft: (\d+) corp: (\d+)/", re.MULTILINE)
_NUMBER: Final = re.compile(r"^stat::(number_of_executed_units|peak_rss_mb):\s*(\d+)", re.MULTILINE)
_REASON: Final = re.compile(r"=== Uncaught Python exception: ===\n(.*)")


def main(  # noqa: PLR0913, PLR0917  (options of a command)
    runs: Annotated[int, typer.Option(min=1, help="Inputs of each reader.")] = 100_000,
    seconds: Annotated[int, typer.Option(min=1, help="Most time of each reader.")] = 180,
    target: Annotated[list[str], typer.Option(help="Readers; all if none is named.")] = [],  # noqa: B006
    corpus: Annotated[
        Path | None, typer.Option(help="Keep inputs here, and go on from them.")
    ] = None,
    seed: Annotated[int, typer.Option(min=1, help="Of what is tried.")] = 1,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
) -> None:
    """Give each reader inputs; print how many, and what of the code they reached."""
    if find_spec(_LIBRARY) is None:
        raise typer.BadParameter(f"{_LIBRARY} is missing: run `pip install atheris`")
    if unknown := set(target) - set(READERS):
        raise typer.BadParameter(f"no reader {min(unknown)}: there are {', '.join(READERS)}")
    told = {}
    with _folder(corpus) as folder:
        for name in target or READERS:
            told[name] = fuzz(name, folder / name, runs, seconds, seed)
            if not json_:
                print(name, told[name], flush=True)
    total = sum(each["executions"] for each in told.values())
    if json_:
        print(json.dumps(circumstances() | {"executions": total, "readers": told}))
    if any(each["found"] for each in told.values()):
        raise typer.Exit(1)


def fuzz(name: str, folder: Path, runs: int, seconds: int, seed: int) -> dict[str, Any]:
    """Give a reader inputs; return how many, what they reached, and what it did not bear."""
    folder.mkdir(parents=True, exist_ok=True)
    options = [f"-runs={runs}", f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=4096"]
    options += [f"-artifact_prefix={folder}/", "-print_final_stats=1", "-timeout=20"]
    command = [sys.executable, "-m", "tests.oracles.fuzz.byte_fuzzer", name, str(folder), *options]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    return _told(done.stderr + done.stdout, done.returncode) | {
        "seconds": round(time.monotonic() - began, 1)
    }


def _told(output: str, returncode: int) -> dict[str, Any]:
    numbers = dict(_NUMBER.findall(output))
    latest = _LATEST.findall(output)
    coverage, features, inputs = map(int, latest[-1] if latest else (0, 0, 0))
    found = _REASON.search(output)
    reason = found[1] if found else "\n".join(output.splitlines()[-5:])
    return {
        "executions": int(numbers.get("number_of_executed_units", 0)),
        "coverage": coverage,
        "features": features,
        "inputs_kept": inputs,
        "peak_rss_mib": int(numbers.get("peak_rss_mb", 0)),
        "found": reason if returncode else "",
    }


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with TemporaryDirectory() as made:
        yield Path(made)


if __name__ == "__main__":
    typer.run(main)
