"""Deploys the image of docs/deploy for real, and stops and starts it under load.

    python -m benchmarks.serving.deployment --base debian-python --json   # as root, with podman

Builds the image, runs it as its own user on a read-only file system without capabilities, with
--access, its state and its cache on volumes, and answers:

- does every probe answer without credentials (the image's own, gRPC health, /live and /ready)?
- is a caller without a token refused, and one with a token served?
- do eight engines that decode meanwhile write what they would without drafts, while the container
  is stopped and started again?
- does it draft from its state after the restart?

Where no registry can be reached, `--base` names an image made of a Debian root:

    debootstrap --variant=minbase bookworm root
    chroot root apt-get install --yes python3 python3-venv python-is-python3
    tar --create --directory root . | podman import - debian-python
"""

import json
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
import numpy as np
import typer

from foredraft import Credentials, DraftRequest, RemoteDrafter, ResilientDrafter, TokenIds
from retriever.errors import AccessRefusedError
from retriever.operations.health import why_not_serving

ROOT: Final = Path(__file__).parents[2]
PODMAN: Final = shutil.which("podman") or "podman"
USER: Final = 10001  # of the image
_ADDRESS: Final = "127.0.0.1:50451"
_METRICS: Final = "127.0.0.1:9564"
_START_S: Final = 240.0  # the first start compiles all kernels
_NUM_ENGINES: Final = 8
_OUTPUT_TOKENS: Final = 400
_PASS_S: Final = 0.002  # what a target's pass takes
_DEADLINE_S: Final = 0.05
_PROMPT: Final = np.arange(100, 132, dtype=np.int32)


@dataclass(slots=True)
class Report:
    """What was seen.

    Attributes:
        image: size of the image in bytes.
        user: number of the user that the service runs as.
        capabilities: effective ones, hexadecimal.
        is_read_only: whether its file system refuses to be written.
        probes: what answered at which time, by probe.
        refused_without_token: whether a caller without credentials was refused.
        sequences: decoded while it was stopped and started.
        identical: of these, those that equal plain decoding.
        steps: of all of them.
        drafted: steps that a draft was accepted in.
        stops: seconds from each stop until the process had ended, with its status.
        starts: seconds from each start until it took calls.
        remembered: whether it drafted from its state after each restart.
        fail_opens: drafts that the engines went without, by reason.
    """

    image: int = 0
    user: int = -1
    capabilities: str = ""
    is_read_only: bool = False
    probes: dict[str, str] = field(default_factory=dict)
    refused_without_token: bool = False
    sequences: int = 0
    identical: int = 0
    steps: int = 0
    drafted: int = 0
    stops: list[tuple[float, int]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    remembered: list[bool] = field(default_factory=list)
    fail_opens: dict[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether all is as it was promised."""
        return (
            self.user == USER
            and int(self.capabilities, 16) == 0
            and self.is_read_only
            and all(answer == "ok" for answer in self.probes.values())
            and self.refused_without_token
            and self.identical == self.sequences > 0
            and self.drafted > 0
            and all(status == 0 for _, status in self.stops)
            and all(self.remembered)
        )


class Container:
    """The service's container, kept by podman.

    Args:
        folder: with the index `my.index` and the access file `access.jsonl`.
        options: of podman, for machines that it does not run on as it is.
    """

    _NAME: Final = "foredraft-deployment"

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self._folder = folder
        self._options = options

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run it during the block; its volumes go with it."""
        self.remove()
        variables = {
            "FOREDRAFT_ADDRESS": _ADDRESS,
            "FOREDRAFT_METRICS_ADDRESS": _METRICS,
            "FOREDRAFT_ACCESS": "/etc/foredraft/access.jsonl",
            "FOREDRAFT_INDEX": "/srv/foredraft/my.index",
        }
        podman(
            *("run", "--detach", "--name", self._NAME, "--network", "host"),
            *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--volume", f"{self._folder}/my.index:/srv/foredraft/my.index:ro"),
            *("--volume", f"{self._folder}/access.jsonl:/etc/foredraft/access.jsonl:ro"),
            *("--volume", f"{self._NAME}-state:/var/lib/foredraft"),
            *("--volume", f"{self._NAME}-cache:/var/cache/foredraft"),
            *(word for each in variables.items() for word in ("--env", "=".join(each))),
            *self._options,
            "foredraft",
        )
        try:
            yield
        finally:
            self.remove()

    def remove(self) -> None:
        """Remove it with its volumes, if it is there."""
        podman("rm", "--force", "--ignore", self._NAME)
        podman("volume", "rm", "--force", f"{self._NAME}-state", f"{self._NAME}-cache", check=False)

    def wait(self) -> float:
        """Wait until it takes calls; return the seconds.

        Raises:
            RuntimeError: it does not within three minutes.
        """
        began_s = time.monotonic()
        while reason := why_not_serving(_ADDRESS):
            if time.monotonic() - began_s > _START_S:
                raise RuntimeError(f"{reason}\n{podman('logs', self._NAME)}")
            time.sleep(0.1)
        return time.monotonic() - began_s

    def stop(self) -> tuple[float, int]:
        """Drain and end it; return the seconds and its status."""
        began_s = time.monotonic()
        podman("stop", "--time", "30", self._NAME)
        took_s = time.monotonic() - began_s
        return took_s, int(podman("inspect", "--format", "{{.State.ExitCode}}", self._NAME))

    def start(self) -> float:
        """Start it again; return the seconds until it takes calls."""
        podman("start", self._NAME)
        return self.wait()

    def run(self, *command: str, check: bool = True) -> str:
        """Return what a command prints inside of it."""
        return podman("exec", self._NAME, *command, check=check)

    def probe(self) -> str:
        """Return "ok" if the image's own probe passes, else what it says."""
        done = subprocess.run(
            [PODMAN, "healthcheck", "run", self._NAME],
            capture_output=True,
            text=True,
            check=False,
        )
        return "ok" if done.returncode == 0 else f"{done.stdout}{done.stderr}".strip()


def podman(*arguments: str, check: bool = True) -> str:
    """Return what podman prints.

    Raises:
        RuntimeError: it fails, and `check` is set.
    """
    done = subprocess.run([PODMAN, *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"podman {' '.join(arguments)}: {done.stderr}")
    return done.stdout.strip()


def prepare(folder: Path) -> str:
    """Build an index, and write an access file as an operator does; return a token."""
    corpus = folder / "corpus.txt"
    corpus.write_text((ROOT / "docs" / "architecture.md").read_text())
    foredraft("build", str(corpus), "--output", str(folder / "my.index"))
    token = foredraft("access", "token", "acme", "--access", str(folder / "access.jsonl"))
    (folder / "access.jsonl").chmod(0o640)
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, 0, USER)
        path.chmod(path.stat().st_mode | (0o050 if path.is_dir() else 0o040))
    return token.strip()


def foredraft(*arguments: str) -> str:
    """Return what a command of ours prints."""
    command = [sys.executable, "-m", "foredraft", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def written(num_tokens: int, seed: int) -> TokenIds:
    """Return int32[n], what an engine's target writes: phrases that recur, and other tokens."""
    rng = np.random.default_rng(seed % 2)
    phrases = [rng.integers(200, 4000, rng.integers(5, 20)) for _ in range(12)]
    picked = np.random.default_rng(seed).integers(0, len(phrases), num_tokens)
    return np.concatenate([phrases[each] for each in picked])[:num_tokens].astype(np.int32)


class Engines:
    """Engines that decode sequence after sequence until they are told to end.

    Args:
        token: of their tenant.
        report: what they add to.
    """

    def __init__(self, token: str, report: Report) -> None:
        self._report = report
        self._drafter = ResilientDrafter(
            [_ADDRESS],
            deadline_s=_DEADLINE_S,
            credentials=Credentials(token=token),
            local=False,
        )
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(_NUM_ENGINES)
        ]

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Decode during the block."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in self._threads:
                thread.join()
            self._report.fail_opens = {
                str(reason): times for reason, times in self._drafter.fail_opens.items()
            }
            self._drafter.shut_down()

    def _run(self, engine: int) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            self._decode(f"{engine}-{number}", written(_OUTPUT_TOKENS, 1000 * engine + number))

    def _decode(self, name: str, target: TokenIds) -> None:
        """Decode greedily, and compare with what the target writes alone."""
        output: list[int] = []
        new: list[int] = []
        steps = drafted = 0
        self._drafter.open(name, _PROMPT)
        while len(output) < len(target):
            length = len(_PROMPT) + len(output)
            request = DraftRequest(name, np.array(new, np.int32), length, 16)
            (tree,) = self._drafter.draft([request])
            time.sleep(_PASS_S)
            rest = target[len(output) :]
            path = tree.follow(rest[:-1])
            new = rest[: len(path) + 1].tolist()
            output += new
            steps += 1
            drafted += len(path) > 0
        self._drafter.close(name, np.array(new, np.int32))
        with self._lock:
            self._report.sequences += 1
            self._report.identical += output == target.tolist()
            self._report.steps += steps
            self._report.drafted += drafted


def look(container: Container, report: Report) -> None:
    """Note as what the service runs, and what its probes answer."""
    report.user = int(container.run("id", "-u"))
    status = container.run("cat", "/proc/1/status")
    report.capabilities = next(
        line.split()[1] for line in status.splitlines() if line.startswith("CapEff")
    )
    report.is_read_only = "Read-only" in container.run(
        "sh", "-c", "touch /opt/here 2>&1 || true", check=False
    )
    report.probes = {
        "image": container.probe(),
        "grpc health": why_not_serving(_ADDRESS) or "ok",
        "/ready": fetched("/ready"),
        "/live": fetched("/live"),
    }
    report.refused_without_token = is_refused()


def fetched(path: str) -> str:
    """Return "ok" if a path of the metrics' address answers 200, else what it answers."""
    try:
        with urllib.request.urlopen(f"http://{_METRICS}{path}", timeout=5.0) as answer:
            return "ok" if answer.status == 200 else str(answer.status)  # noqa: PLR2004
    except urllib.error.URLError as error:
        return str(error)


def is_refused() -> bool:
    """Return whether a caller without credentials is refused."""
    with RemoteDrafter(_ADDRESS) as drafter:
        try:
            drafter.open("a", _PROMPT)
        except AccessRefusedError:
            return True
    return False


def is_remembered(token: str) -> bool:
    """Return whether it drafts what was written before it was started."""
    text = written(64, 1)
    with RemoteDrafter(_ADDRESS, credentials=Credentials(token=token)) as drafter:
        drafter.open("remembered", text[:32])
        (tree,) = drafter.draft([DraftRequest("remembered", text[:0], 32, 16)])
        drafter.close("remembered", remember=False)
    return bool(len(tree.token_ids))


def deployed(base: str, restarts: int, options: Sequence[str]) -> Report:
    """Deploy the image, and return what was seen.

    Raises:
        RuntimeError: podman fails, or the service does not start.
    """
    report = Report()
    podman(
        *("build", "--format", "docker", "--build-arg", f"BASE={base}", "--tag", "foredraft"),
        *("--file", str(ROOT / "docs" / "deploy" / "Dockerfile"), *options_of_a_build(), str(ROOT)),
    )
    report.image = int(podman("image", "inspect", "--format", "{{.Size}}", "foredraft"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        token = prepare(folder)
        container = Container(folder, options)
        with container.running():
            report.starts.append(container.wait())
            look(container, report)
            with Engines(token, report).decoding():
                for _ in range(restarts):
                    time.sleep(5.0)
                    report.stops.append(container.stop())
                    time.sleep(1.0)
                    report.starts.append(container.start())
                    report.remembered.append(is_remembered(token))
                time.sleep(5.0)
    return report


def options_of_a_build() -> list[str]:
    """Return what a build needs to reach the package index as this machine does."""
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    if not bundle.exists():
        return []
    return [
        "--isolation",
        "chroot",
        "--volume",
        f"{bundle}:{bundle}:ro",
        "--env",
        f"PIP_CERT={bundle}",
    ]


def main(
    base: Annotated[str, typer.Option(help="The image that ours is built on.")] = (
        "python:3.13-slim"
    ),
    restarts: Annotated[int, typer.Option(min=1, help="How often to stop and start it.")] = 3,
    option: Annotated[
        list[str] | None, typer.Option(help="A further option of `podman run`. Repeatable.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Deploy the image of docs/deploy for real, and stop and start it under load."""
    report = deployed(base, restarts, option or [])
    found: dict[str, Any] = {"machine": platform.platform(), "grpc": grpc.__version__}
    found |= {"base": base, "holds": report.holds, **asdict(report)}
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.items()))
    sys.exit(not report.holds)


if __name__ == "__main__":
    typer.run(main)
