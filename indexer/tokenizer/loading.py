"""Loads tokenizers by name, with transformers."""

from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexer.errors import TokenizerError, needing_transformers, reason_of
from indexer.tokenizer.model_files import ModelFiles, locate_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = getLogger(__name__)


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model that `locate_model` can find.

    Raises:
        TokenizerError: there is no such tokenizer, or it cannot be read.
    """
    files = locate_model(name)
    _log.info("loading the tokenizer %s", name)
    options = files.options()
    with needing_transformers(f"the tokenizer {name!r}"):
        from transformers import AutoTokenizer  # noqa: PLC0415  (takes seconds to import)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            files.location, **options
        )
    # Each format's parser raises its own errors.
    except Exception as error:
        raise TokenizerError(
            f"cannot load the tokenizer {name!r}: {_reason(error, files, options)}"
        ) from error
    tokenizer.name_or_path = name  # else the folder, for the default model and GGUF files
    return tokenizer


def _reason(error: Exception, files: ModelFiles, options: Mapping[str, Any]) -> str:
    if options.get("local_files_only"):
        return "there is no such folder, the hub cannot be reached, and its cache lacks the model"
    folder = Path(files.location)
    if folder.is_dir() and not any(folder.glob("*token*")) and files.gguf_file is None:
        return "the folder has none: name one with the model's tokenizer.json, or a .gguf file"
    return reason_of(error)
