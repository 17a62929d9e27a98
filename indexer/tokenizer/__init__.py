"""Finds and loads models' tokenizers, and computes the properties that an index depends on.

transformers takes seconds to import, so it is imported only where it is used. An index can be
opened and searched without it. An index can also be built without it, if the tokenizers library
alone gives the same result.
"""

from indexer.tokenizer.chats import encode_chat, encode_prompt
from indexer.tokenizer.core_tokenizer import CoreTokenizer
from indexer.tokenizer.kept_cores import (
    CACHE_VARIABLE,
    NOWHERE,
    load_core,
    load_indexed,
    loaded_tokenizer,
    not_here,
)
from indexer.tokenizer.loading import load_tokenizer
from indexer.tokenizer.model_files import DEFAULT_MODEL, ModelFiles, locate_model
from indexer.tokenizer.vocabulary import (
    MAX_VOCABULARY,
    TextTokenizer,
    Vocabulary,
    recorded_name,
    vocabulary_of,
)

__all__ = [
    "CACHE_VARIABLE",
    "DEFAULT_MODEL",
    "MAX_VOCABULARY",
    "NOWHERE",
    "CoreTokenizer",
    "ModelFiles",
    "TextTokenizer",
    "Vocabulary",
    "encode_chat",
    "encode_prompt",
    "load_core",
    "load_indexed",
    "load_tokenizer",
    "loaded_tokenizer",
    "locate_model",
    "not_here",
    "recorded_name",
    "vocabulary_of",
]
