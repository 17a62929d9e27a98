"""Sampling with drafts that a model drew, through the loop, the commands and `model.generate`."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.assembly import connect_drafter, draws_for
from decoder.budget.budget import FixedBudget
from decoder.drafters.drawing import DrawnFusion, Draws
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.options import DraftOptions
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.errors import ContradictoryOptionsError
from decoder.loop import Request
from decoder.model.pretrained import LanguageModel
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import CERTAIN, PassContext, SampledTree
from decoder.sampling.walk import Acceptance
from retriever.drafter import Drafter
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree
from tests.decoder.decoding import decoder_with, prompt_of, tiny_llama
from tests.decoder.drafters.draft_models import FREE, llama
from tests.decoder.sampling.drawn_outputs import TOP_K, drawn_from, shares_of_outputs
from tests.suite_parts import cases

NUM_OUTPUTS = cases(100, of=600)
CRITICAL = 54.1
"""Of chi-square with 26 degrees of freedom, at 0.001."""


@pytest.mark.seeds
def test_outputs_of_the_loop_are_distributed_as_the_target() -> None:
    target, prompt = tiny_llama(dtype=torch.float64, layers=3), prompt_of(6)
    expected = shares_of_outputs(target, prompt)
    rule = accept_rule(SamplingSettings(1.0, top_k=TOP_K, seed=1, coupled=False))
    truth = [*prompt, *max(expected, key=expected.__getitem__), 7]
    flatter = Draws(temperature=1.7, top_k=5, seed=3)  # than the target is drawn from
    drafter = drawn_from(tiny_llama(layers=3), truth, flatter, recycles=False)
    seen: list[bool] = []

    def noting(tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
        seen.append(isinstance(tree, SampledTree) and bool((tree.rows != CERTAIN).any()))
        return rule(tree, logits, context)

    decoder = decoder_with(target, drafter, accept=noting)
    counts: Counter[tuple[int, ...]] = Counter()
    # The first token comes from the prompt's pass, and a draft is no deeper than what is left.
    requests = [Request(prompt, 4)] * NUM_OUTPUTS
    written: list[list[int]] = [[] for _ in requests]
    for generation, tokens in decoder.generate_many(requests, 30):
        written[generation.number] += tokens
    counts.update(tuple(each[:3]) for each in written)
    assert sum(seen) >= NUM_OUTPUTS
    rare = [path for path in expected if expected[path] * NUM_OUTPUTS < 5]
    cells = [[path] for path in expected if path not in rare] + ([rare] if rare else [])
    pairs = [
        (sum(counts[path] for path in cell), NUM_OUTPUTS * sum(expected[path] for path in cell))
        for cell in cells
    ]
    assert set(counts) <= set(expected)
    assert sum((came - mean) ** 2 / mean for came, mean in pairs) < CRITICAL


def tokens_per_pass(drafter: Drafter, *, coupled: bool) -> float:
    target, prompt = tiny_llama(dtype=torch.float64, layers=3), prompt_of(6)
    rule = accept_rule(SamplingSettings(1.0, seed=4, coupled=coupled))
    generation = decoder_with(target, drafter, accept=rule).generate(prompt, 60)
    list(generation)
    return generation.statistics.tokens_per_pass


def test_draws_count_by_their_distributions_and_so_more_are_kept() -> None:
    # It drafts for itself, so that all that is drawn first is kept; in double precision, so that a
    # seed draws the same tokens on every processor.
    model = tiny_llama(dtype=torch.float64, layers=3)
    own = tokens_per_pass(drawn_from(model, [], Draws(seed=3)), coupled=False)
    compared = tokens_per_pass(drawn_from(model, [], Draws(seed=3)), coupled=True)
    assert own > 2.5
    assert own > 1.3 * compared


def test_model_generate_accepts_drawn_drafts_by_their_distributions() -> None:
    model, prompt = llama(layers=1), torch.tensor([prompt_of(6)])
    figures = []
    for draft_sampling in (True, False):
        plugin = Foredraft(
            model,
            drawn_from(model, [], Draws(seed=3)),
            budget=FixedBudget(16),
            draft_sampling=draft_sampling,
        )
        torch.manual_seed(0)
        model.generate(  # type: ignore[operator]  # untyped there
            prompt, max_new_tokens=60, do_sample=True, pad_token_id=0, custom_generate=plugin
        )
        figures.append(plugin.statistics.tokens_per_pass)
    assert figures[0] > 1.2 * figures[1]


def test_settings_draw_drafts_as_the_output_is_drawn(
    language_model: LanguageModel, model_directory: Path
) -> None:
    drafts = DraftOptions(draft_model=str(model_directory), draft_sampling=True)
    sampling = drafts.sampling(SamplingSettings(0.8, top_k=0, top_p=0.9, seed=7))
    assert not sampling.coupled
    assert draws_for(drafts, language_model, sampling) == Draws(0.8, None, 0.9, 7)
    assert draws_for(drafts, language_model, SamplingSettings()) is None
    with connect_drafter(drafts, language_model, sampling, FREE) as drafter:
        assert isinstance(drafter, DrawnFusion)
        prompt = np.array(language_model.encode("abc abc"), np.int32)
        assert isinstance(drafter.follow(TokenSequence(prompt)).draft(8), SampledTree)
    plain = DraftOptions(draft_model=str(model_directory))
    assert plain.sampling(SamplingSettings(0.8)).coupled
    with connect_drafter(plain, language_model, SamplingSettings(0.8)) as drafter:
        assert type(drafter) is FusedDrafter


def test_drawing_without_a_model_or_without_sampling_is_refused(model_directory: Path) -> None:
    with pytest.raises(ContradictoryOptionsError, match="--draft-sampling needs a model"):
        DraftOptions(draft_sampling=True)
    drafts = DraftOptions(draft_model=str(model_directory), draft_sampling=True)
    with pytest.raises(ContradictoryOptionsError, match="no effect at temperature 0"):
        drafts.sampling(SamplingSettings())
