"""Loads tokenizers without transformers: from model files, or from a cache."""

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
"""Name of the cache directory that disables caching."""

_CORE_FORMAT: Final = 2
_log = getLogger(__name__)


def load_core(name: str) -> "CoreTokenizer | PreTrainedTokenizerBase":
    """Load the tokenizer of a model that `locate_model` can find, without transformers if possible.

    Some local files need no transformers, because its result for them is known. For other files,
    transformers is needed once per machine. The result is cached in the user's cache directory
    until a file or a version changes.

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
        _log.info("preparing the tokenizer %s, once on this machine: a few seconds", name)
    tokenizer = load_tokenizer(name)
    if kept is not None:
        _keep_core(kept, tokenizer)
    return tokenizer


def load_indexed(name: str) -> "CoreTokenizer | PreTrainedTokenizerBase":
    """Load the tokenizer that an index names, as `load_core` does.

    Raises:
        TokenizerError: the tokenizer is not available; the message says what to do.
    """
    try:
        return load_core(name)
    except TokenizerError as error:
        raise TokenizerError(not_here(name, error)) from error


def not_here(name: str, error: Exception) -> str:
    """Return the message for an index whose tokenizer or model is not available."""
    return (
        f"the index was built with the tokenizer {name!r}, which is not available here "
        f"({reason_of(error)}): name the same tokenizer with --tokenizer, or its model with --model"
    )


def core_of(tokenizer: "PreTrainedTokenizerBase") -> CoreTokenizer | None:
    """Return a tokenizer equivalent to one from transformers; None if equivalence is uncertain."""
    from tokenizers import Tokenizer  # noqa: PLC0415  (readers of an index do not need it)

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
    """Return a tokenizer's chat template, and the special tokens that it may use."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    special = tokenizer.special_tokens_map.items()
    return template, {name: text for name, text in special if isinstance(text, str)}


def core_file(files: ModelFiles) -> Path | None:
    """Return the cache path of a model's tokenizer core, or `None` if it is not cached.

    The name depends on the files that transformers reads, and on the version of transformers.
    """
    import platformdirs  # noqa: PLC0415  (readers of an index do not need it)

    stated = os.environ.get(CACHE_VARIABLE)
    if stated == NOWHERE or find_spec("transformers") is None:
        return None
    folder = Path(files.location)
    paths = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if files.gguf_file is not None:  # other files may be next to it
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
    """Return whether transformers reads a file that is next to a GGUF file."""
    return path.suffix in {".json", ".jinja", ".model"}


def _read_core(path: Path, name: str) -> CoreTokenizer | None:
    """Read a cached core. An unreadable core counts as not cached."""
    from tokenizers import Tokenizer  # noqa: PLC0415  (readers of an index do not need it)

    # For unreadable files, the library raises errors without a type of its own.
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
    """Cache the core of a tokenizer, if it has an equivalent core. The file appears atomically."""
    core = None
    with suppress(ValueError):  # the tokenizer has several chat templates and no default
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
    """Return a tokenizer by name, as `load_core` does, or one that is already loaded."""
    return load_core(tokenizer) if isinstance(tokenizer, str) else tokenizer
