"""Small indexes and models, made on the spot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.benchmarks.drafting import IndexMaker, index_maker

END = "<end>"


@pytest.fixture
def make_index(tmp_path: Path) -> IndexMaker:
    return index_maker(tmp_path / "index")


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A model and a tokenizer of eight words on disk."""
    words = {word: number for number, word in enumerate([END, *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        initializer_range=0.4,
        vocab_size=len(words),
        max_position_embeddings=128,
        eos_token_id=0,
    )
    directory = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(directory)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(directory)
    return directory
