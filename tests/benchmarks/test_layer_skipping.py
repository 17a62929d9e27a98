"""A model's first layers are a model of their own, without a copy of any weight."""

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.layer_skipping import layer_skipped
from decoder.drafters.model_drafter import DraftingOptions, ModelDrafter
from tests.decoder.decoding import (
    MODELS,
    decoded,
    decoder_with,
    plainly,
    prompt_of,
    tiny_gemma,
    tiny_llama,
)
from tests.decoder.draft_models import FREE


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = model(
            input_ids=torch.tensor([prompt_of(20)]), use_cache=False
        ).logits
    return output


@pytest.mark.parametrize("name", MODELS)
def test_all_layers_are_the_model_itself(name: str) -> None:
    model = MODELS[name]()
    assert torch.equal(logits(layer_skipped(model, 3)), logits(model))


def test_layers_beyond_are_left_out() -> None:
    model = tiny_gemma()
    shorter = layer_skipped(model, 2)
    assert not torch.allclose(logits(shorter), logits(model))
    kept = {id(parameter) for parameter in shorter.parameters()}
    assert kept < {id(parameter) for parameter in model.parameters()}
    dropped = model.base_model.get_submodule("layers.2")
    with torch.inference_mode():
        for parameter in dropped.parameters():
            parameter.zero_()
    assert torch.equal(logits(layer_skipped(model, 2)), logits(shorter))


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="4 layers"):
        layer_skipped(tiny_llama(), 4)


def test_it_drafts_for_the_whole_model() -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    drafter = ModelDrafter(layer_skipped(model, 2), DraftingOptions(costs=FREE))
    assert decoded(decoder_with(model, drafter), prompt, 40) == plainly(model, prompt, 40)
