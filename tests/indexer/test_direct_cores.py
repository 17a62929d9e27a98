"""Tokenizers that the tokenizers library makes alone: byte by byte what transformers makes."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

from indexer.tokenizer import (
    DEFAULT_MODEL,
    CoreTokenizer,
    encode_chat,
    encode_prompt,
    load_tokenizer,
    locate_model,
    vocabulary_of,
)
from indexer.tokenizer.direct_cores import FREE_TYPES, GGUF_SPLITS, READ_AS_IT_IS, direct_core
from indexer.tokenizer.kept_cores import core_of

WORDS = ["<unk>", "<s>", "</s>", "the", "quick", "dogs", "13", "x"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "the 13 dogs"}]


def direct(name: Path | str) -> CoreTokenizer | None:
    return direct_core(locate_model(str(name)), str(name))


def assert_equal(name: Path | str, full: PreTrainedTokenizerBase | None = None) -> CoreTokenizer:
    """Check that both ways lead to the same, and return what was made directly.

    Args:
        name: of the tokenizer.
        full: what transformers makes of it, where that is known.
    """
    made = direct(name)
    assert made is not None
    full = full or load_tokenizer(str(name))
    core = core_of(full)
    assert core is not None
    assert made.backend_tokenizer.to_str() == core.backend_tokenizer.to_str()
    assert made.all_special_ids == core.all_special_ids
    assert made.special_tokens_map == core.special_tokens_map
    vocabularies = vocabulary_of(made), vocabulary_of(full)
    assert vocabularies[0] == vocabularies[1]
    assert vocabularies[0].name == vocabularies[1].name
    for text in ("the quick <s> 13 dogs\n", "Caf\u00e9 x \U0001f469"):
        assert encode_prompt(made, text) == encode_prompt(full, text)
        assert made.encode(text, add_special_tokens=False) == full.encode(
            text, add_special_tokens=False
        )
    assert made.chat_template == full.chat_template
    if made.chat_template:
        assert encode_chat(made, CHAT) == encode_chat(full, CHAT)
    return made


def saved(core: Tokenizer, folder: Path, **settings: Any) -> Path:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **settings)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
    return folder


def word_level() -> Tokenizer:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return core


def unigram() -> Tokenizer:
    scored = [(word, -float(i)) for i, word in enumerate([*WORDS, *"abcdeghiknoqstu\u2581"])]
    core = Tokenizer(models.Unigram(scored, unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return core


def framed(core: Tokenizer) -> Tokenizer:
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return core


SPECIAL: dict[str, Any] = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def test_the_default_model_needs_no_transformers(
    default_tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert_equal(DEFAULT_MODEL, default_tokenizer)


def test_tokenizers_of_bytes_words_and_pieces(tmp_path: Path, tokenizer_folder: Path) -> None:
    assert_equal(tokenizer_folder)
    assert_equal(saved(word_level(), tmp_path / "words", **SPECIAL))
    assert_equal(saved(unigram(), tmp_path / "pieces", **SPECIAL))
    made = assert_equal(saved(framed(word_level()), tmp_path / "framed", **SPECIAL))
    assert made.encode("the")[0] == 1
    assert 1 not in made.encode("the", add_special_tokens=False)


def test_chat_templates_and_further_special_tokens(tmp_path: Path) -> None:
    made = assert_equal(
        saved(
            word_level(),
            tmp_path / "chat",
            **SPECIAL,
            chat_template=TEMPLATE,
            extra_special_tokens=["<extra>"],
        )
    )
    assert encode_chat(made, CHAT)[0] == 1
    assert len(made.all_special_ids) == 4
    (tmp_path / "chat" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert_equal(tmp_path / "chat")


def test_a_default_model_saved_as_files_is_the_same(
    tmp_path: Path, default_tokenizer: PreTrainedTokenizerBase
) -> None:
    default_tokenizer.save_pretrained(tmp_path)
    made = assert_equal(tmp_path)
    assert vocabulary_of(made) == vocabulary_of(default_tokenizer)


def changed(folder: Path, file: str, **values: object) -> None:
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("tokenizer_config.json", {"bos_token": "<not there>"}),
        ("tokenizer_config.json", {"bos_token": "the"}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<not there>"]}),
        ("tokenizer_config.json", {"image_token": "the"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a.B", None]}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "x"}}}),
        ("tokenizer_config.json", {"chat_template": [{"name": "a", "template": "b"}]}),
        ("config.json", {"model_type": "qwen2"}),
        ("config.json", {"model_type": "mistral"}),
        ("config.json", {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}),
        ("config.json", {}),
        ("added_tokens.json", {"<more>": 8}),
        ("special_tokens_map.json", {"eos_token": "the"}),
        ("tokenizer.json", {"added_tokens": None}),
        ("tokenizer.json", {"post_processor": None}),
    ],
)
def test_what_transformers_may_change_is_left_to_it(
    tmp_path: Path, file: str, values: dict[str, object]
) -> None:
    folder = saved(word_level(), tmp_path, **SPECIAL)
    assert direct(folder) is not None
    changed(folder, file, **values)
    assert direct(folder) is None


def test_damaged_files_are_left_to_transformers(tmp_path: Path) -> None:
    folder = saved(word_level(), tmp_path / "words", **SPECIAL)
    (folder / "tokenizer.json").write_text("{")
    assert direct(folder) is None
    for content in (b"GGUF\x03\0\0\0 and then nothing", b"", b"GGUF" + b"\xff" * 40):
        (tmp_path / "broken.gguf").write_bytes(content)
        assert direct(tmp_path / "broken.gguf") is None


def test_transformers_still_takes_the_class_that_is_named() -> None:
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    for kind in FREE_TYPES:
        assert kind not in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        assert names.get(kind) in {None, *READ_AS_IT_IS}


def write_gguf(
    path: Path, *, pre: str = "smollm", architecture: str = "llama", **stated: object
) -> Path:
    """Write a GGUF file with a byte-level vocabulary, and no tensors."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "th", "the", "<bos>", "<eos>", "<think>", "caf\u00e9 x", "\u20ac"]
    types = [1] * 256 + [1, 1, 3, 3, 4, 4, 3]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    for name, value in stated.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", GGUF_SPLITS)
@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"add_bos_token": False},
        {"add_bos_token": True},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_byte_level_files_of_llamas(tmp_path: Path, pre: str, stated: dict[str, Any]) -> None:
    made = assert_equal(write_gguf(tmp_path / "m.gguf", pre=pre, chat_template=TEMPLATE, **stated))
    assert (made.encode("the")[0] == 258) == stated.get("add_bos_token", False)
    assert (made.encode("the")[-1] == 259) == stated.get("add_eos_token", False)


def test_other_gguf_files_are_left_to_transformers(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf")
    assert direct(plain) is not None
    assert direct(write_gguf(tmp_path / "split.gguf", pre="qwen2")) is None
    assert direct(write_gguf(tmp_path / "kind.gguf", architecture="qwen2")) is None
    assert direct(write_gguf(tmp_path / "word.gguf", pad_token_id=256)) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert direct(plain) is None


def test_added_tokens_with_other_properties_are_left_to_transformers(tmp_path: Path) -> None:
    core = word_level()
    core.add_tokens([AddedToken("quick", normalized=False)])
    folder = saved(core, tmp_path, **SPECIAL)
    stated = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    equal = {str(each.pop("id")): each for each in stated}
    changed(folder, "tokenizer_config.json", added_tokens_decoder=equal)
    assert_equal(folder)
    equal["4"]["lstrip"] = True
    changed(folder, "tokenizer_config.json", added_tokens_decoder=equal)
    assert direct(folder) is None
