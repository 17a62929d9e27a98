import gzip
import json
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.index.growth import BuildFailedError, Corpora
from benchmarks.stitching import MAX_SPAN_WORDS, MIN_SPAN_WORDS, SPANS, stitch, write_corpus

ROOT = Path(__file__).parents[3]
DOCUMENTS = [" ".join(f"{name}{number}" for number in range(200)) for name in "abcdefghij"]


def written(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line)["text"] for line in file]


def test_synthetic_text_depends_on_the_seed_alone() -> None:
    first = list(islice(stitch(DOCUMENTS, 1), 20))
    assert first == list(islice(stitch(DOCUMENTS, 1), 20))
    assert first != list(islice(stitch(DOCUMENTS, 2), 20))
    assert len(set(first)) == 20


def test_synthetic_documents_are_spans_of_the_given_ones() -> None:
    for document in islice(stitch(DOCUMENTS, 3), 50):
        words = document.split(" ")
        assert SPANS * MIN_SPAN_WORDS <= len(words) <= SPANS * MAX_SPAN_WORDS
        follow = pairwise(words)
        breaks = sum(int(b[1:]) != int(a[1:]) + 1 or a[0] != b[0] for a, b in follow)
        assert breaks <= SPANS - 1


def test_short_documents_are_taken_whole_and_white_space_stays() -> None:
    assert next(stitch(["one\n\n  two\tthree\n"], 0)) == " ".join(["one\n\n  two\tthree"] * SPANS)


def test_every_span_can_be_drawn() -> None:
    words = {word for text in islice(stitch(DOCUMENTS, 4), 3000) for word in text.split()}
    assert words == {word for text in DOCUMENTS for word in text.split()}


def test_small_corpus_is_the_first_documents(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    result = write_corpus(path, DOCUMENTS, len(DOCUMENTS[0]) + 1, 0)
    assert written(path) == DOCUMENTS[:2]
    assert (result.documents, result.synthetic_documents, result.synthetic_share) == (2, 0, 0)


def test_large_corpus_is_all_documents_and_synthetic_ones(tmp_path: Path) -> None:
    path, size = tmp_path / "corpus.jsonl.gz", sum(map(len, DOCUMENTS))
    result = write_corpus(path, DOCUMENTS, 2 * size, 0)
    texts = written(path)
    made = texts[len(DOCUMENTS) :]
    assert texts[: len(DOCUMENTS)] == DOCUMENTS
    assert made == list(islice(stitch(DOCUMENTS, 0), len(made)))
    assert sum(map(len, texts[:-1])) < 2 * size <= sum(map(len, texts))
    assert (result.documents, result.synthetic_documents) == (len(texts), len(made))
    assert result.synthetic_share == sum(map(len, made)) / sum(map(len, texts))


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A tokenizer of the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={s: n for n, s in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def growth(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.index.growth", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.programs
def test_growth_is_written_for_programs_and_people(tmp_path: Path, tokenizer_folder: Path) -> None:
    corpus, traces = tmp_path / "corpus.jsonl", tmp_path / "traces.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    traces.write_text(json.dumps({"prompt": "Go on:", "output": DOCUMENTS[0][:80]}) + "\n")
    given = ("--corpus", corpus, "--traces", traces, "--warm", traces)
    sizes = ("--tokens", "1_000", "--tokens", 20000, "--tokenizer", tokenizer_folder)
    done = growth(*given, *sizes, "--output", tmp_path / "out" / "run", "--machine", "test's")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (report["machine"], report["traces"], report["warm_outputs"]) == ("test's", 1, 1)
    small, large = report["sizes"]
    assert 1000 <= small["tokens"] < 2500
    assert 20000 <= large["tokens"] < 24000
    assert small["synthetic_share"] == 0 < large["synthetic_share"] < 1
    assert large["p50_to_size_before"] == large["draft_us"]["p50"] / small["draft_us"]["p50"]
    assert min(small["tokens_per_step"], large["tokens_per_step"]) > 5
    assert (tmp_path / "out" / "run.md").read_text() in done.stdout
    assert f"| {large['tokens']:,} |" in done.stdout
    assert "synthetic" in done.stdout
    assert "warming up" in done.stderr


@pytest.mark.parametrize(
    ("corpus", "reason"), [("missing.jsonl", "cannot read the source"), ("empty.jsonl", "no text")]
)
def test_corpus_without_text_is_said_in_one_line(
    tmp_path: Path, tokenizer_folder: Path, corpus: str, reason: str
) -> None:
    traces = tmp_path / "traces.jsonl"
    traces.write_text('{"prompt_ids": [1], "output_ids": [2]}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    given = ("--corpus", tmp_path / corpus, "--traces", traces, "--tokenizer", tokenizer_folder)
    done = growth(*given, "--output", tmp_path / "run")
    assert done.returncode == 1
    assert reason in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_failed_build_is_an_error(tmp_path: Path) -> None:
    corpora = Corpora(DOCUMENTS, 1.0, str(tmp_path / "none"), tmp_path, 0)
    with pytest.raises(BuildFailedError, match="10 tokens could not be built"):
        corpora.build(10)
