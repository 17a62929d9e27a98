"""A tokenizer for the tests of vLLM, which need nothing of the decoder but its engines."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from indexer.tokenizer import load_tokenizer
from tests.indexer.engines.corpora import save_byte_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """One token for each byte, and one for the end of a text."""
    folder: Path = tmp_path_factory.mktemp("bytes")
    tokenizer = load_tokenizer(str(save_byte_tokenizer(folder)))
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    return tokenizer
