"""Tiny draft models, and the slow, obvious twins of what they draft."""

import heapq
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoder.drafters.asking import StepCosts
from decoder.drafters.model_drafter import DraftingOptions, ModelDrafter
from retriever.drafter import DraftRequest
from retriever.tree import ROOT, DraftTree, Source
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


def unbounded(width: int = 8) -> DraftingOptions:
    return DraftingOptions(width=width, max_passes=10_000, costs=FREE)


def drafted(
    drafter: ModelDrafter, tokens: Sequence[int], budget: int, min_probability: float = 0.0
) -> DraftTree:
    """Draft once behind a sequence, by a session of its own."""
    drafter.open("once", np.array(tokens, np.int32))
    try:
        return next_draft(drafter, "once", [], len(tokens), budget, min_probability)
    finally:
        drafter.close("once")


def next_draft(  # noqa: PLR0913, PLR0917  the parts of a request
    drafter: ModelDrafter,
    session: str,
    new_tokens: Sequence[int],
    length: int,
    budget: int,
    min_probability: float = 0.0,
) -> DraftTree:
    """Draft for an open session; the answer is a valid tree within its budget."""
    new = np.array(new_tokens, np.int32)
    [tree] = drafter.draft([DraftRequest(session, new, length, budget, min_probability)])
    DraftTree.checked(
        tree.token_ids,
        tree.parents,
        tree.probabilities,
        tree.sources,
        vocabulary_size=drafter.model.vocabulary_size,
    )
    assert len(tree) <= budget
    assert np.all(tree.sources == Source.MODEL)
    return tree


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Return every path of a tree as tokens, with its probability."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return dict(zip(found, tree.probabilities.tolist(), strict=True))


@torch.inference_mode()
def distribution(model: PreTrainedModel, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return what a model expects behind tokens, without any cache."""
    logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    probabilities: NDArray[np.float64] = torch.softmax(logits.double(), -1).numpy()
    return probabilities


def path_probability(model: PreTrainedModel, tokens: list[int], path: tuple[int, ...]) -> float:
    rows = [
        distribution(model, [*tokens, *path[:depth]])[path[depth]] for depth in range(len(path))
    ]
    return float(np.prod(rows))


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


@torch.inference_mode()
def all_prefixes(
    model: PreTrainedModel, tokens: list[int], vocabulary: int, depth: int
) -> dict[tuple[int, ...], float]:
    """Return every continuation of up to `depth` tokens."""
    leaves = list(itertools.product(range(vocabulary), repeat=depth))
    rows = torch.tensor([[*tokens, *leaf] for leaf in leaves])
    shares = torch.softmax(model(input_ids=rows, use_cache=False).logits, -1).numpy()
    found: dict[tuple[int, ...], float] = {}
    for row, leaf in enumerate(leaves):
        probability = 1.0
        for at, token in enumerate(leaf):
            probability *= float(shares[row, len(tokens) - 1 + at, token])
            found[leaf[: at + 1]] = probability
    return found
