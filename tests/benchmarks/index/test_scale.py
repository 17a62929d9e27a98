import json
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.index.cold_drafts import cached_share, drop_from_cache
from benchmarks.index.process_tree import (
    Peaks,
    TreeMemory,
    bytes_on_disk,
    kill_tree,
    memory_of_tree,
    tree_of,
    watched,
)
from benchmarks.index.scale_report import as_markdown, judged
from benchmarks.index.scale_text import (
    Shard,
    TextWriter,
    distinct_shares,
    is_held_out,
    real_documents,
    write_made,
    write_real,
)
from benchmarks.stitching import NoTextError
from tests.indexer.engines.corpora import save_byte_tokenizer

ROOT = Path(__file__).parents[3]
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


def paragraphs_of(text: str) -> list[str]:
    return text.split("\n\n")


def ids_of(texts: list[str]) -> Any:
    numbers: dict[str, int] = {}
    words = [word for text in texts for word in text.split()]
    return np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int64)


def test_made_text_depends_on_the_seed_alone() -> None:
    texts = documents(20)
    first = [*Shard.of(texts).made((1, 2))]
    assert first == [*Shard.of(texts).made((1, 2))]
    assert first != [*Shard.of(texts).made((1, 3))]
    assert len(set(first)) == 20 == len(first)
    assert not set(first) & set(texts)


def test_what_is_copied_between_made_documents_is_a_small_share_word_for_word() -> None:
    texts = documents(200)
    real = {part for text in texts for part in paragraphs_of(text)}
    made = [part for text in Shard.of(texts).made((0,)) for part in paragraphs_of(text)[1:]]
    copied = sum(part in real for part in made) / len(made)
    assert 0.02 < copied < 0.1
    left = sum(map(len, map(paragraphs_of, Shard.of(texts).made((0,)))))
    assert 0.85 < left / sum(map(len, map(paragraphs_of, texts))) < 0.95


def test_a_word_is_renamed_alike_everywhere_in_a_document_and_frequent_ones_never() -> None:
    texts = documents(40, seed=1)
    shard = Shard.of(texts)
    frequent = {shard.pieces[place] for place in shard.ranked[0][:200]}
    first = [paragraphs_of(text)[0].split() for text in texts]
    made = [paragraphs_of(text)[0].split() for text in shard.made((0,))]
    renamed = 0
    for before, after in zip(first, made, strict=True):
        names: dict[str, str] = {}
        for old, new in zip(before, after, strict=True):
            assert names.setdefault(old, new) == new
            assert old == new or old.strip(":") not in frequent
            renamed += old != new
    assert 0.1 < renamed / sum(map(len, first)) < 0.7


def test_made_text_has_frequencies_and_new_phrases_as_real_text_has() -> None:
    texts = documents(400, seed=2)
    half = Shard.of(texts[:200])
    made = ids_of([text for turn in range(2) for text in half.made((0, turn))])
    real, twice = ids_of(texts), ids_of(texts[:200] * 2)
    orders = (1, 2, 4, 8)
    of_real, of_made, of_copies = (distinct_shares(ids, orders) for ids in (real, made, twice))
    for order in orders[1:]:
        assert of_made[order] == pytest.approx(of_real[order], rel=0.2)
        assert of_copies[order] < 0.7 * of_made[order]
    counts = [np.sort(np.bincount(ids))[::-1] / len(ids) for ids in (real, made)]
    assert counts[1][:50].sum() == pytest.approx(counts[0][:50].sum(), rel=0.1)


def test_distinct_shares_are_those_of_a_set() -> None:
    ids = np.random.default_rng(0).integers(0, 5, 3000)
    for order, share in distinct_shares(ids, (1, 2, 3, 5)).items():
        grams = [tuple(ids[place : place + order]) for place in range(len(ids) - order + 1)]
        assert share == len(set(grams)) / len(grams)


def test_real_documents_are_texts_each_once(tmp_path: Path) -> None:
    texts = documents(3)
    for number, text in enumerate([*texts, texts[0], "short", "\0" * 500]):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "records.json").write_text(json.dumps([{"text": texts[0] + "more"}]))
    (tmp_path / "picture.png").write_bytes(b"x" * 500)
    assert [*real_documents([tmp_path])] == texts


def test_a_corpus_is_found_again_and_held_out_documents_are_not_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(documents(300)):
        (folder / f"{number:03d}.txt").write_text(text)
    writer = TextWriter(tmp_path / "corpus")
    *real, held_out = write_real([folder], writer, 10**9)
    made = [*write_made(real, writer, 3 * real[0].characters, 5)]
    texts = [text for file in real for text in file.texts()]
    kept = [*held_out.texts()]
    assert sorted([*texts, *kept]) == sorted(documents(300))
    assert all(map(is_held_out, kept))
    assert not any(map(is_held_out, texts))
    assert len(made) == 4  # paragraphs are left out, so that three do not do
    longest = max(map(len, texts))
    assert 0 <= sum(file.characters for file in made) - 3 * real[0].characters < 2 * longest
    files = sorted((tmp_path / "corpus").glob("*.jsonl"))
    times = [file.stat().st_mtime_ns for file in files]
    assert write_real([folder], writer, 10**9) == (*real, held_out)
    assert [*write_made(real, writer, 3 * real[0].characters, 5)] == made
    assert [file.stat().st_mtime_ns for file in files] == times
    content = made[1].path.read_bytes()
    made[1].note.unlink()
    assert [*write_made(real, writer, 3 * real[0].characters, 5)] == made
    assert made[1].path.read_bytes() == content


def test_folders_without_text_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(NoTextError, match="--text"):
        write_real([tmp_path], TextWriter(tmp_path / "corpus"), 10**9)


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


def test_a_watched_command_is_sampled_by_stage(tmp_path: Path) -> None:
    script = (
        "import pathlib, time, sys\nplace = pathlib.Path(sys.argv[1])\n"
        "time.sleep(0.5)\n(place / 'b').write_bytes(bytes(3 << 20))\n"
        "held = bytearray(64 << 20)\ntime.sleep(0.7)\nprint('done')"
    )
    samples: list[tuple[float, str]] = []
    run = watched(
        [sys.executable, "-c", script, str(tmp_path)],
        tmp_path,
        lambda: "second" if (tmp_path / "b").exists() else "first",
        lambda so_far, stage, _memory, _disk: samples.append((so_far.seconds, stage)),
    )
    assert (run.status, run.output, run.killed_in) == (0, "done\n", "")
    assert [*run.peaks.own_by_stage] == ["first", "second"]
    assert run.peaks.own_by_stage["first"] < 32 * MIB < 64 * MIB < run.peaks.own
    assert run.peaks.disk >= 3 * MIB
    assert sum(run.peaks.seconds_by_stage.values()) == pytest.approx(run.seconds, abs=0.5)
    assert all(one < other for (one, _), (other, _) in pairwise(samples))
    assert len(samples) == run.peaks.samples >= 5


def test_a_command_is_killed_in_the_stage_that_was_named(tmp_path: Path) -> None:
    run = watched(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        tmp_path,
        lambda: "stage",
        lambda *_: None,
        lambda stage, seconds: stage == "stage" and seconds > 0.2,
    )
    assert (run.status, run.killed_in) == (-9, "stage")
    assert run.seconds < 30
    assert run.to_json()["killed_in"] == "stage"


def test_time_in_which_all_was_suspended_counts_in_no_stage() -> None:
    peaks = Peaks()
    for seconds, stage in ((0.1, "first"), (600.0, "first"), (0.2, "first"), (0.3, "second")):
        peaks.add(TreeMemory(1, 2, 3), stage, seconds)
    assert peaks.seconds_by_stage == {"first": pytest.approx(0.3), "second": 0.3}
    assert peaks.suspended_s == 600.0


def test_files_are_dropped_from_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a").write_bytes(os.urandom(MIB))
    (tmp_path / "b").write_bytes(os.urandom(MIB))
    (tmp_path / "empty").touch()
    assert cached_share(tmp_path) == 1
    assert bytes_on_disk(tmp_path) >= 2 * MIB
    drop_from_cache(tmp_path)
    if cached_share(tmp_path) == 1:
        pytest.skip("this file system is in memory")
    assert cached_share(tmp_path) < 0.1
    (tmp_path / "b").read_bytes()
    assert 0.4 < cached_share(tmp_path) < 0.6


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


@pytest.mark.programs
def test_a_run_is_whole_and_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(documents(300)):
        (folder / f"{number:03d}.txt").write_text(text)
    given = ["--text", folder, "--tokens", 1_500_000, "--real-share", 0.2, "--seed", 3]
    given += ["--tokenizer", tokenizer, "--segment-tokens", 500_000, "--workers", 1]
    given += [
        "--limit",
        5,
        "--join",
        "2G",
        "--folder",
        tmp_path / "run",
        "--output",
        tmp_path / "out",
    ]
    command = [sys.executable, "-m", "benchmarks.index.scale", *map(str, given)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert done.stdout == (tmp_path / "out.md").read_text() + "\n"
    assert done.stdout == as_markdown(report) + "\n"
    killed, last = report["large"]["runs"]
    assert killed["killed_in"] == "sorting"
    assert "interrupted" not in last
    assert report["large"]["report"]["tokens"] >= 1_400_000
    assert report["large"]["report"]["segments"] >= 3
    assert 0.75 < report["text"]["made_share"] < 0.85
    assert report["verify"]["report"]["findings"] == []
    assert report["drafts"]["large"]["warm"]["tokens_per_step"] >= 1
    assert 1 <= report["drafts"]["small"]["cold"]["sequences"] <= 5
    assert report["join"]["report"]["segments"] == 1
    assert report["drafts_joined"]["large"]["warm"]["segments"] == 1
    assert str(tmp_path / "run") not in (tmp_path / "out.json").read_text()
    steps = json.loads((tmp_path / "run" / "steps.json").read_text())
    del steps["verify"], steps["join"], steps["large"]
    assert "large_runs" not in steps
    assert killed["processor_s"] + last["processor_s"] > 0
    steps["large_runs"] = [killed, {**last, "interrupted": True}]
    (tmp_path / "run" / "steps.json").write_text(json.dumps(steps))
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "small: done before" in again.stderr
    large = json.loads((tmp_path / "out.json").read_text())["large"]
    assert large["report"]["tokens"] == report["large"]["report"]["tokens"]
    assert len(large["runs"]) == 3
    assert "run was interrupted" in again.stdout
    other = subprocess.run(
        [*command, "--seed", "4"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert other.returncode == 1
    assert "holds another run" in other.stderr
