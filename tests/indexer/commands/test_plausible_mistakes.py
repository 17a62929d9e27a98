"""Mistakes that people make with sources: each message names the cause and the remedy.

Most are made with `build --dry-run`, which reads as `build` does.
"""

import gzip
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indexer.sources.recordings import RecordingTally, read_records
from tests.indexer.conftest import Cli, TextsOf

Content = str | bytes | list[Any] | dict[str, list[Any]]
TEXT = {"text": "a text"}
USER = {"role": "user", "content": "Hello?"}
LATIN = "Grüße aus Köln"


def chat(*turns: dict[str, Any]) -> list[Any]:
    return [{"messages": list(turns)}]


def assistant(content: object, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def write(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        pq.write_table(pa.table(content), path)
    elif isinstance(content, list):
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


# A file, its content, further arguments, the cause and the remedy that the message must name.
RECORDS: list[tuple[str, Content, str, str, str]] = [
    # the wrong key or column
    (
        "a.jsonl",
        [{"id": 1, "body": "x"}],
        "",
        "no text in field 'text'",
        "'id', 'body': name .* --fi",
    ),
    (
        "a.jsonl",
        [TEXT],
        "--field txt",
        "no text in field 'txt'",
        "'text': name the key of the text with --fi",
    ),
    (
        "a.jsonl",
        [{"data": TEXT}],
        "--field data.words",
        "field 'data.words'",
        "keys are 'data': .* --fi",
    ),
    ("a.jsonl", [{"n": 1, "text": 5}], "", "no text in field 'text'", "keys are 'n', 'text'"),
    ("a.jsonl", [{"messages": "a: hi"}], "", "no text in field", "keys are 'messages': .* --field"),
    ("a.jsonl", ["only a text"], "", "no text in field 'text'", "it is not an object with keys"),
    ("a.csv", "id,body\n1,x\n", "", "no column 'text'", "with --field: 'id', 'body'"),
    ("a.tsv", "id\tbody\n1\tx\n", "--field Body", "no column 'Body'", "with --field: 'id', 'body'"),
    ("a.parquet", {"id": [1], "body": ["x"]}, "", "no column 'text'", "--field: 'id', 'body'"),
    ("a.parquet", {"text": [1, 2]}, "", "2 no text in field 'text'", "name another with --field"),
    (
        "a.json",
        '[{"id": 1, "body": "x"}]',
        "",
        "no text in field 'text'",
        "'id', 'body': .* --field",
    ),
    ("a.parquet", {"prompt": ["x"], "other": ["y"]}, "", "no column 'text'", "'prompt', 'other'"),
    # what is no JSON, or not in the form that the name says
    (
        "a.jsonl",
        '{"text": "cut\n{"text": "b"}\n',
        "",
        "1 not JSON",
        "first: .*a.jsonl:1; .* mend or",
    ),
    (
        "a.jsonl",
        "{'text': 'Python'}\n",
        "",
        "1 not JSON",
        "property name enclosed in double quotes",
    ),
    (
        "a.jsonl",
        json.dumps(TEXT, indent=1),
        "",
        "3 not JSON",
        "name the file .json if a line is not",
    ),
    ("a.jsonl", [[TEXT, TEXT]], "", "no text in field 'text'", "it is a list: name the file .json"),
    (
        "a.json",
        '[{"text": "a"}, {"text": "b',
        "",
        "1 not JSON",
        "the rest of the file was not read",
    ),
    ("a.json", '[{"text": "a"} "x": 1}]', "", "1 not JSON", "write one record per line, as .jsonl"),
    ("a.json", '[{"text": "a"}, {\'text\': 1}]', "", "1 not JSON", "Expecting property name"),
    ("a.csv", 'text\n"a\nb\n', "", "1 not CSV", "check its quotes"),
    ("a.csv", 'text,n\n"a "b" c",1\n', "", "1 not CSV", "check its quotes"),
    ("a.parquet", "text\nx\n", "", "damaged Parquet", "copy it again, or give it the suffix of"),
    ("a.jsonl.gz", [TEXT], "", "damaged gzip", "copy it again, or give it the suffix of"),
    (
        "a.jsonl.gz",
        gzip.compress(b'{"text": "a"}\n' * 999)[:-9],
        "",
        "damaged gzip",
        "copy it again",
    ),
    ("a.jsonl.zst", [TEXT], "", "damaged zstd", "copy it again, or give it the suffix of"),
    # logs as they lie around
    (
        "a.jsonl",
        [{"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "x"}}]}],
        "",
        "1 piece of a streamed answer",
        "keep all pieces of an answer in one record",
    ),
    (
        "a.jsonl",
        [{"request": {"messages": [USER]}, "response": 'data: {"choices": [{"del'}],
        "",
        "1 assistant turn",
        "a.jsonl:1#2\n.*\n    written: data: ",
    ),
    ("a.jsonl", [USER, USER], "", "1 no assistant turn", "its roles user"),
    (
        "a.jsonl",
        [{"mapping": {"n": {}}}],
        "",
        "1 empty conversation",
        "it has no turn of a role",
    ),
    ("a.jsonl", [{"messages": None}], "", "1 empty conversation", "its `messages` is null"),
    (
        "a.csv",
        """messages\n"[{'role': 'user', 'content': 'x'}]"\n""",
        "",
        "1 turns that are not JSON",
        "as Python prints it: write it with json.dumps",
    ),
    (
        "a.jsonl",
        '2026-11-22 INFO {"text": "x"}\n',
        "",
        "1 not JSON",
        "there is something before the first {: mend",
    ),
    (
        "a.jsonl",
        '{"text": "a"}{"text": "b"}\n',
        "",
        "1 not JSON",
        "Extra .* the file .json",
    ),
    ("a.jsonl", '{"text": ' + "[" * 9999, "", "1 not JSON", "it is nested too deeply"),
    ("a.json", '[{"text": ' + "[" * 9999, "", "1 not JSON", "it is nested too deeply"),
    (
        "a.jsonl",
        [{"text": float("nan")}],
        "",
        "no text in field 'text'",
        "keys are 'text': that",
    ),
    ("a.jsonl", '{"text": "\\ud800"}\n', "", "1 half of a character", "a.jsonl:1"),
    (
        "a.json",
        "<!DOCTYPE html>\n<html><body>502 Bad Gateway</body></html>",
        "",
        "1 not JSON",
        "it is a page of HTML or XML, as servers send for errors",
    ),
    ("a.jsonl", "<html>\n<body>\n", "", "2 not JSON", "it is a page of HTML or XML"),
    # kinds of files that their names do not say
    (
        "a.jsonl",
        gzip.compress(b'{"text": "a"}\n'),
        "",
        "1 not text but gzip",
        "add .gz to its name",
    ),
    ("a.csv", gzip.compress(b"text\na\n"), "", "not text but gzip", "add .gz to its name"),
    ("d/a.json", b"PK\x03\x04" + bytes(99), "", "not text but a zip archive", "unpack it"),
    ("a.csv", b"PK\x03\x04" + bytes(99), "", "not text but a zip archive", "save .* as CSV"),
    ("a.jsonl", b"PAR1" + bytes(99), "", "1 not text but Parquet", "end its name in .parquet"),
    (
        "a.jsonl",
        '{"text": "a"}\n'.encode("utf-16-le"),
        "",
        "2 not text",
        "holds NUL.* with --encoding",
    ),
    # encodings and sizes
    ("a.jsonl", f'{{"text": "{LATIN}"}}\n'.encode("latin-1"), "", "1 not text", "with --encoding"),
    ("a.csv", f"text\n{LATIN}\n".encode("latin-1"), "", "1 not text", "with --encoding"),
    ("a.txt", LATIN.encode("latin-1"), "", "1 not text", "name the encoding with --encoding"),
    ("a.txt", "plain".encode("utf-16-le"), "", "1 not text", "it holds NUL: name .* --encoding"),
    (
        "a.txt",
        LATIN,
        "--encoding utf8mb4",
        "there is no encoding 'utf8mb4'",
        "such as utf-8 or lat",
    ),
    ("a.txt", "x" * 99, "--max-document-bytes 9", "1 too large", "limit with --max-document-bytes"),
    ("a.jsonl", [{"text": "x" * 99}], "--max-document-bytes 9", "1 too large", "--max-document-b"),
    (
        "a.jsonl",
        chat(assistant("x" * 99)),
        "--max-document-bytes 9",
        "1 too large",
        "--max-document",
    ),
    # conversations without what was to be taken
    ("a.jsonl", chat(USER), "", "no assistant turn", "roles user: choose others with --turns"),
    (
        "a.jsonl",
        chat(assistant("x")),
        "--turns user",
        "no user turn",
        "roles assistant: .* --turns",
    ),
    ("a.jsonl", [{"prompt": "x"}], "", "no assistant turn", "keys are 'prompt'"),
    ("a.jsonl", chat(), "", "1 empty conversation", "no turn of a role system, user, assistant or"),
    (
        "a.jsonl",
        chat({"role": "narrator", "content": "x"}),
        "",
        "unknown role 'narrator'",
        "system, ",
    ),
    ("a.jsonl", chat(assistant([{"type": "image_url"}])), "", "left out: image", "with a text"),
    ("a.jsonl", chat(assistant(None, tool_calls=[{}])), "", "tool call without a name", "a text"),
    ("a.jsonl", chat(assistant(None)), "", "left out: empty turn", "with a text"),
    ("a.jsonl", [{"prompt": [5], "output": [6]}], "", "stored as token ids", "empty conversation"),
    (
        "a.jsonl",
        [{"request": {"prompt": "x"}, "response": {"error": "503"}}],
        "",
        "1 x response without an answer",
        "no assistant turn",
    ),
    # files that are not taken
    ("d/a.dat", "x\0", "", "1 not text by its first bytes", "d/a.dat"),
    (
        "d/a.txt",
        "x",
        "--include *.md",
        "1 not included by a pattern",
        "add a pattern with --include",
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "arguments", "cause", "remedy"),
    RECORDS,
    ids=[f"{number}-{row[0]}" for number, row in enumerate(RECORDS)],
)
def test_what_cannot_be_read_is_said_with_cause_and_remedy(  # noqa: PLR0913, PLR0917
    cli: Cli, tmp_path: Path, name: str, content: Content, arguments: str, cause: str, remedy: str
) -> None:
    write(tmp_path / name, content)
    source = tmp_path / name.partition("/")[0]
    status, out, err = cli("build", source, "--dry-run", *arguments.split())
    said = out + err
    assert cause in said
    assert re.search(remedy, said)
    assert "Traceback" not in said
    assert status == (1 if " 0 documents" in out or not out else 0)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["missing.jsonl", "--dry-run"], 1, "cannot read the source missing.jsonl: No such file"),
        (["a.jsonl"], 2, "give the folder of the index"),
        (["-o", "x"], 2, "name sources, or an index with --from"),
        (["--from", "x.index", "--dry-run"], 2, "--dry-run is for sources: leave out --from"),
        (["a.jsonl", "--dry-run", "--turns", "both"], 2, "'assistant', 'user', 'all'"),
        (
            ["a.jsonl", "--dry-run", "--strict", "5"],
            2,
            "--strict': Input should be less than or equal to 1",
        ),
        (["a.jsonl", "--dry-run", "--strict", "0.3"], 1, "1 of 2 .* more than --strict 0.3 allows"),
        (["a.jsonl", "-o", "x", "--strict", "0"], 1, "not JSON .* mend or remove such lines"),
        (["-", "-", "--dry-run"], 1, "standard input can be read only once: name - once"),
        (["-", "--dry-run"], 1, "not JSON .* say --stdin-format text"),
    ],
)
def test_wrong_arguments_are_refused_with_a_remedy(  # noqa: PLR0913, PLR0917
    cli: Cli,
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"plain words\n")))
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": \n')
    ended, out, err = cli("build", *arguments, "--tokenizer", tokenizer_folder)
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", out + err).split())
    assert ended == status
    assert re.search(said, shown)
    assert not (tmp_path / "x").exists()


def test_strict_tolerates_the_share_that_it_states(
    cli: Cli, tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = tmp_path / "log.jsonl"
    source.write_text('{"text": "x1"}\n' + '{"text": "x"}\n' * 98 + "cut\n")
    arguments = ("build", source, "--tokenizer", tokenizer_folder, "-o", tmp_path / "x")
    assert cli(*arguments, "--strict", "0.009")[0] == 1
    assert not (tmp_path / "x").exists()
    assert cli(*arguments, "--strict", "0.01")[0] == 0
    status, _, err = cli("add", tmp_path / "x", source, "--strict", "0")
    assert (status, "1 of 100 records" in err) == (1, True)


def test_a_dry_run_says_what_would_be_indexed_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "in" / "chat.jsonl", chat(USER, assistant("Good morning.\nWhat now?")))
    write(tmp_path / "in" / "notes.md", "Some notes")
    status, out, err = cli("build", tmp_path / "in", "-o", tmp_path / "x", "--dry-run")
    assert (status, err) == (0, "")
    path = tmp_path / "in"
    assert out.splitlines() == [
        "would index 2 documents, 33 bytes of text, of 2 files; nothing was written",
        f"  {path}/chat.jsonl: JSON lines, 1 document",
        f"  {path}/notes.md: text, 1 document",
        f"{path}/chat.jsonl: OpenAI messages, 1 assistant turn of 1 conversation",
        "skipped: nothing",
        f"  {path}/chat.jsonl:1#2",
        f"    given:   {USER['content']}",
        "    written: Good morning. What now?",
        f"  {path}/notes.md",
        "    text:    Some notes",
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
    report = json.loads(cli("build", tmp_path / "in", "--dry-run", "--json")[1])
    assert report["documents"] == 2
    assert report["conversations"][0]["turns"] == 1


def test_a_dry_run_counts_equal_texts_as_a_build_does(
    cli: Cli, tmp_path: Path, tokenizer_folder: Path
) -> None:
    write(tmp_path / "a.jsonl", [{"text": text} for text in ("one", "two", "one", "one", "")])
    write(tmp_path / "b.jsonl", [{"text": text} for text in ("two", "three")])
    sources, options = (tmp_path / "a.jsonl", tmp_path / "b.jsonl"), ("--json",)
    build = ("build", *sources, "-o", tmp_path / "x", "--tokenizer", tokenizer_folder)
    for more in ((), ("--keep-duplicates",)):
        preview = json.loads(cli(*build, *more, *options, "--dry-run")[1])
        report = json.loads(cli(*build, *more, *options, "--overwrite")[1])
        assert preview["documents"] == report["documents"] == (6 if more else 3)
        assert preview["skipped"] == report["skipped"]
        assert preview["bytes"] == (3 * 4 + 2 * 3 + 2 if more else 3 + 3 + 5)
    assert "would index 3 documents, 11 bytes" in cli(*build, "--dry-run")[1]
    write(tmp_path / "c.jsonl", [{"text": text} for text in ("three", "four", "four")])
    add = ("add", tmp_path / "x", tmp_path / "c.jsonl", *options)
    preview, report = (json.loads(cli(*add, *more)[1]) for more in (("--dry-run",), ()))
    assert preview["documents"] == report["added"] == 1
    assert preview["skipped"] == report["skipped"] == {"exact duplicate": 2}
    status, out, _ = cli(*add, "--dry-run")
    assert (status, json.loads(out)["documents"]) == (1, 0)


@pytest.mark.parametrize(
    ("field", "is_missing"), [("content", True), ("text", False), ("messages", False)]
)
def test_a_field_that_no_conversation_has_is_told(
    cli: Cli, tmp_path: Path, field: str, *, is_missing: bool
) -> None:
    write(tmp_path / "a.jsonl", chat(USER, assistant("x")))
    _, out, _ = cli("build", tmp_path / "a.jsonl", "--field", field, "--dry-run")
    told = "1 assistant turn of 1 conversation; none has the field 'content'\n"
    assert (told in out) == is_missing
    assert ("has the field" in out) == is_missing


def test_build_and_add_say_which_conversations_they_found(
    cli: Cli, tmp_path: Path, tokenizer_folder: Path
) -> None:
    write(tmp_path / "a.jsonl", chat(USER, assistant("x")))
    write(tmp_path / "b.jsonl", chat(USER, assistant("y"), USER, assistant("z")))
    index = tmp_path / "x"
    _, out, _ = cli("build", tmp_path / "a.jsonl", "-o", index, "--tokenizer", tokenizer_folder)
    assert out.startswith(
        f"{tmp_path}/a.jsonl: OpenAI messages, 1 assistant turn of 1 conversation\n{index}: 1 doc"
    )
    assert "would index 2 documents" in cli("add", index, tmp_path / "b.jsonl", "--dry-run")[1]
    _, out, _ = cli("add", index, tmp_path / "b.jsonl")
    assert out.startswith(
        f"{tmp_path}/b.jsonl: OpenAI messages, 2 assistant turns of 1 conversation\n{index}: added"
    )


def test_all_turns_are_written_by_the_chat_template_where_there_is_one(
    cli: Cli, tmp_path: Path, tokenizer_folder: Path, texts_of: TextsOf
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    tool = {"role": "tool", "content": "x"}
    write(tmp_path / "a.jsonl", [*chat(USER, assistant("Yes.")), *chat(USER, tool)])
    arguments = ("build", tmp_path / "a.jsonl", "--turns", "all", "--dry-run", "--tokenizer")
    _, out, _ = cli(*arguments, folder)
    assert "    text:    <user>Hello?<eos><assistant>Yes.<eos>\n" in out
    assert "1 refused by the chat template" in out
    assert "it says: no tools; take single turns with --turns assistant" in out
    assert "    text:    Hello? Yes.\n" in cli(*arguments, tokenizer_folder)[1]

    index = tmp_path / "x"
    build = ("build", tmp_path / "a.jsonl", "--turns", "all", "-o", index)
    assert cli(*build, "--tokenizer", folder)[0] == 0
    write(tmp_path / "b.jsonl", chat(USER, assistant("No.")))
    assert cli("add", index, tmp_path / "b.jsonl", "--turns", "all")[0] == 0
    assert list(texts_of(index).values()) == [
        "<user>Hello?<eos><assistant>Yes.<eos>",
        "<user>Hello?<eos><assistant>No.<eos>",
    ]


def test_a_long_array_of_records_is_streamed(tmp_path: Path) -> None:
    """Of a file of many records no more than a few are held."""
    path = tmp_path / "log.json"
    row = json.dumps({"messages": [USER, assistant("x" * 2000)]})
    with path.open("w") as file:
        file.write("[" + ",\n".join([row] * 5000) + "]")
    tally = RecordingTally()
    held = 0
    import tracemalloc  # noqa: PLC0415  (slows what follows down)

    tracemalloc.start()
    try:
        for number, _ in enumerate(read_records(path, tally), 1):
            held = number
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held == 5000
    assert peak < path.stat().st_size / 5
