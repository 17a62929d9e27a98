import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from decoder import assembly
from decoder.budget.costs import CostSurface
from decoder.commands.answers import Endings, Printer
from decoder.model import pretrained as models
from decoder.model.pretrained import PreparedModel
from decoder.observation import Statistics
from decoder.speedup import Speedup
from indexer.build import build_from_texts
from indexer.launch import INTERRUPTED, TERMINATED
from retriever.tree import Source
from tests.decoder.commands.command_line import PROMPT, generate, never, run
from tests.decoder.decoding import SIZES
from tests.decoder.model_fixtures import STOP

pytestmark = pytest.mark.usefixtures("costs_of_earlier_tests")
TRACES = pytest.mark.plugin("decoder.plugins.trace")

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def reported(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say what passes cost: measuring it takes seconds where others use the machine."""
    curve = CostSurface.flat((1, 8), (1.0, 1.0))
    monkeypatch.setattr(assembly, "known_costs", lambda *_: curve)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts, the second of which is too long for the model."""
    path = tmp_path / "prompts"
    path.write_text(f"first\n\n{'x' * 128}\nthird\n")
    return path


def test_a_prompt_that_fails_is_reported_and_the_others_go_on(
    model_directory: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--prompts", str(prompts), "--max-new-tokens", "5")
    assert generate(monkeypatch, model_directory, *arguments, "--json") == 1
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row["line"] for row in rows] == [1, 3, 4]
    assert [row["prompt"][:5] for row in rows] == ["first", "xxxxx", "third"]
    assert [row["finish_reason"] for row in rows] == ["length", "error", "length"]
    assert "limit is 128" in rows[1]["error"]
    assert "error: prompt 2 (line 3): the prompt has 128 tokens" in captured.err
    assert "10 tokens, " in captured.err
    for row in (rows[0], rows[2]):
        generate(monkeypatch, model_directory, *arguments[2:], "--prompt", row["prompt"], "--json")
        assert reported(capsys)[0]["token_ids"] == row["token_ids"]
    assert generate(monkeypatch, model_directory, *arguments) == 1
    blocks = capsys.readouterr().out
    assert blocks.startswith(f"[1/3] first\n{rows[0]['text']}\n\n[2/3] xxxx")
    assert blocks.endswith(f"[3/3] third\n{rows[2]['text']}\n\n")
    assert generate(monkeypatch, model_directory, *arguments, "--limit", "1", "--json") == 0
    assert [row["line"] for row in reported(capsys)] == [1]


def test_answers_that_are_made_together_are_those_made_alone(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "prompts"
    lines = ["first", "x" * 128, "third", "abcabcabcabc", "zz", "once more", "x" * 120]
    path.write_text("\n".join(lines) + "\n")
    arguments = ("--prompts", str(path), "--max-new-tokens", "12")
    figures = ("line", "prompt", "text", "token_ids", "finish_reason", "error")

    def rows(*more: str) -> list[dict[str, Any]]:
        assert generate(monkeypatch, model_directory, *arguments, *more, "--json") == 1
        return [{key: row.get(key) for key in figures} for row in reported(capsys)]

    alone, sampled = rows(), ("--temperature", "1", "--seed", "3")
    drawn = rows(*sampled)
    assert rows("--prepare", "200") == alone != drawn
    for parallel in ("2", "8"):
        assert rows("--parallel", parallel) == alone
        assert rows("--parallel", parallel, *sampled) == drawn
    assert rows("--parallel", "2", "--prepare", "200") == alone
    assert generate(monkeypatch, model_directory, *arguments, "--parallel", "2") == 1
    captured = capsys.readouterr()
    headings = re.findall(r"^\[(\d)/7\]", captured.out, re.MULTILINE)
    assert headings == list("1234567")
    assert "error: prompt 2 (line 2): the prompt has 128 tokens" in captured.err
    assert "68 tokens, " in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a"), "--parallel is for a file of prompts: --prompts"),
        (("--prompts", "FILE", "--compare"), "--compare and --parallel exclude each other"),
        (("--prompts", "FILE", "--trace", "t.jsonl"), "--trace and --parallel exclude each other"),
    ],
)
def test_what_is_for_one_answer_at_a_time_is_refused_beside_several(  # noqa: PLR0913, PLR0917  fixtures
    arguments: tuple[str, ...],
    message: str,
    prompts: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(PreparedModel, "load", never)
    given = [str(prompts) if each == "FILE" else each for each in arguments]
    assert generate(monkeypatch, model_directory, *given, "--parallel", "2") == 1
    assert message in capsys.readouterr().err


def test_each_answer_of_a_recorded_conversation_is_given_again(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    said = [("user", "abc"), ("assistant", "cba"), ("user", "bca"), ("assistant", "x")]
    messages = [{"role": role, "content": text} for role, text in said]
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"messages": messages}) + '\n{"messages": [{"ro')
    arguments = ("--prompts", str(log), "--max-new-tokens", "5", "--json", "--compare")
    assert generate(monkeypatch, model_directory, *arguments) == 0
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["line"], row["prompt"]) for row in rows] == [(1, "abc"), (1, "bca")]
    assert all(row["speedup"]["is_identical"] for row in rows)
    found, skipped = captured.err.splitlines()[:2]
    assert found == f"{log}: OpenAI messages, 2 prompts of 1 conversation"
    assert skipped.startswith(f"skipped: 1 not JSON (first: {log}:2; ")
    for row, text in zip(rows, ("abc", "abc\n\ncba\n\nbca"), strict=True):
        alone = ("--prompt", text, "--max-new-tokens", "5", "--json")
        generate(monkeypatch, model_directory, *alone)
        assert reported(capsys)[0]["token_ids"] == row["token_ids"]


def test_answers_end_at_stop_texts_and_stop_tokens(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "30", "--json")

    def report(*more: str) -> dict[str, Any]:
        assert generate(monkeypatch, model_directory, *arguments, *more) == 0
        return reported(capsys)[0]

    whole = report()
    found = re.search(r"(?<=.)[^\ufffd]{1,2}", whole["text"], re.DOTALL)
    assert found
    stop = found.group()
    before = whole["text"][: whole["text"].index(stop)]
    assert (
        report("--stop", stop)["text"] == report("--stop", "zz", "--stop", stop)["text"] == before
    )
    assert report("--stop", stop, "--include-stop")["text"] == before + stop
    stop_id = max(set(whole["token_ids"]), key=whole["token_ids"].index)
    by_token = report("--stop-id", "1", "--stop-id", str(stop_id))
    assert by_token["token_ids"][-1] in {1, stop_id}
    assert by_token["finish_reason"] == "stop"
    assert report("--stop", STOP)["token_ids"] == whole["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", PROMPT, "--stop", ""], "a stop string is empty"),
        (["--prompt", PROMPT, "--prompts", "file"], "exclude each other"),
        (["--prompts", "no-such-file"], "cannot read no-such-file"),
        (["--prompts", "binary"], "not text (first: "),
        pytest.param(
            ["--prompt", PROMPT, "--trace", "/no/such/trace"],
            "there is no folder /no/such",
            marks=TRACES,
        ),
        pytest.param(["--prompt", PROMPT, "--trace", "/"], "it is a folder", marks=TRACES),
        pytest.param(
            ["--prompt", PROMPT, "--trace", "/proc/trace"],
            "no file can be made in /proc: ",
            marks=TRACES,
        ),
        pytest.param(
            ["--prompt", PROMPT, "--html", "/"],
            "cannot write the page /: it is a folder",
            marks=TRACES,
        ),
        pytest.param(
            ["--prompt", PROMPT, "--html", "/proc/page"],
            "cannot write the page /proc/page: no file",
            marks=TRACES,
        ),
        (["--prompt", PROMPT, "--system", "x", "--no-chat-template"], "exclude each other"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (model_directory / "binary").write_bytes(b"\x7fELF\x80\xff")
    monkeypatch.chdir(model_directory)
    monkeypatch.setattr(models, "load_tokenizer", never)
    assert generate(monkeypatch, model_directory, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_what_the_tokenizer_tells_of_options_is_refused_before_the_weights_are_loaded(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PreparedModel, "load", never)
    for arguments, message in (
        (["--stop-id", "-1"], "--stop-id -1 is not a token: this model's ids are from 0 to 256"),
        (["--stop-id", "257"], "--stop-id 257"),
        (["--system", "Be brief."], "needs a chat template"),
    ):
        assert generate(monkeypatch, model_directory, "--prompt", PROMPT, *arguments) == 1
        assert message in capsys.readouterr().err


def test_system_messages_go_into_the_chat_template(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = tmp_path / "chat"
    shutil.copytree(model_directory, chat)
    tokenizer = AutoTokenizer.from_pretrained(chat)

    def token_ids(template: str, *arguments: str) -> list[int]:
        tokenizer.chat_template = template
        tokenizer.save_pretrained(chat)
        assert generate(monkeypatch, chat, "--max-new-tokens", "5", "--json", *arguments) == 0
        found: list[int] = reported(capsys)[0]["token_ids"]
        return found

    plain = "system: Be brief.\nuser: hi\n"
    spelt = token_ids(TEMPLATE, "--prompt", plain, "--no-chat-template")
    assert token_ids(TEMPLATE, "--prompt", "hi", "--system", "Be brief.") == spelt
    tokenizer.chat_template = "{{ raise_exception('no ' + messages[0].role) }}"
    tokenizer.save_pretrained(chat)
    assert generate(monkeypatch, chat, "--prompt", "hi", "--system", "x") == 1
    assert "does not take a system and user message: no system" in capsys.readouterr().err


@TRACES
def test_traces_are_written_and_shown(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "trace.gz"
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "20", "--trace", str(path), "--json")
    assert generate(monkeypatch, model_directory, *arguments) == 0
    report = reported(capsys)[0]
    assert run(monkeypatch, "trace", str(path), "--json") == 0
    summary = reported(capsys)[0]
    assert summary["num_steps"] == report["num_passes"]
    assert summary["num_tokens"] == report["num_tokens"]
    assert sum(summary["widths"].values()) == summary["num_steps"] - 1
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "trace", str(path)) == 0
    table = capsys.readouterr().out
    assert "draft µs" in table
    assert f"passes: {report['num_passes']}" in table
    assert run(monkeypatch, "trace", str(tmp_path)) == 1
    assert capsys.readouterr().err.startswith("error: cannot read ")
    (tmp_path / "empty").touch()
    assert run(monkeypatch, "trace", str(tmp_path / "empty")) == 1
    assert "empty has no pass" in capsys.readouterr().err


@TRACES
def test_what_was_written_is_named(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace, page = tmp_path / "passes.jsonl", tmp_path / "page.html"
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "5")
    for more, told in (
        (["--html", str(page)], f"wrote {page}"),
        (["--html", str(page), "--trace", str(trace)], f"wrote {trace} and {page}"),
    ):
        assert generate(monkeypatch, model_directory, *arguments, *more) == 0
        assert capsys.readouterr().err.splitlines()[-1] == told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "passes.jsonl"]
    assert generate(monkeypatch, model_directory, *arguments) == 0
    assert "wrote" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "is_told"),
    [(Source.CORPUS, False), (Source.PHRASES, False), (Source.CONTEXT, True), (Source.MODEL, True)],
)
def test_texts_and_phrase_tables_of_an_index_are_its_tokens(
    source: Source, capsys: pytest.CaptureFixture[str], *, is_told: bool
) -> None:
    printer = Printer(as_json=False, is_single=True, num_prompts=1, indexes=[Path("x")])
    total = Statistics(num_passes=2, num_tokens=5, accepted=Counter({source: 1}))
    printer.statistics(total, Endings(9), Speedup())
    assert ("no token came from x" in capsys.readouterr().err) == is_told
    printer.statistics(Statistics(num_passes=1), Endings(9), Speedup())
    assert "no token came from" not in capsys.readouterr().err


@TRACES
def test_a_write_protected_file_is_refused_before_anything_is_loaded(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.html"
    page.touch()
    monkeypatch.setattr(os, "access", lambda path, _: path != page)  # root may write it
    monkeypatch.setattr(models, "load_tokenizer", never)
    arguments = ("--prompt", PROMPT, "--html", str(page))
    assert generate(monkeypatch, model_directory, *arguments) == 1
    assert f"cannot write the page {page}: the file is write-protected" in capsys.readouterr().err


def test_an_index_that_brought_nothing_is_told(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "20", "--no-recycle")
    assert generate(monkeypatch, model_directory, *arguments, "--json") == 0
    own = reported(capsys)[0]["text"]
    told = {}
    for name, text in (("its own", PROMPT + own), ("an other", "0123456789" * 9)):
        index = tmp_path / name
        build_from_texts([("a", text)], index, str(model_directory))
        assert generate(monkeypatch, model_directory, *arguments, "--index", str(index)) == 0
        told[name] = capsys.readouterr().err
    assert "no token came from" not in told["its own"]
    assert told["an other"].splitlines()[-1] == (
        f"no token came from {tmp_path}/an other: an index helps if the model repeats text "
        f"from it; `foredraft explain --index '{tmp_path}/an other' --context TEXT` shows what it "
        "would draft"
    )
    more = ("--json", "--index", str(index))
    assert generate(monkeypatch, model_directory, *arguments, *more) == 0
    assert "no token came from" not in capsys.readouterr().err


@TRACES
def test_a_full_disk_keeps_the_text_so_far(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "9", "--trace", "/dev/full", "--json")
    assert generate(monkeypatch, model_directory, *arguments) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert len(report["token_ids"]) == 1
    assert "No space left" in report["error"]
    assert "error: cannot write the trace /dev/full: No space left" in captured.err


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """A tiny model whose answers have no end."""
    torch.manual_seed(5)
    directory = tmp_path_factory.mktemp("endless")
    shutil.copytree(model_directory, directory, dirs_exist_ok=True)
    config = LlamaConfig(
        **SIZES,
        vocab_size=257,
        num_hidden_layers=2,
        max_position_embeddings=10**7,
        eos_token_id=999,  # no token
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.programs
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)]
)
def test_a_signal_leaves_a_page_of_what_there_is(
    endless: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    page, place = tmp_path / "passes.html", tmp_path / "temporary"
    place.mkdir()
    command = [sys.executable, "-m", "decoder", "generate", "--model", str(endless)]
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "1000000", "--html", str(page)]
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(place)},
    ) as process:
        assert process.stdout is not None
        process.stdout.read(100)
        assert list(place.glob("foredraft-*"))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert b"Traceback" not in errors
    assert errors.splitlines()[-3].count(b"tokens/s") == 1
    assert errors.splitlines()[-1] == f"wrote {page}".encode()
    assert page.read_text().rstrip().endswith("</html>")
    assert not list(place.glob("foredraft-*"))


@pytest.mark.programs
@pytest.mark.parametrize("moment", ["loading", "generating"])
def test_ctrl_c_leaves_a_clean_terminal(endless: Path, moment: str) -> None:
    command = [sys.executable, "-m", "decoder", "generate", "--model", str(endless)]
    arguments = ["--prompt", PROMPT, "--max-new-tokens", "1000000"]
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        begun = process.stderr.readline() if moment == "loading" else process.stdout.read(100)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    if moment == "loading":
        assert begun.startswith(b"loading")
        assert output == b""
    else:
        assert output.endswith(b"\n")
        assert errors.splitlines()[-2].count(b"tokens/s") == 1


def test_answers_are_drafted_from_predicted_files(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "40", "--json")
    assert generate(monkeypatch, model_directory, *arguments) == 0
    (plain,) = reported(capsys)
    expected, other = tmp_path / "expected.txt", tmp_path / "other.txt"
    expected.write_text(plain["text"])
    other.write_text("something else\n")
    predicted = ("--prediction", str(other), "--prediction", str(expected))
    assert generate(monkeypatch, model_directory, *arguments, *predicted) == 0
    (answer,) = reported(capsys)
    assert answer["token_ids"] == plain["token_ids"]
    assert answer["accepted"]["predictions"] > 0
    assert "predictions" not in plain["accepted"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read"), (b"", "is empty: leave it out"), (b"\xff\xfe", "is not UTF-8")],
)
def test_what_is_no_predicted_text_is_refused_by_its_file(  # noqa: PLR0913, PLR0917  (fixtures)
    content: bytes | None,
    reason: str,
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "predicted"
    if content is not None:
        path.write_bytes(content)
    arguments = ("--prompt", PROMPT, "--prediction", str(path))
    assert generate(monkeypatch, model_directory, *arguments) == 1
    assert f"error: --prediction {path} {reason}" in capsys.readouterr().err
