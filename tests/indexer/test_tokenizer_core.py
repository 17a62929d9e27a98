"""A tokenizer without transformers: kept once, equal, made again when its files change."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from indexer.build import build_from_texts
from indexer.commands.summary import summarise
from indexer.errors import TokenizerError, TokenizerMismatchError
from indexer.format.records import Contents
from indexer.reader import Index, Vocabulary
from indexer.tokenizer import (
    CACHE_VARIABLE,
    DEFAULT_MODEL,
    CoreTokenizer,
    encode_chat,
    load_core,
    load_tokenizer,
    vocabulary_of,
)
from indexer.tokenizer.kept_cores import core_file
from indexer.tokenizer.model_files import ModelFiles

TEXT = "Caf\u00e9 <eos> x = 1\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def left_to_transformers(folder: Path) -> Path:
    """State a setting that the tokenizers library cannot follow by itself."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["add_bos_token"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def folder(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    tokenizer.save_pretrained(tmp_path / "model")
    return left_to_transformers(tmp_path / "model")


def test_what_transformers_made_is_kept_and_does_the_same(cache: Path, folder: Path) -> None:
    name = str(folder)
    first, again = load_core(name), load_core(name)
    assert not isinstance(first, CoreTokenizer)
    assert isinstance(again, CoreTokenizer)
    assert vocabulary_of(again) == vocabulary_of(first)
    assert vocabulary_of(again).name == vocabulary_of(first).name == name
    assert again.encode(TEXT) == first.encode(TEXT)
    assert not again.chat_template
    assert again.decode(again.encode(TEXT)) == first.decode(first.encode(TEXT))
    assert len(list(cache.iterdir())) == 1


def test_nothing_of_transformers_is_imported_once_a_core_is_kept(
    cache: Path, folder: Path, tokenizer_folder: Path
) -> None:
    load_core(str(folder))
    names = [str(folder), str(tokenizer_folder), DEFAULT_MODEL]
    script = (
        "import sys\nfrom indexer.tokenizer import load_core, vocabulary_of\n"
        f"for name in {names!r}: vocabulary_of(load_core(name))\n"
        "print(*sorted({'transformers', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, CACHE_VARIABLE: str(cache)},
    )
    assert done.stdout.strip() == ""


def test_a_changed_file_or_a_damaged_cache_is_noticed(
    cache: Path, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    load_core(str(folder))
    (kept,) = cache.iterdir()
    for damage in (
        b"",
        b"{}",
        kept.read_bytes().replace(b'"special_ids": [256]', b'"special_ids": []'),
    ):
        kept.write_bytes(damage)
        assert not isinstance(load_core(str(folder)), CoreTokenizer)
        assert isinstance(load_core(str(folder)), CoreTokenizer)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    changed = load_core(str(folder))
    assert not isinstance(changed, CoreTokenizer)
    assert vocabulary_of(changed) != vocabulary_of(tokenizer)


def test_what_lies_beside_a_gguf_file_and_is_not_read_changes_nothing(
    cache: Path, tmp_path: Path
) -> None:
    """In a folder of downloads the tokenizer was prepared again at every start."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    files = ModelFiles(str(tmp_path), "m.gguf")
    before = core_file(files)
    assert before is not None
    assert before.parent == cache
    (tmp_path / "notes.txt").write_text("of another download")
    assert core_file(files) == before
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert core_file(files) != before


def test_nothing_is_kept_where_that_is_not_wanted_or_not_possible(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    for value in ("none", str(blocked / "below")):
        monkeypatch.setenv(CACHE_VARIABLE, value)
        for _ in range(2):
            assert not isinstance(load_core(str(folder)), CoreTokenizer)


def test_an_index_knows_its_tokenizer_by_name(
    tokenizer: PreTrainedTokenizerBase, tokenizer_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "named.index"
    build_from_texts([("a", TEXT)], path, load_tokenizer(str(tokenizer_folder)))
    assert f"tokenizer    {tokenizer_folder}" in summarise(path).describe()
    assert summarise(path).to_json()["tokenizer"] == str(tokenizer_folder)
    other = Vocabulary(9, "ab" * 32, "other/model")
    with pytest.raises(TokenizerMismatchError) as raised:
        Index.open(path, vocabulary=other)
    assert f"({tokenizer_folder}, vocabulary 257, fingerprint " in str(raised.value)
    assert "(other/model, vocabulary 9, fingerprint abababababab\u2026)" in str(raised.value)
    # The name is for people: with equal fingerprints any name will do.
    Index.open(path, vocabulary=vocabulary_of(tokenizer)).close()


def test_a_snapshot_without_a_name_is_read_and_written_as_before(tiny_index: Path) -> None:
    with Index.open(tiny_index) as index:
        assert index.vocabulary.name == ""
    newest = max((tiny_index / "catalog").iterdir())
    content = json.loads(newest.read_bytes().partition(b"\n")[2])
    assert set(content["vocabulary"]) == {"fingerprint", "size"}
    contents = Contents.decode(content)
    assert contents.encode()["vocabulary"] == content["vocabulary"]
    content["vocabulary"]["name"] = "a/model"
    assert Contents.decode(content).vocabulary.name == "a/model"
    assert Contents.decode(content).encode()["vocabulary"] == content["vocabulary"]


def test_a_kept_core_writes_conversations_as_transformers_does(cache: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    first, again = load_core(str(folder)), load_core(str(folder))
    assert isinstance(again, CoreTokenizer)
    assert len(list(cache.iterdir())) == 1
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert encode_chat(again, messages) == encode_chat(first, messages)
    assert again.decode(encode_chat(again, messages)) == "user:x<eos>assistant:y<eos>"
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    load_core(str(folder))
    refusing = load_core(str(folder))
    with pytest.raises(TokenizerError, match="does not take a robot message: no"):
        encode_chat(refusing, [{"role": "robot", "content": "x"}])
