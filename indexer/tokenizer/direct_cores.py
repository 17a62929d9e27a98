"""Makes tokenizers from a model's files with only the tokenizers library.

This is done only if transformers is known to give the same result. transformers uses some files
unchanged, and rebuilds other tokenizers from their vocabularies by its own rules. The tests compare
both results byte by byte.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from indexer.tokenizer.core_tokenizer import CoreTokenizer
from indexer.tokenizer.gguf_metadata import read_metadata
from indexer.tokenizer.model_files import ModelFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Names of special tokens in transformers. A template may use them, and they count as special."""

READ_AS_IT_IS: Final = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
"""Classes of transformers that use a `tokenizer.json` unchanged."""

FREE_TYPES: Final = frozenset({"llama", "smollm3", "olmo2", "granite", "gpt_oss", "deepseek_v3"})
"""Model types for which transformers uses the class that the tokenizer's settings name."""

_PLAIN_SETTINGS: Final = frozenset(
    {
        *NAMED_TOKENS,
        "added_tokens_decoder",
        "additional_special_tokens",
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "extra_special_tokens",
        "is_local",
        "local_files_only",
        "model_input_names",
        "model_max_length",
        "padding_side",
        "tokenizer_class",
        "truncation_side",
    }
)
"""Settings of a tokenizer that do not change ids. Settings such as `add_bos_token` do."""

_LLAMA_3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GGUF_SPLITS: Final = {"smollm": None, "gpt-2": None, "llama-bpe": _LLAMA_3_SPLIT}
"""Patterns that split texts before merges, by name in GGUF files; `None` means GPT-2's pattern."""

_GGUF_NAMES: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens in GGUF files."""
_UNTOLD: Final = "<|endoftext|>"
"""Token that transformers adds to the byte-level vocabulary of a GGUF file without it."""


def direct_core(files: ModelFiles, name: str) -> CoreTokenizer | None:
    """Return a tokenizer from local files, or `None` if transformers might load a different one.

    Args:
        files: files of the model.
        name: name that the tokenizer is loaded by.
    """
    folder = Path(files.location)
    # Anything unexpected, even invalid JSON, is left to transformers to read or reject.
    with suppress(Exception):
        if files.gguf_file is None:
            return _of_folder(folder, name)
        return _of_gguf(folder, files.gguf_file, name)
    return None


def _of_folder(folder: Path, name: str) -> CoreTokenizer | None:
    """Return the tokenizer of a `tokenizer.json` that transformers uses unchanged."""
    from tokenizers import Tokenizer  # noqa: PLC0415  (readers of an index do not need it)

    settings = _json_of(folder / "tokenizer_config.json")
    if not _is_plain(folder, settings):
        return None
    content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    added = {each["content"]: each for each in json.loads(content)["added_tokens"]}
    named = {key: _text_of(settings[key]) for key in NAMED_TOKENS if settings.get(key)}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    special = [*named.values(), *map(_text_of, extra)]
    core = Tokenizer.from_str(content)
    stated = settings.get("added_tokens_decoder", {})
    if core.post_processor is None or core.encode_special_tokens:
        return None
    if not all(text in added and added[text]["special"] for text in special):
        return None  # transformers would add these tokens
    if any(added.get(each["content"]) != {"id": int(id_), **each} for id_, each in stated.items()):
        return None
    core.no_padding()
    core.no_truncation()
    ids = tuple(sorted({added[text]["id"] for text in special}))
    return CoreTokenizer(core, ids, name, _template_of(folder, settings), named)


def _is_plain(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether transformers uses a folder's `tokenizer.json` unchanged, given its class."""
    others = ("tekken.json", "added_tokens.json", "additional_chat_templates")
    if any((folder / each).exists() for each in others):
        return False
    if (folder / "special_tokens_map.json").exists() and "added_tokens_decoder" not in settings:
        return False
    kind = None
    if (folder / "config.json").exists():
        config = _json_of(folder / "config.json")
        kind = config.get("model_type")
        if config.get("tokenizer_class") or kind not in FREE_TYPES:
            return False
    return settings.get("tokenizer_class") in READ_AS_IT_IS and settings.keys() <= _PLAIN_SETTINGS


def _template_of(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template.

    Raises:
        TypeError: there are several templates.
    """
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
    if not isinstance(template, str | None):
        raise TypeError("several templates")
    return template


def _text_of(token: Any) -> str:
    """Return the text of a token, which is given as text or as an object."""
    return str(token if isinstance(token, str) else token["content"])


def _json_of(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError(f"{path} is not an object")
    return content


def _of_gguf(folder: Path, file: str, name: str) -> CoreTokenizer | None:
    """Return the byte-level tokenizer of a Llama's GGUF file."""
    if any(path.suffix in {".json", ".jinja", ".model"} for path in folder.iterdir()):
        return None  # transformers would read these files as well
    metadata = read_metadata(folder / file)
    prefix = "tokenizer.ggml."
    stated = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    is_llama = metadata["general.architecture"] == "llama" and stated["model"] == "gpt2"
    if not is_llama or stated.get("pre") not in GGUF_SPLITS or "merges" not in stated:
        return None
    ids = {key: stated.get(f"{long}_token_id") for key, long in _GGUF_NAMES.items()}
    named = {key: stated["tokens"][id_] for key, id_ in ids.items() if id_ is not None}
    core = _byte_level(stated)
    known = {token.content: id_ for id_, token in core.get_added_tokens_decoder().items()}
    if not all(text in known for text in named.values()):
        return None  # transformers would add these tokens
    _add_frame(core, stated, {key: (text, known[text]) for key, text in named.items()})
    special = tuple(sorted({known[text] for text in named.values()}))
    return CoreTokenizer(core, special, name, metadata.get("tokenizer.chat_template"), named)


def _byte_level(stated: Mapping[str, Any]) -> "Tokenizer":
    """Return a byte-level tokenizer with the vocabulary of a GGUF file."""
    from tokenizers import (  # noqa: PLC0415  (readers of an index do not need it)
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    tokens: Sequence[str] = stated["tokens"]
    spelling = _spelling()
    alphabet = set(spelling)
    vocabulary = {_spelt(token, alphabet, spelling): id_ for id_, token in enumerate(tokens)}
    merges = [(first, second) for first, second in map(str.split, stated["merges"])]
    core = Tokenizer(
        models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    core.decoder = decoders.ByteLevel()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = GGUF_SPLITS[stated["pre"]]
    if split is not None:
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    core.add_tokens([AddedToken(_UNTOLD, special=True)])
    typed = list(zip(tokens, stated.get("token_type") or (), strict=False))
    control = [text for text, kind in typed if kind == _CONTROL and set(text) <= alphabet]
    core.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    whole = [text for text, kind in typed if kind == _USER_DEFINED]
    present = core.get_vocab(with_added_tokens=True)
    core.add_tokens([AddedToken(text, normalized=False) for text in whole if text in present])
    return core


def _add_frame(
    core: "Tokenizer", stated: Mapping[str, Any], named: Mapping[str, tuple[str, int]]
) -> None:
    """Make the tokenizer add special tokens around a text, if the GGUF file says so."""
    from tokenizers import processors  # noqa: PLC0415  (as above)

    begins = stated.get("add_bos_token", False) and "bos_token" in named
    ends = stated.get("add_eos_token", False) and "eos_token" in named
    first = f"{named['bos_token'][0]}:{{0}} " if begins else ""
    last = f" {named['eos_token'][0]}:0" if ends else ""
    single = f"{first.format(0)}$A:0{last}"
    second = f" {first.format(1).strip()}" if begins else ""
    used = [named[key] for key, is_used in (("bos_token", begins), ("eos_token", ends)) if is_used]
    core.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single}{second} $B:1{last.replace(':0', ':1')}",
        special_tokens=used,
    )


def _spelling() -> str:
    """Return the characters with which byte-level vocabularies write the 256 bytes, in order."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte) if byte in shown else chr(next(others)) for byte in range(256))


def _spelt(token: str, alphabet: set[str], spelling: str) -> str:
    """Return a token written in the characters of byte-level vocabularies."""
    if set(token) <= alphabet:
        return token
    return "".join(spelling[byte] for byte in token.encode())
