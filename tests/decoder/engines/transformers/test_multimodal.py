"""Models that also take images and sounds write the same text to a prompt of text."""

from typing import Any, Final

import pytest
import torch

from tests.decoder.decoding import ScriptedDrafter, oracle
from tests.decoder.engines.transformers.batched import foredraft
from tests.oracles.exactness.tiny_models import FIRST_FREE, VOCABULARY, tiny_multimodal

FAMILIES: Final = (
    *("gemma3", "gemma4", "got_ocr2", "idefics3", "internvl", "llava"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
)
"""The last states a window that its prompts are read without."""


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_drafted_for(family: str) -> None:
    model: Any = tiny_multimodal(family)
    tokens = torch.randint(
        FIRST_FREE, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(4)
    )
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for prompt in (tokens[:1], tokens):
        plain = model.generate(input_ids=prompt, **options)
        drafting = foredraft(model, ScriptedDrafter(oracle(plain[0].tolist())))
        drafted = model.generate(input_ids=prompt, custom_generate=drafting, **options)
        assert drafted.tolist() == plain.tolist()
        assert 0 < drafting.statistics.num_passes < drafting.statistics.num_tokens
