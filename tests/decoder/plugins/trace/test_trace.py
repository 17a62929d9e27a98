import gzip
import json
from pathlib import Path
from statistics import median

import pytest
from transformers import PreTrainedTokenizerBase

from decoder.commands.generate import AnswerOptions, Interruption, Task, answer
from decoder.errors import TraceFileError
from decoder.model.pretrained import LanguageModel
from decoder.plugins.trace.trace import TraceWriter, read_trace
from decoder.plugins.trace.trace_command import summarize
from decoder.stopping import plain_text
from retriever.tree import Source
from tests.decoder.decoding import (
    ScriptedDrafter,
    decoder_with,
    nothing,
    oracle,
    plainly,
    prompt_of,
    tiny_llama,
)

NEW_TOKENS = 30
FULL = Path("/dev/full")


def test_a_full_disk_ends_a_traced_answer_and_keeps_its_text(language_model: LanguageModel) -> None:
    prompt, drafter = language_model.encode("abcabc"), ScriptedDrafter(nothing)
    decoder = decoder_with(language_model.model, drafter)
    with TraceWriter(FULL, language_model.tokenizer) as writer:
        task = Task(prompt, observer=writer.observer(1))
        result = answer(decoder, language_model, task, AnswerOptions(NEW_TOKENS), Interruption())
    assert "cannot write the trace /dev/full: No space left" in str(result.error)
    assert result.token_ids == plainly(language_model.model, prompt, 1)
    assert result.text == plain_text(language_model.tokenizer, result.token_ids)
    assert drafter.closed == [prompt + result.token_ids]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_tells_every_pass(
    name: str, tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    model, prompt, path = tiny_llama(layers=3), prompt_of(12), tmp_path / name
    truth = plainly(model, prompt, NEW_TOKENS)
    decoder = decoder_with(model, ScriptedDrafter(oracle(prompt + truth)))
    with TraceWriter(path, byte_tokenizer) as writer:
        generation = decoder.generate(prompt, NEW_TOKENS, observer=writer.observer(1))
        passes = list(generation)
        list(decoder.generate(prompt, 2, observer=writer.observer(2)))
    steps = [step for step in read_trace(path) if step.prompt == 1]
    assert [step.tokens for step in steps] == passes
    assert [step.step for step in steps] == list(range(1, len(passes) + 1))
    assert steps[0].is_prompt
    assert not steps[0].tree.tokens
    for step in steps:
        accepted = [step.tree.tokens[node] for node in step.path]
        assert step.tokens[: len(accepted)] == accepted
        assert step.num_kept <= len(step.tree.tokens)
        assert step.tree.texts == [byte_tokenizer.decode([t]) for t in step.tree.tokens]
        assert set(step.tree.sources) <= {"context"}
        assert min(step.draft_us, step.target_us, step.host_us) >= 0
    statistics = generation.statistics
    target_s = sum(step.target_us for step in steps) / 1e6
    assert target_s == pytest.approx(statistics.target_s, rel=0.01)
    summary = summarize(steps)
    assert summary.num_steps == statistics.num_passes
    assert summary.num_tokens == statistics.num_tokens == NEW_TOKENS
    assert summary.num_verified == statistics.num_drafted
    assert summary.accepted == {"context": statistics.accepted[Source.CONTEXT]}
    assert summary.widths.total() == len(passes) - 1
    assert summary.median_us["target"] == median(step.target_us for step in steps[1:])
    assert summarize(read_trace(path)).num_prompts == 2


def test_a_trace_with_gz_is_compressed(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "t.gz"
    TraceWriter(path, byte_tokenizer).close()
    assert gzip.decompress(path.read_bytes()) == b""
    assert summarize(read_trace(path)).report()["num_steps"] == 0


LINE = {
    "prompt": 1,
    "step": 1,
    "tree": {"tokens": [], "texts": [], "parents": [], "probabilities": [], "sources": []},
    "num_kept": 0,
    "path": [],
    "tokens": [1],
    "text": "a",
    "draft_us": 0,
    "target_us": 1.5,
    "host_us": 2,
    "pieces": ["a"],
    "evidence": [],
    "prompt_text": "",
}


@pytest.mark.parametrize(
    "line",
    [
        b"\xff",
        b"not json",
        b"[]",
        b"{}",
        json.dumps({**LINE, "path": [0]}).encode(),
        json.dumps({**LINE, "path": 3}).encode(),
        json.dumps({**LINE, "tree": {**LINE["tree"], "tokens": [1]}}).encode(),  # type: ignore[dict-item]
        json.dumps({**LINE, "step": float("inf")}).encode(),
        json.dumps({**LINE, "pieces": []}).encode(),
        b"[" * 100_000,
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(json.dumps(LINE).encode() + b"\n" + line)
    with pytest.raises(TraceFileError, match="trace"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": 1}', "trace:1 is not a pass of a trace: it has no 'tree'$"),
        (b'{"tree": {"tokens": []}}', "it has no 'texts'$"),
        (b"[1]", "it is not a JSON object$"),
        (b"words", "it is not JSON$"),
        (b"\xff\xfe", "trace is not text in UTF-8$"),
    ],
)
def test_what_a_line_lacks_is_told_in_words(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(line)
    with pytest.raises(TraceFileError, match=message):
        list(read_trace(path))


def test_missing_and_unwritable_files_are_errors(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(TraceFileError, match="No such file"):
        list(read_trace(tmp_path / "missing"))
    with pytest.raises(TraceFileError, match="Is a directory"):
        TraceWriter(tmp_path, byte_tokenizer)
