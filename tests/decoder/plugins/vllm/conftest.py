"""What the tests of vLLM share: a tokenizer, and jobs for a real vLLM."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from indexer.tokenizer import load_tokenizer
from tests.decoder.engines.smollm2 import save_smollm2
from tests.decoder.plugins.vllm.vllm_jobs import TEXTS, TOKENS, run
from tests.indexer.engines.corpora import save_byte_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """One token for each byte, and one for the end of a text."""
    folder: Path = tmp_path_factory.mktemp("bytes")
    tokenizer = load_tokenizer(str(save_byte_tokenizer(folder)))
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def job(model: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(str(model))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in TEXTS
    ]
    return {"model": str(model), "prompts": prompts, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def plain(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain"), job)["alone"]
