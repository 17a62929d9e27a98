"""A head drafts inside `model.generate`, and the output stays the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter
from decoder.drafters.fusion import FusedDrafter
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.errors import ContradictoryOptionsError, HeadFileError
from retriever.follower import DraftLimits
from tests.decoder.decoding import VOCABULARY, plainly, prompt_of, tiny_llama
from tests.decoder.engines.transformers.generating import NEW_TOKENS, generated
from tests.decoder.plugins.speculators.published_heads import official_eagle, official_eagle3


def test_a_head_drafts_in_generate(tmp_path: Path) -> None:
    model, prompt = tiny_llama(), prompt_of(9)
    for number, made in enumerate((official_eagle3(), official_eagle())):
        folder = made.write(tmp_path / str(number))
        drafting = Foredraft(model, NoDrafter(), budget=FixedBudget(64), speculator=str(folder))
        for _ in range(2):
            tokens = generated(model, prompt, custom_generate=drafting)[0].tolist()
            assert tokens[len(prompt) :] == plainly(model, prompt, NEW_TOKENS)
        others = [prompt_of(9, seed=seed) for seed in (1, 2)]
        generate: Any = model.generate
        together = generate(
            torch.tensor(others), max_new_tokens=NEW_TOKENS, custom_generate=drafting
        )
        assert together.tolist() == [
            [*other, *plainly(model, other, NEW_TOKENS)] for other in others
        ]
        assert drafting.statistics.num_drafted > 0
        assert drafting.statistics.num_failures == 0


def test_what_cannot_be_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadFileError, match="no such speculator"):
        Foredraft(tiny_llama(), NoDrafter(), speculator=tmp_path / "nowhere")
    fused = FusedDrafter([NoDrafter()], DraftLimits(VOCABULARY, VOCABULARY))
    folder = official_eagle().write(tmp_path)
    with pytest.raises(ContradictoryOptionsError, match="readers="):
        Foredraft(tiny_llama(), fused, speculator=folder)
