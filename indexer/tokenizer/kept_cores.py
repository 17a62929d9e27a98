"""Tokenizers without transformers: made from files, or kept from when transformers read them."""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from indexer.errors import TokenizerError, reason_of
from indexer.tokenizer.core_tokenizer import CoreTokenizer
from indexer.tokenizer.direct_cores import direct_core
from indexer.tokenizer.loading import load_tokenizer
from indexer.tokenizer.model_files import ModelFiles, locate_model
from indexer.tokenizer.vocabulary import PROBE, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_VARIABLE: Final = "FOREDRAFT_CACHE"
NOWHERE: Final = "none"
"""As the name of a directory for caches: keep nothing."""

_CORE_FORMAT: Final = 2
_log = getLogger(__name__)


def load_core(name: str) -> "CoreTokenizer | PreTrainedTokenizerBase":
    """Load the tokenizer of a model that `locate_model` can find, without transformers if possible.

    That is so for local files of which it is known what transformers makes of them, and for those
    that it has read once on this machine: what it made of them is kept in the user's directory for
    caches, until a file or a version changes.

    Raises:
        TokenizerError: there is no such tokenizer, or it cannot be read.
    """
    files = locate_model(name)
    if files.is_on_hub:
        return load_tokenizer(name)
    core = direct_core(files, name)
    if core is not None:
        return core
    kept = core_file(files)
    core = None if kept is None else _read_core(kept, name)
    if core is not None:
        return core
    if kept is not None:
        _log.info("preparing the tokenizer %s, once on this machine: some seconds", name)
    tokenizer = load_tokenizer(name)
    if kept is not None:
        _keep_core(kept, tokenizer)
    return tokenizer


def load_indexed(name: str) -> "CoreTokenizer | PreTrainedTokenizerBase":
    """Load the tokenizer that an index names, as `load_core` does.

    Raises:
        TokenizerError: it is not here; the message says what to do.
    """
    try:
        return load_core(name)
    except TokenizerError as error:
        raise TokenizerError(not_here(name, error)) from error


def not_here(name: str, error: Exception) -> str:
    """Return what to say where the tokenizer, or the model, that an index names is not here."""
    return (
        f"the index was built with the tokenizer {name!r}, which is not to be had here "
        f"({reason_of(error)}): name the same one by --tokenizer, or a model that has it by --model"
    )


def core_of(tokenizer: "PreTrainedTokenizerBase") -> CoreTokenizer | None:
    """Return what does the same as a tokenizer of transformers, as far as that can be told."""
    from tokenizers import Tokenizer  # noqa: PLC0415  (a reader of an index needs none)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer) or backend.encode_special_tokens:
        return None
    core = CoreTokenizer(
        Tokenizer.from_str(backend.to_str()),
        tuple(sorted({int(token_id) for token_id in tokenizer.all_special_ids})),
        str(tokenizer.name_or_path),
        *_template_of(tokenizer),
    )
    core.backend_tokenizer.no_padding()
    core.backend_tokenizer.no_truncation()
    is_equal = vocabulary_of(core).fingerprint == vocabulary_of(tokenizer).fingerprint
    return core if is_equal and core.encode(PROBE) == list(tokenizer.encode(PROBE)) else None


def _template_of(tokenizer: "PreTrainedTokenizerBase") -> tuple[str | None, dict[str, str]]:
    """Return a tokenizer's chat template, and the tokens that it may use."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    special = tokenizer.special_tokens_map.items()
    return template, {name: text for name, text in special if isinstance(text, str)}


def core_file(files: ModelFiles) -> Path | None:
    """Return where the core of a model's tokenizer is kept; `None` where nothing is.

    The name changes with the files that transformers reads, and with its version.
    """
    import platformdirs  # noqa: PLC0415  (a reader of an index needs none)

    stated = os.environ.get(CACHE_VARIABLE)
    if stated == NOWHERE or find_spec("transformers") is None:
        return None
    folder = Path(files.location)
    paths = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if files.gguf_file is not None:  # beside it may lie anything
        paths = [each for each in paths if each.name == files.gguf_file or _is_read(each)]
    states = ((path.name, path.stat()) for path in paths)
    content = [
        _CORE_FORMAT,
        str(folder.resolve()),
        files.gguf_file,
        [version("transformers"), version("tokenizers")],
        [(each, state.st_size, state.st_mtime_ns) for each, state in states],
    ]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    cache = Path(stated or platformdirs.user_cache_dir("foredraft", appauthor=False))
    return cache / f"tokenizer-{digest[:24]}.json"


def _is_read(path: Path) -> bool:
    """Return whether transformers reads a file that lies beside a GGUF file."""
    return path.suffix in {".json", ".jinja", ".model"}


def _read_core(path: Path, name: str) -> CoreTokenizer | None:
    """Read a core that is kept; what cannot be read counts as not kept."""
    from tokenizers import Tokenizer  # noqa: PLC0415  (a reader of an index needs none)

    # The library raises plain exceptions for what it cannot read.
    with suppress(Exception):
        content = json.loads(path.read_bytes())
        core = CoreTokenizer(
            Tokenizer.from_str(content["core"]),
            tuple(map(int, content["special_ids"])),
            name,
            content["chat_template"],
            content["special_tokens"],
        )
        if vocabulary_of(core).fingerprint == content["fingerprint"]:
            return core
    return None


def _keep_core(path: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Keep a tokenizer's core, if it has one that does the same; the file appears whole."""
    core = None
    with suppress(ValueError):  # several chat templates, and none by default
        core = core_of(tokenizer)
    if core is None:
        return
    content: dict[str, Any] = {
        "core": core.backend_tokenizer.to_str(),
        "special_ids": core.all_special_ids,
        "chat_template": core.chat_template,
        "special_tokens": core.special_tokens_map,
        "fingerprint": vocabulary_of(core).fingerprint,
    }
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".tokenizer-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
            Path(partial).replace(path)
        except OSError:
            Path(partial).unlink(missing_ok=True)
            raise


def loaded_tokenizer(
    tokenizer: "str | CoreTokenizer | PreTrainedTokenizerBase",
) -> "CoreTokenizer | PreTrainedTokenizerBase":
    """Return a tokenizer that is named, as `load_core` does, or one that is loaded already."""
    return load_core(tokenizer) if isinstance(tokenizer, str) else tokenizer
