import json
import random
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.index.process_tree import TreeMemory, kill_tree, memory_of_tree, tree_of
from benchmarks.index.scale_report import as_markdown, judged
from tests.benchmarks.conftest import run_apart
from tests.indexer.engines.corpora import save_byte_tokenizer

MIB = 1 << 20


def documents(number: int, seed: int = 0) -> list[str]:
    """Return documents of paragraphs, of words of which few are frequent, and of numbers."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(3, 9))) for _ in range(3000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]

    def paragraph() -> str:
        chosen = rng.choices(words, weights, k=40)
        return f"{' '.join(chosen)}: {rng.randrange(100, 999)}"

    return ["\n\n".join(paragraph() for _ in range(8)) for _ in range(number)]


HOLDER = """
import os, subprocess, sys, time
held = bytearray(os.urandom({own}))
children = [subprocess.Popen([sys.executable, "-c",
    "import os, time; held = os.urandom({each}); os.write(1, bytes([33, 10])); time.sleep(60)"])
    for _ in range(2)]
time.sleep(60)
"""


def test_memory_is_that_of_all_processes_of_a_tree() -> None:
    script = HOLDER.format(own=40 * MIB, each=30 * MIB)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["!\n"] * 2
        memory = memory_of_tree(parent.pid)
        members = [*tree_of(parent.pid)]
        kill_tree(parent.pid)
        parent.wait()
    assert memory.processes == 3 == len(members)
    assert 100 * MIB <= memory.own < 160 * MIB
    assert 0 < memory.processor_s < 30
    deadline = time.monotonic() + 10
    while any(map(is_running, members)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, members))
    assert memory_of_tree(parent.pid) == TreeMemory()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_was_missed_stands_first() -> None:
    run = {"memory_mib": 5000.0, "seconds": 10.0}
    large = {
        "runs": [run],
        "report": {"tokens": 4_000_000},
        "bytes_on_disk": 7 * 4_000_000,
    }
    drafts = {
        name: {"warm": {"draft_us": {"p50": p50}}} for name, p50 in (("small", 20), ("large", 40))
    }
    gates = judged({"large": large, "drafts": drafts})
    assert [gate["met"] for gate in gates] == [False, False, True, True]
    assert [gate["figure"] for gate in gates] == [5000.0, 2.0, 400_000, 7.0]
    killed = {**large, "runs": [{"memory_mib": 1.0, "seconds": 30.0}, run]}
    assert {gate["figure"] for gate in judged({"large": killed})} == {5000.0, 100_000, 7.0}
    assert judged({}) == []


def test_a_run_is_killed_once_resumed_and_whole(tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(documents(300)):
        (folder / f"{number:03d}.txt").write_text(text)
    given = ["--text", folder, "--tokens", 4_000_000, "--real-share", 0.2, "--seed", 3]
    given += ["--tokenizer", tokenizer, "--segment-tokens", 1_300_000, "--workers", 1, "--limit", 5]
    given += ["--join", "2G", "--folder", tmp_path / "run", "--output", tmp_path / "out"]
    done = run_apart("benchmarks.index.scale", *given)
    assert done.status == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert done.stdout == as_markdown(report) + "\n"
    killed, last = report["large"]["runs"]
    assert killed["killed_in"] == "sorting"
    assert "interrupted" not in last
    assert report["large"]["report"]["tokens"] >= 3_800_000
    assert report["large"]["report"]["segments"] >= 3
    assert 0.75 < report["text"]["made_share"] < 0.85
    assert report["verify"]["report"]["findings"] == []
    assert report["drafts"]["large"]["warm"]["tokens_per_step"] >= 1
    assert report["join"]["report"]["segments"] == 1
