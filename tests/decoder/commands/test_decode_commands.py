import io
import json
import re
import shutil
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
from numpy.typing import ArrayLike
from typer.main import get_command

from decoder import assembly
from decoder.commands import generate_command
from decoder.loop import Decoder
from decoder.model import pretrained as models
from decoder.model.pretrained import (
    Attention,
    LanguageModel,
    ModelOptions,
    PreparedModel,
    load_model,
)
from foredraft.program import commands
from indexer.build import build_from_texts, build_from_tokens
from indexer.reader import Vocabulary
from retriever.drafter import DEFAULT, SequenceOptions
from retriever.sessions.embedded import EmbeddedDrafter
from tests.decoder.commands.command_line import PROMPT, WORTH, generate, never, run
from tests.decoder.decoding import plainly

pytestmark = pytest.mark.usefixtures("costs_of_earlier_tests")


def test_generate_prints_what_the_model_generates(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    language_model = load_model(ModelOptions(str(model_directory)))
    expected = plainly(language_model.model, language_model.encode(PROMPT), 20, 0)
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "20")
    assert generate(monkeypatch, model_directory, *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["token_ids"] == expected
    assert generate(monkeypatch, model_directory, *arguments) == 0
    output = capsys.readouterr()
    assert output.out == report["text"] + "\n"
    assert "tokens/s" in output.err


def test_generate_reads_standard_input(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for given in (["--prompt", PROMPT], []):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
        generate(monkeypatch, model_directory, "--max-new-tokens", "5", *given)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_standard_input_that_is_not_utf8_is_refused(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert generate(monkeypatch, model_directory) == 1
    assert "error: standard input is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "remembered"), [((), True), (("--forget",), False)])
def test_answers_are_forgotten_if_wanted(
    option: tuple[str, ...],
    remembered: bool,  # noqa: FBT001  a parameter of the test
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened = []

    class Watched(EmbeddedDrafter):
        def open(self, session: str, prompt: ArrayLike, options: SequenceOptions = DEFAULT) -> None:
            opened.append(options.remember)
            super().open(session, prompt, options)

    monkeypatch.setattr(assembly, "EmbeddedDrafter", Watched)
    generate(monkeypatch, model_directory, "--prompt", PROMPT, "--max-new-tokens", "2", *option)
    assert opened == [remembered]
    assert ("--forget has no effect here" in capsys.readouterr().err) == bool(option)


@pytest.mark.parametrize(
    ("option", "value"), [("--top-p", "0"), ("--top-p", "nan"), ("--repetition-penalty", "0")]
)
def test_what_lies_outside_an_open_range_is_refused_by_its_option(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "--prompt", PROMPT, option, value) == 2
    assert f"Invalid value for '{option}'" in re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().err)


@pytest.mark.parametrize("attention", Attention)
def test_attention_is_chosen_by_option(
    attention: Attention,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    implementations = []

    def watched(language_model: LanguageModel, *rest: Any, **options: Any) -> Decoder:
        implementations.append(language_model.model.config._attn_implementation)
        return assembly.assemble(language_model, *rest, **options)

    monkeypatch.setattr(generate_command, "assemble", watched)
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "2", "--attention", attention)
    assert generate(monkeypatch, model_directory, *arguments) == 0
    assert implementations == [attention]
    assert capsys.readouterr().out


def test_help_names_the_commands_and_says_what_each_option_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ours = [each for each in commands().values() if each.package == "decoder"]
    assert {each.name for each in ours} >= {"generate", "chat"}
    for each in ours:
        name, group = each.name, cast(Any, get_command(import_module(each.module).app))
        subcommand = group.get_command(None, name)
        has_all = any(parameter.name == "help_all" for parameter in subcommand.params)
        assert run(monkeypatch, name, "--help-all" if has_all else "--help") == 0
        described = " ".join(capsys.readouterr().out.split())
        for parameter in subcommand.params:
            is_argument = parameter.param_type_name == "argument"
            assert (parameter.metavar if is_argument else parameter.opts[0]) in described
            assert getattr(parameter, "help", None), parameter.opts
        assert ("no effect at temperature 0" in described) == (name in {"generate", "chat"})
        ungrouped = [
            p.name
            for p in subcommand.params
            if not p.rich_help_panel and p.name not in {"help", "help_all"}
        ]
        assert ungrouped == {"trace": ["file"], "estimate": ["log"]}.get(name, [])


def test_listed_phrases_change_no_output(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "20", "--json")
    assert generate(monkeypatch, model_directory, *arguments) == 0
    plain = json.loads(capsys.readouterr().out)["token_ids"]
    listed = tmp_path / "phrases.jsonl"
    listed.write_text(json.dumps({"ids": plain}) + "\n" + json.dumps({"text": "a b c"}))
    assert generate(monkeypatch, model_directory, *arguments, "--phrases", str(listed)) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["token_ids"] == plain
    assert "listed phrases: " in captured.err


def test_sampling_is_repeatable_by_seed(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for seed in ("1", "1", "2"):
        arguments = ("--prompt", PROMPT, "--max-new-tokens", "30", "--temperature", "2")
        generate(monkeypatch, model_directory, *arguments, "--seed", seed, "--json")
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1] != outputs[2]


def test_an_answer_that_ends_at_a_limit_says_so(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def figures(*arguments: str) -> str:
        assert generate(monkeypatch, model_directory, "--max-new-tokens", *arguments) == 0
        return capsys.readouterr().err.splitlines()[-2]  # the last says what drafts were worth

    one = figures("1", "--prompt", PROMPT)
    assert one.startswith("1 token, ")
    assert one.endswith("; ended at the limit of 1 token")
    assert figures("300", "--prompt", PROMPT).endswith(
        "; ended at the model's limit for prompt and output"
    )
    prompts = tmp_path / "prompts"
    prompts.write_text("abc\nabcd\n")
    assert figures("5", "--prompts", str(prompts)).endswith(
        "; 2 of 2 answers ended at the limit of 5 tokens"
    )


def test_a_pattern_that_the_limit_cut_off_is_told(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance", reason="an extra: run pip install '.[grammar]'")
    arguments = ("--prompt", PROMPT, "--regex", "[0-9]{3,}", "--max-new-tokens")
    for limit, is_whole in (("2", False), ("3", True)):
        assert generate(monkeypatch, model_directory, *arguments, limit) == 0
        told = capsys.readouterr().err.splitlines()[-2]
        assert f"; ended at the limit of {limit} tokens" in told
        assert told.endswith("before the pattern was complete") == (not is_whole)
    assert generate(monkeypatch, model_directory, *arguments[:3], "[0-9]{3}") == 0
    assert "limit" not in capsys.readouterr().err.splitlines()[-2]


def test_the_answer_matches_a_regular_expression(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance", reason="an extra: run pip install '.[grammar]'")
    arguments = ("--prompt", PROMPT, "--regex", "(yes|no), [0-9]{3}", "--temperature", "1.5")
    assert generate(monkeypatch, model_directory, *arguments, "--top-k", "20", "--json") == 0
    assert re.fullmatch("(yes|no), [0-9]{3}", json.loads(capsys.readouterr().out)["text"])


def test_the_answer_is_a_call_of_a_tool(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("llguidance", reason="an extra: run pip install '.[grammar]'")
    tools = tmp_path / "tools.json"
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"unit": {"enum": ["a", "b"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tools.write_text(json.dumps([{"name": "get_weather", "parameters": parameters}]))
    arguments = ("--prompt", PROMPT, "--tools", str(tools), "--json", "--max-new-tokens", "200")
    assert generate(monkeypatch, model_directory, *arguments) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    begun = '{"name":"get_weather","arguments":{"unit":"'  # a random model writes much whitespace
    assert begun.startswith("".join(text.split())[: len(begun)])
    assert text.startswith("{")


@pytest.fixture
def index_of_another_tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "other.index"
    build_from_tokens([("document", [1, 2, 3])], path, Vocabulary(300, "ab" * 32))
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", " \n"], "prompt is empty"),
        (["--prompt", PROMPT, "--index", "a", "--server", "b"], "exclude each other"),
        (["--prompt", PROMPT, "--phrases", "a", "--server", "b"], "exclude each other"),
        (
            ["--prompt", PROMPT, "--server", "a", "--server", "b", "--draft-ahead", "4"],
            "leave out --draft-ahead",
        ),
        (["--prompt", PROMPT, "--phrases", "no-such-file"], "no-such-file"),
        (["--prompt", PROMPT, "--index", "no-such-index"], "no-such-index"),
        (["--prompt", PROMPT, "--top-p", "0.9"], "--top-p has no effect at temperature 0"),
        (["--prompt", PROMPT, "--temperature", "1e-9"], "--temperature must be 0 (greedy) or"),
        (["--prompt", PROMPT, "--limit", "2"], "--limit is for a file of prompts"),
        (["--prompt", PROMPT, "--regex", ""], "the pattern is empty"),
        (["--prompt", PROMPT, "--regex", "a", "--choice", "b"], "give one of --regex"),
        (["--prompt", PROMPT, "--json-schema", "no-such-file"], "no-such-file cannot be read"),
        (["--prompt", PROMPT, "--tools", __file__], "is not JSON"),
        pytest.param(
            ["--prompt", PROMPT, "--regex", "(a"],
            "unclosed group",
            marks=pytest.mark.skipif(find_spec("llguidance") is None, reason="an extra: grammar"),
        ),
        (["--prompt", PROMPT, "--device", "nowhere"], "on the device 'nowhere'"),
        (["--prompt", PROMPT, "--device", "meta"], "on the device 'meta'"),
    ],
)
def test_bad_input_is_answered_in_one_line_before_anything_is_loaded(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(models, "load_tokenizer", never)
    assert generate(monkeypatch, model_directory, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_what_the_tokenizer_tells_is_refused_before_the_weights_are_loaded(
    model_directory: Path,
    index_of_another_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(PreparedModel, "load", never)
    too_long = ("--prompt", "x" * 128)
    wrong_index = ("--prompt", PROMPT, "--index", str(index_of_another_tokenizer))
    for arguments, message in ((too_long, "limit is 128"), (wrong_index, "another tokenizer")):
        assert generate(monkeypatch, model_directory, *arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1


def test_loading_is_announced_and_a_failing_drafter_once(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "8", "--server", "127.0.0.1:1")
    assert generate(monkeypatch, model_directory, *arguments) == 0
    loading = [record for record in caplog.messages if record.startswith("loading /")]
    failing = [record for record in caplog.messages if "without drafts" in record]
    assert loading == [f"loading {model_directory}"]
    assert len(failing) == 1
    assert (
        "without drafts from this drafter for now: no draft service answers at 127.0.0.1:1 "
        in failing[0]
    )
    assert failing[0].endswith("is `foredraft serve` running there?")


def test_an_unknown_model_is_answered_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", "./no-such-model", "--prompt", PROMPT)
    assert run(monkeypatch, "generate", *arguments) == 1
    assert "no-such-model" in capsys.readouterr().err


def test_an_unreachable_server_costs_drafts_only(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "8", "--json")
    generate(monkeypatch, model_directory, *arguments)
    plain = json.loads(capsys.readouterr().out)
    generate(monkeypatch, model_directory, *arguments, "--server", "127.0.0.1:1")
    alone = json.loads(capsys.readouterr().out)
    assert alone["token_ids"] == plain["token_ids"]
    assert alone["num_failures"] > 0


def test_unreachable_servers_of_parts_cost_drafts_only(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "8", "--json")
    generate(monkeypatch, model_directory, *arguments)
    plain = json.loads(capsys.readouterr().out)
    servers = ("--server", "127.0.0.1:1", "--server", "127.0.0.1:2")
    assert generate(monkeypatch, model_directory, *arguments, *servers) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == plain["token_ids"]
    lost = [record for record in caplog.messages if "continues without" in record]
    assert sorted(record.split()[3] for record in lost) == ["127.0.0.1:1,", "127.0.0.1:2,"]


def test_an_index_names_the_model_that_it_was_built_for(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_directory, folder)
    path = tmp_path / "texts"
    build_from_texts([("a", PROMPT * 9)], path, str(folder))
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "5", "--json", "--index", str(path))
    assert generate(monkeypatch, model_directory, *arguments) == 0
    expected = json.loads(capsys.readouterr().out)["token_ids"]
    assert run(monkeypatch, "generate", *arguments) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected
    for file in ("config.json", "model.safetensors"):
        (folder / file).unlink()
    assert run(monkeypatch, "generate", *arguments) == 1
    told = f"the index names '{folder}', which is a tokenizer without a model: name the model that"
    assert told in capsys.readouterr().err
    assert generate(monkeypatch, model_directory, *arguments) == 0
    capsys.readouterr()
    shutil.rmtree(folder)
    assert run(monkeypatch, "generate", *arguments) == 1
    said = capsys.readouterr().err
    assert f"was built with the tokenizer '{folder}', which is not available here" in said
    assert said.strip().endswith("with --model")


def test_generate_ends_with_what_drafts_were_worth(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "20")
    assert generate(monkeypatch, model_directory, *arguments) == 0
    plain = capsys.readouterr()
    assert WORTH.match(plain.err.splitlines()[-1])
    assert generate(monkeypatch, model_directory, *arguments, "--compare", "--colour=always") == 0
    compared = capsys.readouterr()
    assert re.sub("\x1b\\[[0-9;]*m", "", compared.out) == plain.out
    assert compared.err.splitlines()[-1].endswith("; the output is identical")
    assert "tokens by colour: " in compared.err
    assert generate(monkeypatch, model_directory, *arguments, "--json", "--colour=always") == 1
    assert "--colour always and --json exclude each other" in capsys.readouterr().err
