"""Finds source files, cuts them into blocks for parallel work, and reads their documents.

`plan` lists files and cuts them into blocks. `read` yields the documents of one block, in any
process. Concatenated in block order, the documents come in the order of the sources.
"""

from indexer.sources.blocks import (
    HALF_CHARACTER,
    SourceBlock,
    SourceDocument,
    whole_characters,
)
from indexer.sources.chats.conversations import Turns
from indexer.sources.planning import plan, read
from indexer.sources.source_options import (
    DEFAULT_BLOCK_BYTES,
    DEFAULT_FIELD,
    DEFAULT_MAX_DOCUMENT_BYTES,
    NAME_ENCODING,
    NOT_TEXT,
    RAISE_LIMIT,
    STANDARD_INPUT,
    TOO_LARGE,
    ChatTemplate,
    Git,
    Markup,
    SourceOptions,
    StdinFormat,
)

__all__ = [
    "DEFAULT_BLOCK_BYTES",
    "DEFAULT_FIELD",
    "DEFAULT_MAX_DOCUMENT_BYTES",
    "HALF_CHARACTER",
    "NAME_ENCODING",
    "NOT_TEXT",
    "RAISE_LIMIT",
    "STANDARD_INPUT",
    "TOO_LARGE",
    "ChatTemplate",
    "Git",
    "Markup",
    "SourceBlock",
    "SourceDocument",
    "SourceOptions",
    "StdinFormat",
    "Turns",
    "plan",
    "read",
    "whole_characters",
]
