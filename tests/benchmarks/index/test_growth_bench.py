import json
from pathlib import Path

from tests.benchmarks.conftest import run_apart
from tests.indexer.engines.corpora import save_byte_tokenizer

DOCUMENTS = [" ".join(f"{name}{number}" for number in range(200)) for name in "abcdefghij"]


def test_growth_is_written_for_programs_and_people(tmp_path: Path) -> None:
    corpus, traces = tmp_path / "corpus.jsonl", tmp_path / "traces.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    traces.write_text(json.dumps({"prompt": "Go on:", "output": DOCUMENTS[0][:80]}) + "\n")
    given = ("--corpus", corpus, "--traces", traces, "--warm", traces)
    sizes = (
        "--tokens",
        "1_000",
        "--tokens",
        20000,
        "--tokenizer",
        save_byte_tokenizer(tmp_path / "tokenizer"),
    )
    done = run_apart(
        "benchmarks.index.growth",
        *given,
        *sizes,
        "--output",
        tmp_path / "out" / "run",
        "--machine",
        "test's",
    )
    assert done.status == 0, done.stderr
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
