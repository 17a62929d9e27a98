from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor

from decoder.errors import DeadEndError, InvalidLogitsError
from decoder.sampling.rule import ProcessedRule, accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import (
    CERTAIN,
    AcceptRule,
    PassContext,
    SampledTree,
    accept_greedy,
)
from decoder.sampling.walk import Acceptance
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import (
    ScriptedDrafter,
    decoded,
    decoder_with,
    oracle,
    prompt_of,
    random_tree,
    tiny_llama,
    tree_of,
)
from tests.oracles.elsewhere import elsewhere, sent
from tests.oracles.exactness.drafts import SHAPES, Drafts
from tests.oracles.exactness.planted_errors import PLANTED, planted
from tests.oracles.exactness.scripted_target import PROMPT, SETTINGS, SIZE, distribution
from tests.oracles.exactness.trials import RULES, Case, all_cases, corrected, run
from tests.suite_parts import cases, draws_all_cases

DRAWS = cases(12_000, of=100_000)
FEWER_DRAWS = cases(8_000, of=20_000)
"""With half of them, planted errors have p-values below 1e-11, whatever the seed."""
NO_REPEATS = NoRepeatNGramLogitsProcessor(2)


def context_of(tokens: list[int], sequence: int = 0) -> PassContext:
    return PassContext(sequence, np.array(tokens, np.int32), len(PROMPT))


@pytest.mark.seeds
def test_sampling_keeps_the_targets_distribution() -> None:
    """Some of the cases of tests/oracles/exactness; the others are kept in its results."""
    chosen = [
        Case("temperature 1", "mixed", "both", coupled=False),
        Case("top-p", "bush", "drawn", coupled=False),
        Case("all of them", "chain", "certain", coupled=True),
    ]
    outcomes = [run(case, DRAWS) for case in chosen]
    assert min(outcome.draws for outcome in outcomes) >= DRAWS
    assert min(outcome.tokens_per_pass for outcome in outcomes) > 1.2
    assert min(corrected([outcome.p for outcome in outcomes])) > 0.01


@pytest.mark.seeds
def test_every_rule_keeps_to_the_target_under_every_setting() -> None:
    """Fewer draws, but all settings."""
    rules = [RULES[number % len(RULES)] for number in range(len(SETTINGS))]
    chosen = [
        Case(setting, "mixed", kind, coupled)
        for setting, (kind, coupled) in zip(SETTINGS, rules, strict=True)
    ]
    outcomes = [run(case, cases(4_000, of=20_000)) for case in chosen]
    assert min(corrected([outcome.p for outcome in outcomes])) > 0.01


@pytest.mark.seeds
@pytest.mark.parametrize("case", all_cases()[:: cases(13, of=7)], ids=str)
def test_many_sequences_together_get_what_each_gets_alone(case: Case) -> None:
    draws = cases(180, of=500)
    alone = run(case, draws, one_by_one=True)
    together = run(case, draws)
    assert alone == together


@pytest.mark.seeds
@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_found(error: str) -> None:
    with planted(error) as case:
        assert run(case, FEWER_DRAWS).p < 1e-6
    if draws_all_cases():
        assert run(case, FEWER_DRAWS).p > 0.01


@pytest.mark.seeds
def test_drawn_siblings_out_of_their_order_are_found() -> None:
    case = Case("temperature 1", "bush", "drawn", coupled=False)
    drafts = Drafts("bush", "drawn", sorts_siblings=True)
    assert run(case, FEWER_DRAWS, drafts=drafts).p < 1e-6


def some_trees(kind: str, count: int) -> Iterator[tuple[DraftTree, torch.Tensor]]:
    rng = np.random.default_rng(5)
    before, last = rng.integers(0, SIZE, (2, count))
    for shape in SHAPES:
        batch = Drafts(shape, kind).after(before, last, rng)
        yield from map(batch.tree, range(count))


EVERY_SETTING = [
    (setting, *rule)
    for number, setting in enumerate(SETTINGS)
    for rule in (RULES if draws_all_cases() else [RULES[number % len(RULES)]])
]
EVERY_RULE = [("all of them", *rule) for rule in RULES]


@pytest.mark.seeds
@pytest.mark.parametrize(
    ("setting", "kind", "coupled"), list(dict.fromkeys([*EVERY_SETTING, *EVERY_RULE]))
)
def test_another_device_gives_what_a_cpu_gives(
    setting: str,
    kind: str,
    coupled: bool,  # noqa: FBT001  pytest gives it by name
) -> None:
    sampling = replace(SETTINGS[setting].sampling, seed=3, coupled=coupled)
    rule: Any = accept_rule(sampling, SETTINGS[setting].processors)
    lengths = set()
    for number, (tree, logits) in enumerate(some_trees(kind, cases(2, of=12))):
        context = context_of([*PROMPT, 1, 4], number)
        path, _ = both_ways(rule, tree, logits, context)
        lengths.add(len(path))
    assert len(lengths) > 1


@pytest.mark.parametrize("setting", ["repetition penalty", "all of them", "a processor"])
def test_greedy_with_processors_accepts_the_longest_path_that_is_right(setting: str) -> None:
    """By brute force: what plain decoding with the same processors would have written."""
    sampling = replace(SETTINGS[setting].sampling, temperature=0, top_k=0, top_p=1, min_p=0)
    plain = replace(SETTINGS[setting], sampling=replace(sampling, temperature=1.0))
    rule = accept_rule(sampling, SETTINGS[setting].processors)
    lengths = []
    # The trees' logits are those after the last two tokens, whatever came before.
    for tail in product(range(SIZE), repeat=2):
        before, last = np.array([tail]).T
        batch = Drafts("mixed", "certain").after(before, last, np.random.default_rng(0))
        tree, logits = batch.tree(0)
        truth: list[int] = []
        for _ in range(4):
            truth.append(int(distribution(plain, [*tail, *truth]).argmax()))
        path, token = rule(tree, logits, context_of([*PROMPT, *tail]))
        right = [
            len(nodes)
            for nodes in map(tree.path_to, range(len(tree)))
            if tree.token_ids[nodes].tolist() == truth[: len(nodes)]
        ]
        assert len(path) == max(right, default=0)
        assert [*tree.token_ids[path], token] == truth[: len(path) + 1]
        lengths.append(len(path))
    assert max(lengths) >= 2


def test_uncoupled_sampling_is_repeatable_for_one_drafter() -> None:
    model, prompt = tiny_llama(), prompt_of(12)

    def output(seed: int) -> list[list[int]]:
        rule = accept_rule(SamplingSettings(1.0, seed=seed, coupled=False))
        decoder = decoder_with(model, ScriptedDrafter(oracle(prompt_of(60))), accept=rule)
        return [decoded(decoder, prompt, 12) for _ in range(2)]

    assert output(1) == output(1)
    assert output(1) != output(2)
    assert output(1)[0] != output(1)[1]


def test_greedy_follows_the_argmax_whatever_drafts_were_drawn_from() -> None:
    for tree, logits in some_trees("drawn", 20):
        path, token = accept_rule(SamplingSettings(seed=1, coupled=False))(
            tree, logits, context_of([*PROMPT])
        )
        wanted = accept_greedy(tree, logits, context_of([*PROMPT]))
        assert (path.tolist(), token) == (wanted[0].tolist(), wanted[1])


def test_a_draft_by_the_target_itself_is_always_accepted() -> None:
    logits = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))
    rule = accept_rule(SamplingSettings(1.0, seed=1, coupled=False))
    for trial in range(50):
        rng = np.random.default_rng(trial)
        proposals = torch.softmax(logits, -1)
        tokens = [int(rng.choice(SIZE, p=row / row.sum())) for row in proposals[:3].numpy()]
        chain = tree_of(list(zip([ROOT, 0, 1], tokens, strict=True)))
        tree = SampledTree(
            chain.token_ids,
            chain.parents,
            chain.probabilities,
            chain.sources,
            proposals,
            np.arange(3, dtype=np.int32),
        )
        assert len(rule(tree, logits, context_of([*PROMPT], trial))[0]) == 3


def test_low_temperature_is_greedy() -> None:
    for tree, logits in some_trees("certain", 10):
        sampled = accept_rule(SamplingSettings(1e-4, seed=0))(tree, logits, context_of([*PROMPT]))
        greedy = accept_greedy(tree, logits, context_of([*PROMPT]))
        assert (sampled[0].tolist(), sampled[1]) == (greedy[0].tolist(), greedy[1])


EXTREMES = [
    SamplingSettings(),
    SamplingSettings(1e-3, seed=1),
    SamplingSettings(1e-3, top_k=2, seed=1),
    SamplingSettings(1e-3, top_p=0.5, seed=1),
    SamplingSettings(1e-3, min_p=0.5, seed=1),
    SamplingSettings(1e-3, 2, 0.5, 0.5, 1.1, 0.1, 0.1, seed=1),
]


class Nothing(LogitsProcessor):
    """Excludes every token as soon as a certain one was written."""

    def __init__(self, last: int) -> None:
        self._last = last

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_over = (input_ids == self._last).any(dim=1, keepdim=True)
        return scores.masked_fill(is_over, -torch.inf)


def ways(rule: Any) -> tuple[AcceptRule, AcceptRule]:
    def on_another_device(
        tree: DraftTree, logits: torch.Tensor, context: PassContext
    ) -> Acceptance:
        with elsewhere():
            accepted: Acceptance = rule(tree, sent(logits), context)
        return accepted

    return rule, on_another_device


def both_ways(rule: Any, tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
    path, token = rule(tree, logits, context)
    other = ways(rule)[1](tree, logits, context)
    assert (path.tolist(), token) == (other[0].tolist(), other[1])
    return path, token


@pytest.mark.parametrize("settings", EXTREMES)
@pytest.mark.parametrize("coupled", [True, False])
def test_what_lies_before_a_dead_end_is_given_out_first(
    settings: SamplingSettings,
    coupled: bool,  # noqa: FBT001  as above
) -> None:
    rule = accept_rule(replace(settings, coupled=coupled), [Nothing(last=2)])
    assert isinstance(rule, ProcessedRule)
    logits = torch.zeros(4, SIZE)
    logits[[0, 1, 2, 3], [4, 2, 3, 1]] = 5.0
    tree = tree_of([(ROOT, 4), (0, 2), (1, 3)])
    path, token = both_ways(rule, tree, logits, context_of([3, 1, 3]))
    assert ([*tree.token_ids[path]], token) == ([4], 2)
    for way in ways(rule):
        with pytest.raises(DeadEndError, match="no token may come next"):
            way(tree, logits, context_of([3, 1, 3, 4, 2]))


@pytest.mark.parametrize("settings", EXTREMES)
@pytest.mark.parametrize("coupled", [True, False])
def test_logits_that_are_no_numbers_are_named(
    settings: SamplingSettings,
    coupled: bool,  # noqa: FBT001  as above
) -> None:
    rule: Any = accept_rule(replace(settings, coupled=coupled), [NO_REPEATS])
    logits = torch.full((4, SIZE), torch.nan)
    proposals = torch.full((1, SIZE), 1 / SIZE)
    plain = tree_of([(ROOT, 4), (ROOT, 2), (1, 3)])
    rows = np.array([0, 0, CERTAIN], np.int32)
    tree = SampledTree(
        plain.token_ids, plain.parents, plain.probabilities, plain.sources, proposals, rows
    )
    for way in ways(rule):
        with pytest.raises(InvalidLogitsError, match="load it with another dtype"):
            way(tree, logits, context_of([*PROMPT]))


def test_a_rule_is_greedy_unless_told_otherwise() -> None:
    assert accept_rule() is accept_greedy
    logits = torch.randn(26, 48, generator=torch.Generator().manual_seed(9))
    tree = random_tree(np.random.default_rng(1), 25)
    first = accept_rule(SamplingSettings(1.0))(tree, logits, context_of([*PROMPT]))
    others = [accept_rule(SamplingSettings(1.0))(tree, logits, context_of([1])) for _ in range(20)]
    assert any(other[1] != first[1] for other in others), "a seed of its own for each rule"
