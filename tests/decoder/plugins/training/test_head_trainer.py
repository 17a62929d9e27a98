from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from decoder.model.pretrained import LanguageModel
from decoder.plugins.speculators.eagle import Eagle3Head, JoinedKeyValues
from decoder.plugins.training import head_trainer
from decoder.plugins.training.head_trainer import (
    HeadTrainer,
    LessonBatch,
    Stage,
    Teaching,
    batch_of,
    batches_of,
    places_at,
    soft_cross_entropy,
    unrolled,
)
from decoder.plugins.training.judging import RANKS, agreement
from decoder.plugins.training.taught_store import Example, TaughtStore
from tests.decoder.decoding import VOCABULARY, tiny_llama
from tests.decoder.plugins.training.teaching import (
    FEATURES,
    STATE_SIZE,
    drawn_head,
    drawn_texts,
    language_model_of,
)
from tests.decoder.rounding import OPERATIONS_OF_A_LAYER, Rounding

DEPTHS = 4

pytestmark = pytest.mark.training
CPU = torch.device("cpu")
LENGTHS = [(3, 6), (5, 4), (1, 12), (7, 1), (2, 2)]
ROUNDING = Rounding(torch.float32, FEATURES, OPERATIONS_OF_A_LAYER * DEPTHS + 1)
"""Of outputs of the deepest; the widest sums are over the states of three layers."""


@pytest.fixture
def language_model(byte_tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    return language_model_of(tiny_llama(layers=3), byte_tokenizer)


@pytest.fixture
def head(language_model: LanguageModel) -> Eagle3Head:
    return drawn_head(language_model, 30)


@pytest.fixture
def teaching(language_model: LanguageModel) -> Teaching:
    return Teaching.of(language_model, torch.arange(30))


def stored(folder: Path, taught: Sequence[Example]) -> TaughtStore:
    store = TaughtStore(folder, {})
    store.add(taught)
    return store


def laid(taught: Sequence[Example]) -> LessonBatch:
    examples = [Example(each.tokens, each.num_prompt, each.states) for each in taught]
    return batch_of(examples, FEATURES, STATE_SIZE, CPU)


def gone_on(
    head: Eagle3Head, teaching: Teaching, text: Example, place: int, depths: int
) -> Iterator[torch.Tensor]:
    """Yield [d], what the head gives where it reads true states up to a place and then its own.

    It goes on token by token, as in a draft: no masks, no rows that do not belong to it.
    """
    cache = [JoinedKeyValues() for _ in range(head.num_layers)]
    tokens = torch.from_numpy(text.tokens.astype(np.int64))
    hidden = head.project(text.states[: place + 1, :FEATURES].float())[None]
    embeddings = teaching.embeddings(tokens[1 : place + 2])[None]
    hidden = head.step(embeddings, hidden, torch.arange(place + 1)[None], None, cache)[:, -1:]
    yield hidden[0, 0]
    for position in range(place + 1, place + depths):
        embeddings = teaching.embeddings(tokens[position + 1])[None, None]
        hidden = head.step(embeddings, hidden, torch.tensor([[position]]), None, cache)
        yield hidden[0, 0]


def assert_unrolled_goes_on(head: Eagle3Head, teaching: Teaching) -> None:
    taught = drawn_texts(LENGTHS)
    batch = laid(taught)
    outputs = list(unrolled(head, teaching, batch.tokens, batch.features, DEPTHS))
    num_compared = 0
    for row, text in enumerate(taught):
        rows = len(text.tokens) - 1
        for place in range(rows):
            depths = min(DEPTHS, rows - place)
            for depth, expected in enumerate(gone_on(head, teaching, text, place, depths)):
                ROUNDING.check(outputs[depth][row, place], expected)
                num_compared += 1
    assert num_compared > 80


@torch.no_grad()
def test_every_place_goes_on_as_if_it_were_drafted_by_itself(
    head: Eagle3Head, teaching: Teaching
) -> None:
    assert_unrolled_goes_on(head, teaching)


@torch.no_grad()
def test_cross_entropy_and_its_gradient_are_those_of_the_library() -> None:
    torch.manual_seed(1)
    taught = torch.randn(9, 20).softmax(-1)
    losses, gradients = [], []
    for compute in (soft_cross_entropy, functional.cross_entropy):
        torch.manual_seed(2)
        said = torch.randn(9, 20, requires_grad=True)
        with torch.enable_grad():
            loss = 3 * compute(said, taught)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        losses.append(float(loss))
        gradients.append(said.grad)
    # Exponentials, sums over a row, a logarithm, and a sum over all of them.
    rounding = Rounding(torch.float32, width=9 * 20, operations=4)
    rounding.check(*losses)
    rounding.check(*gradients)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_one_off_is_found(
    shift: int, head: Eagle3Head, teaching: Teaching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(length: int, depth: int, _device: Any) -> torch.Tensor:
        causal = torch.ones(length, length, dtype=torch.bool).tril(shift if depth else 0)
        own = torch.eye(length, dtype=torch.bool)
        return torch.cat([causal, *[own] * depth], dim=-1)[None, None]

    monkeypatch.setattr(head_trainer, "unrolled_mask", planted)
    with pytest.raises(AssertionError):
        assert_unrolled_goes_on(head, teaching)


def test_a_batch_holds_each_text_and_nothing_of_its_padding_counts() -> None:
    taught = drawn_texts(LENGTHS)
    batch = laid(taught)
    assert batch.tokens.shape == (5, 13)
    assert batch.features.shape == (5, 12, FEATURES)
    for row, text in enumerate(taught):
        for place in range(12):
            is_known = place < len(text.tokens) - 1
            is_output = is_known and place + 1 >= text.num_prompt
            assert bool(batch.counts[row, place]) == is_output
            states = text.states[place].float() if is_known else torch.zeros(4 * STATE_SIZE)
            assert torch.equal(batch.features[row, place], states[:FEATURES])
            assert torch.equal(batch.last[row, place], states[FEATURES:])
            if is_known:
                assert batch.tokens[row, place + 1] == text.tokens[place + 1]
        assert batch.tokens[row, 0] == text.tokens[0]


@pytest.mark.parametrize("depth", range(14))
def test_a_place_counts_where_the_token_it_predicts_is_of_an_output(depth: int) -> None:
    taught = drawn_texts(LENGTHS)
    chosen = places_at(laid(taught).counts, depth)
    for row, text in enumerate(taught):
        for place in range(chosen.shape[1]):
            predicted = place + depth + 2
            expected = text.num_prompt <= predicted < len(text.tokens)
            assert bool(chosen[row, place]) == expected


@torch.no_grad()
def test_padding_changes_no_output(head: Eagle3Head, teaching: Teaching) -> None:
    taught = drawn_texts(LENGTHS)
    together = laid(taught)
    outputs = list(unrolled(head, teaching, together.tokens, together.features, DEPTHS))
    for row, text in enumerate(taught):
        alone = laid([text])
        own = unrolled(head, teaching, alone.tokens, alone.features, DEPTHS)
        for depth, output in enumerate(own):
            known = alone.features.shape[1] - depth
            ROUNDING.check(outputs[depth][row, :known], output[0, :known])


def test_batches_hold_each_text_once_within_the_tokens_allowed() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 300, 700)
    lengths[5] = 5000
    order = rng.permutation(700)[:650]
    batches = batches_of(order, lengths, 1000, np.random.default_rng(1))
    assert sorted(number for batch in batches for number in batch) == sorted(order.tolist())
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[batch]) <= 1000
    num_padded = sum(len(batch) * max(lengths[batch]) for batch in batches)
    assert num_padded < 1.2 * lengths[order].sum()
    assert batches != batches_of(order, lengths, 1000, np.random.default_rng(2))


def expected_loss(
    head: Eagle3Head, language_model: LanguageModel, taught: Sequence[Example], depths: int
) -> float:
    """Return the loss, place by place, against the target's whole output layer."""
    model: Any = language_model.model
    teaching = Teaching.of(language_model, torch.arange(30))
    total = 0.0
    for depth in range(depths):
        losses = []
        for text in taught:
            for place in range(len(text.tokens) - 2 - depth):
                if place + depth + 2 < text.num_prompt:
                    continue
                *_, output = gone_on(head, teaching, text, place, depth + 1)
                last = text.states[place + depth + 1, FEATURES:].float()
                wanted = model.lm_head(model.model.norm(last))[:30].softmax(-1)
                losses.append(functional.cross_entropy(head.logits(output), wanted))
        total += 0.8**depth * float(torch.stack(losses).mean())
    return total


@pytest.mark.parametrize("depths", [1, 3])
def test_the_loss_is_the_cross_entropy_against_the_target(
    depths: int,
    head: Eagle3Head,
    language_model: LanguageModel,
    teaching: Teaching,
    tmp_path: Path,
) -> None:
    taught = drawn_texts(LENGTHS)
    with torch.no_grad():
        expected = expected_loss(head, language_model, taught, depths)
    trainer = HeadTrainer(head, teaching, stored(tmp_path, taught))
    (found,) = trained(trainer, Stage("", depths, 0.0, 0.0, 1.0), 1)  # all texts are one batch
    assert found == pytest.approx(expected, rel=0.02)


def trained(trainer: HeadTrainer, stage: Stage, steps: int) -> list[float]:
    losses: list[float] = []

    def on_step(_over: float, loss: float) -> bool:
        losses.append(loss)
        return len(losses) < steps

    trainer.train(stage, 1000.0, on_step)
    return losses


@pytest.mark.parametrize("depths", [1, 3])
def test_the_loss_falls(depths: int, head: Eagle3Head, teaching: Teaching, tmp_path: Path) -> None:
    store = stored(tmp_path, drawn_texts([(3, 20)] * 6))
    trainer = HeadTrainer(head, teaching, store)
    losses = trained(trainer, Stage("", depths, 1e-2, 0.0, 1.0), 30)
    assert len(losses) == 30
    assert losses[-1] < 0.8 * losses[0]


def test_texts_with_outputs_of_a_token_or_two_make_no_weights_of_nothing(
    head: Eagle3Head, teaching: Teaching, tmp_path: Path
) -> None:
    """Deeper depths have no place in them: a mean over none would be no number."""
    store = stored(tmp_path, drawn_texts([(1, 1), (3, 1), (3, 2)]))
    losses = trained(HeadTrainer(head, teaching, store), Stage("", 3, 1e-3, 0.1, 1.0), 3)
    assert np.isfinite(losses).all()
    assert all(bool(torch.isfinite(each).all()) for each in head.parameters())


def test_training_ends_with_its_time(head: Eagle3Head, teaching: Teaching, tmp_path: Path) -> None:
    trainer = HeadTrainer(head, teaching, stored(tmp_path, drawn_texts(LENGTHS)))
    told: list[float] = []

    def on_step(over: float, _loss: float) -> bool:
        told.append(over)
        return True

    trainer.train(Stage("", 1, 1e-3, 0.0, 1.0), 0.3, on_step)
    assert len(told) > 1
    assert told == sorted(told)
    assert 0 <= told[0] < told[-1] < 1


@torch.no_grad()
def test_the_teaching_logits_are_the_targets(
    language_model: LanguageModel,
) -> None:
    tokens = torch.tensor([1, 4, 9, 40])
    teaching = Teaching.of(language_model, tokens)
    model: Any = language_model.model
    text = torch.arange(12)[None]
    given: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, states: given.append(states[0]))
    logits = model(text).logits
    hook.remove()
    rounding = Rounding(torch.float32, width=STATE_SIZE, operations=2)
    rounding.check(teaching.logits(given[0]), logits[..., tokens])
    assert torch.equal(teaching.embeddings(text), model.model.embed_tokens(text))


@torch.no_grad()
def test_agreement_is_what_a_loop_over_all_places_counts(
    head: Eagle3Head, teaching: Teaching, tmp_path: Path
) -> None:
    taught = drawn_texts([*LENGTHS, (1, 40)], seed=4)
    hits, places = np.zeros((DEPTHS, len(RANKS))), np.zeros(DEPTHS, int)
    for text in taught:
        for place in range(len(text.tokens) - 2):
            depths = min(DEPTHS, len(text.tokens) - 2 - place)
            for depth, output in enumerate(gone_on(head, teaching, text, place, depths)):
                came = int(text.tokens[place + depth + 2])
                if place + depth + 2 < text.num_prompt:
                    continue
                places[depth] += 1
                best = head.logits(output).argsort(descending=True).tolist()
                hits[depth] += [came in best[:rank] for rank in RANKS]
    found = agreement(head, teaching, stored(tmp_path, taught))
    assert found.num_places.tolist() == places.tolist()
    assert np.allclose(found.shares, hits / places[:, None])
    assert hits.sum() > 20
    assert found.worth == pytest.approx(np.cumprod(found.shares[:, 1]).sum())
    assert found.report()["top_4_by_depth"][0] == pytest.approx(found.shares[0, 1], abs=1e-4)


@torch.no_grad()
def test_a_token_that_the_head_cannot_draft_is_not_predicted(
    head: Eagle3Head, teaching: Teaching, tmp_path: Path
) -> None:
    (text,) = drawn_texts([(1, 30)])
    text.tokens[1:] = VOCABULARY - 1
    found = agreement(head, teaching, stored(tmp_path, [text]))
    assert not found.shares.any()
    assert found.num_places.tolist() == [29, 28, 27, 26]
