import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from indexer.engines import Serial
from indexer.engines.memory import available_bytes, default_limit, describe_size, parse_size
from indexer.engines.processes import ProcessPool
from indexer.errors import IndexerError
from indexer.plugins.ray.ray_cluster import RayCluster
from indexer.reader import Index
from indexer.stages.build_options import BuildOptions, engine_of
from tests.indexer.engines.corpora import save_byte_tokenizer
from tests.indexer.engines.process_memory import run_and_watch

MIB = 1 << 20
GIB = 1 << 30
ROOT = Path(__file__).parents[3]


# Builds with four workers of blocks so small that there are several.
BUILD = """
import sys
from indexer.build import BuildOptions, build_index
from indexer.stages.build_options import engine_of
from indexer.sources import SourceOptions

if __name__ == "__main__":
    source, output, tokenizer, limit = *sys.argv[1:4], int(sys.argv[4])
    engine = engine_of("processes", 4, limit)
    sources = SourceOptions(block_bytes=1 << 19)
    options = BuildOptions(sources, 1_600_000, engine=engine)
    build_index([source], output, tokenizer, options)
"""


@pytest.mark.soak
def test_a_build_keeps_to_its_memory(tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    rng = random.Random(1)
    (tmp_path / "source").mkdir()
    for number in range(5):
        documents = ["".join(rng.choices("aab \n", k=150_000)) for _ in range(4)]
        lines = [json.dumps({"text": each}) for each in documents]
        (tmp_path / "source" / f"{number}.jsonl").write_text("\n".join(lines))
    limit = 720 * MIB
    script = tmp_path / "build.py"
    script.write_text(BUILD)
    words = [tmp_path / "source", tmp_path / "index", tokenizer, limit]
    peak, _ = run_and_watch([sys.executable, script, *words], ROOT)
    assert peak.num_processes >= 3  # itself, what multiprocessing keeps, and a worker
    assert limit / 3 < peak.private_bytes <= peak.pss_bytes <= limit
    with Index.open(tmp_path / "index") as index:
        assert len(index.segments) == 2
        assert index.num_tokens == 3_000_000


@pytest.mark.soak
def test_too_little_memory_is_one_clear_error(tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("text " * 100)
    words = ["-m", "indexer", "build", tmp_path / "a.txt", "--tokenizer", tokenizer]
    done = subprocess.run(
        [sys.executable, *map(str, words), "--output", tmp_path / "index", "--memory", "300M"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "error: 300.0M of memory is too little, this build takes" in done.stderr
    assert "--memory" in done.stderr
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512M", 512 * MIB), ("4g", 4 * GIB), ("1.5GiB", 3 * GIB // 2), (" 2 KB ", 2048)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1G", "4X", "G", "1e9", "4 G G", "nan", "\u0664G"])
def test_what_is_no_size_is_an_error(text: str) -> None:
    with pytest.raises(IndexerError, match="is not a size: write it like 512M"):
        parse_size(text)


def test_sizes_are_written_so_that_they_can_be_read() -> None:
    assert [describe_size(size) for size in (7, 2048, GIB, GIB + 1)] == [
        "7",
        "2.0K",
        "1.0G",
        "1.1G",
    ]
    for size in (7, 2048, 5 * MIB + 3, 3 * GIB // 2, 9 << 40):
        assert size <= parse_size(describe_size(size)) <= size * 1.1 + 1


def test_what_a_process_takes_grows_with_it() -> None:
    script = (
        "import os; from indexer.engines.memory import bytes_taken; before = bytes_taken()\n"
        "held = os.urandom(64 << 20); print(before, bytes_taken() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before, more = map(int, done.stdout.split())
    assert MIB < before < 64 * MIB < more < 80 * MIB


def test_the_limits_of_control_groups_count(tmp_path: Path) -> None:
    free = available_bytes()
    assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = tmp_path / "sys/fs/cgroup/group"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:name=other:/elsewhere\n0::/group/inner\n")
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("600000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert available_bytes(tmp_path) == 500_000
    assert default_limit(tmp_path) == 500_000
    (group / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 500_000


def test_segments_are_halved_until_sorting_one_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert BuildOptions().most_tokens(50_000) == 64_000_000
    assert BuildOptions(engine=Serial(4 * GIB)).most_tokens(50_000) == 64_000_000
    assert caplog.messages == []
    assert BuildOptions(engine=Serial(GIB)).most_tokens(50_000) == 32_000_000
    assert BuildOptions(engine=Serial(GIB)).most_tokens(150_000) == 16_000_000
    assert "segments of at most 16,000,000 tokens" in caplog.text
    assert BuildOptions(segment_tokens=9, engine=Serial(GIB)).most_tokens(50_000) == 9
    with pytest.raises(IndexerError, match=r"too little for a build: allow at least .*M"):
        BuildOptions(engine=Serial(512 * MIB)).most_tokens(50_000)


def test_engines_are_named() -> None:
    assert engine_of("serial", memory_bytes=GIB) == Serial(GIB)
    assert engine_of("processes", 3, GIB) == ProcessPool(3, GIB)
    assert engine_of("ray", 3, GIB) == RayCluster(3, GIB)
    default = engine_of("processes")
    assert isinstance(default, ProcessPool)
    assert default.workers == len(os.sched_getaffinity(0))
    with pytest.raises(IndexerError, match="no engine 'spark': choose from processes, ray, serial"):
        engine_of("spark")
