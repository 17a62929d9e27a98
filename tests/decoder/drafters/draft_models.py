"""Tiny draft models, and the slow, obvious twins of what they draft."""

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoder.drafters.asking import StepCosts
from decoder.drafters.draft_model import DraftModel, ModelReader
from decoder.drafters.drawing import DrawnFusion, Draws
from decoder.drafters.fusion import FusedDrafter
from retriever.drafter import TokenIds
from retriever.follower import DraftLimits
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree
from tests.decoder.decoding import SIZES, VOCABULARY, evaluated

FREE = StepCosts(target_s=1.0, pass_s=0.0)
"""Passes that cost nothing: drafts grow as far as their bounds."""


def llama(
    seed: int = 1, vocabulary: int = VOCABULARY, layers: int = 3, *, tied: bool = False
) -> PreTrainedModel:
    """Return a tiny model in float64."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SIZES,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        max_position_embeddings=256,
        eos_token_id=None,
        tie_word_embeddings=tied,
    )
    return evaluated(LlamaForCausalLM(config), torch.float64)


def alone(
    model: PreTrainedModel,
    *,
    draws: Draws | None = None,
    kept: TokenIds | None = None,
    vocabulary: int = VOCABULARY,
) -> FusedDrafter:
    """Return a drafter that asks a draft model and nothing else, however long it takes.

    Args:
        model: the draft model.
        draws: how drafts are drawn; the most probable ones if not given.
        kept: the only tokens to draft; all if not given.
        vocabulary: tokens that target and draft model know.
    """
    reader = ModelReader(DraftModel(model, vocabulary_size=min(vocabulary, VOCABULARY), kept=kept))
    limits = DraftLimits(vocabulary, vocabulary)
    if draws is None:
        return FusedDrafter([], limits, readers=[reader], costs=FREE)
    return DrawnFusion([], limits, readers=[reader], draws=draws, costs=FREE)


def drafted(drafter: FusedDrafter, tokens: Sequence[int], budget: int) -> DraftTree:
    """Draft once behind a sequence."""
    sequence = drafter.follow(TokenSequence(np.array(tokens, np.int32)))
    try:
        return sequence.draft(budget)
    finally:
        sequence.close()


@torch.inference_mode()
def distribution(model: PreTrainedModel, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return what a model expects behind tokens, without any cache."""
    logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    probabilities: NDArray[np.float64] = torch.softmax(logits.double(), -1).numpy()
    return probabilities


def most_probable_prefixes(
    model: PreTrainedModel, tokens: list[int], count: int
) -> dict[tuple[int, ...], float]:
    """Return the most probable continuations: the best of all known ones, again and again."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    found: dict[tuple[int, ...], float] = {}
    while len(found) < count + 1:
        probability, path = heapq.heappop(heap)
        found[path] = -probability
        for token, share in enumerate(distribution(model, [*tokens, *path]).tolist()):
            heapq.heappush(heap, (probability * share, (*path, token)))
    return {path: probability for path, probability in found.items() if path}
