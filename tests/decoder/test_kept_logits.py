"""What a run has recycled is drafted from after a restart, and never changes an output."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decoder.assembly import connect_drafter
from decoder.drafters.following import Verified
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.keeping import KeptLogits
from decoder.drafters.kernels.recycled import Table, enter, find, key_of
from decoder.drafters.options import DraftOptions
from decoder.drafters.recycling import NUM_LIKELY, RecycledLogits
from decoder.errors import ContradictoryOptionsError
from decoder.model.pretrained import LanguageModel
from decoder.model.stamp import fingerprint_of
from retriever.client.strict import RemoteDrafter
from retriever.drafter import FINDING_BYTES, FORGOTTEN, Findings, FoundPage
from retriever.errors import DrafterUnavailableError, NotPossibleError, StateError
from retriever.follower import DraftLimits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    VOCABULARY,
    decoder_with,
    plainly,
    prompt_of,
    tiny_gemma,
    tiny_llama,
)
from tests.retriever.findings import all_of, findings, rows
from tests.retriever.security.in_process import serving

LIMITS = DraftLimits(VOCABULARY, VOCABULARY)
MODEL = "ab" * 32


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@contextmanager
def kept_on(
    state: Path | None, recycled: RecycledLogits, model: str = MODEL
) -> Iterator[EmbeddedDrafter]:
    """Keep recycled logits in a state directory during the block."""
    drafter = EmbeddedDrafter(state=state)
    try:
        with KeptLogits(recycled, drafter.state, model, VOCABULARY):
            yield drafter
    finally:
        drafter.shut_down()


@cache
def expected(model: PreTrainedModel, prompt: tuple[int, ...], num: int) -> list[int]:
    return plainly(model, list(prompt), num)


def run(model: PreTrainedModel, recycled: RecycledLogits, prompt: list[int], num: int = 40) -> int:
    """Decode, check the output, and return the passes that it took."""
    decoder = decoder_with(model, FusedDrafter([], LIMITS, recycled=recycled))
    generation = decoder.generate(prompt, num)
    output = [token for step in generation for token in step]
    assert output == expected(model, tuple(prompt), num)
    return generation.statistics.num_passes


def test_a_restarted_decoder_drafts_as_the_one_that_ended(
    model: PreTrainedModel, tmp_path: Path, prompt: list[int]
) -> None:
    first = RecycledLogits(1 << 16)
    with kept_on(tmp_path, first):
        cold = run(model, first, prompt)
    second = RecycledLogits(1 << 16)
    with kept_on(tmp_path, second):
        assert _content(second) == _content(first)
        assert run(model, second, prompt) < cold
    other = RecycledLogits(1 << 16)
    with kept_on(tmp_path, other, "cd" * 32):
        assert not _content(other)
        assert run(model, other, prompt) == cold


def _content(recycled: RecycledLogits) -> dict[int, tuple[list[int], list[float]]]:
    table = recycled.table
    used = np.flatnonzero(table.entries["key"])
    parts = (table.entries["key"][used], table.tokens[used], table.log_odds[used])
    return rows(Findings(*parts))


def test_only_what_was_learned_since_is_kept_again(
    model: PreTrainedModel, tmp_path: Path, prompt: list[int]
) -> None:
    recycled = RecycledLogits(1 << 16)
    drafter = EmbeddedDrafter(state=tmp_path)
    kept = KeptLogits(recycled, drafter.state, MODEL, VOCABULARY)
    assert kept.save() == 0
    run(model, recycled, prompt)
    assert kept.save() == len(_content(recycled)) > 0
    assert kept.save() == 0
    before = len(_content(recycled))
    run(model, recycled, prompt_of(12, seed=5))
    assert 0 < len(_content(recycled)) - before <= kept.save()
    held, found = _content(recycled), rows(all_of(drafter.state, MODEL))
    assert held.items() <= found.items()
    assert len(found) - len(held) <= 2  # the table has few places for some contexts
    again = RecycledLogits(1 << 16)
    once = KeptLogits(again, drafter.state, MODEL, VOCABULARY)
    assert once.load() == len(all_of(drafter.state, MODEL))
    assert once.save() == 0  # what was taken in is kept already
    drafter.shut_down()


def test_nothing_is_kept_of_what_is_not_remembered(
    model: PreTrainedModel, tmp_path: Path, prompt: list[int]
) -> None:
    recycled = RecycledLogits(1 << 16)
    with kept_on(tmp_path, recycled) as drafter:
        decoder = decoder_with(model, FusedDrafter([], LIMITS, recycled=recycled))
        for _ in decoder.generate(prompt, 20, FORGOTTEN):
            pass
        assert _content(recycled)
    with kept_on(tmp_path, RecycledLogits()) as drafter:
        assert not len(all_of(drafter.state, MODEL))


def test_bounds_keep_the_newest(model: PreTrainedModel, prompt: list[int]) -> None:
    recycled = RecycledLogits(1 << 16)
    run(model, recycled, prompt)
    learned, _ = recycled.learned_since(0)
    assert len(learned) > 50
    drafter = EmbeddedDrafter()
    bound = 50 * FINDING_BYTES
    kept = KeptLogits(recycled, drafter.state, MODEL, VOCABULARY, max_bytes=bound)
    assert kept.save() == 50
    assert rows(all_of(drafter.state, MODEL)) == rows(learned.part(slice(-50, None)))
    nothing = KeptLogits(recycled, drafter.state, MODEL, VOCABULARY, max_bytes=0)
    assert (nothing.load(), nothing.save()) == (0, 0)


def test_the_newest_stay_where_a_table_is_smaller_than_what_is_kept() -> None:
    drafter = EmbeddedDrafter()
    for number in range(4):
        drafter.state.share_findings(MODEL, findings(1000 * number, 1000, number))
    recycled = RecycledLogits(1 << 8)
    assert KeptLogits(recycled, drafter.state, MODEL, 50).load() == 4000
    held = _content(recycled)
    assert len(held) > 200
    last = rows(findings(3000, 1000, 3))
    assert all(last[context] == row for context, row in held.items())


def test_decoders_share_through_a_service(model: PreTrainedModel, prompt: list[int]) -> None:
    with serving(EmbeddedDrafter()) as address, RemoteDrafter(address, timeout_s=10) as service:
        one, other = RecycledLogits(1 << 16), RecycledLogits(1 << 16)
        with KeptLogits(one, service, MODEL, VOCABULARY):
            cold = run(model, one, prompt)
        with KeptLogits(other, service, MODEL, VOCABULARY):
            assert run(model, other, prompt) < cold


class BadStore:
    """A store that refuses, or gives what it should not."""

    def __init__(self, answer: Findings | Exception) -> None:
        self.answer = answer
        self.num_asked = 0

    def share_findings(self, model: str, findings: Findings) -> None:
        del model, findings
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer

    def fetch_findings(self, model: str, before: int = 0) -> FoundPage:
        del model, before
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return FoundPage(self.answer, 1)  # pages without an end


@pytest.mark.parametrize(
    ("error", "num_asked"), [(DrafterUnavailableError("down"), 4), (NotPossibleError("off"), 1)]
)
def test_a_store_that_refuses_is_said_once_and_costs_drafts_alone(
    model: PreTrainedModel,
    prompt: list[int],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    num_asked: int,
) -> None:
    store, recycled = BadStore(error), RecycledLogits(1 << 16)
    kept = KeptLogits(recycled, store, MODEL, VOCABULARY)
    with kept:
        run(model, recycled, prompt)
        assert kept.save() == kept.save() == 0
    assert store.num_asked == num_asked
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(error) in caplog.text


def test_findings_that_are_not_true_change_no_output(
    model: PreTrainedModel, prompt: list[int]
) -> None:
    """Each context says what never comes, as surely as it may."""
    true = RecycledLogits(1 << 16)
    run(model, true, prompt)
    learned, _ = true.learned_since(0)
    tokens = np.full_like(learned.tokens, 3)
    tokens[:] = np.arange(NUM_LIKELY)
    lies = Findings(learned.contexts, tokens, np.full_like(learned.log_odds, 16))
    recycled = RecycledLogits(1 << 16)
    store = EmbeddedDrafter()
    store.state.share_findings(MODEL, lies)
    assert KeptLogits(recycled, store.state, MODEL, VOCABULARY).load() == len(lies)
    run(model, recycled, prompt)


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_tokens_outside_the_vocabulary_are_refused(
    token: int, model: PreTrainedModel, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    bad = findings(0)
    bad.tokens[:] %= VOCABULARY
    bad.tokens[1, 1] = token
    recycled = RecycledLogits(1 << 16)
    assert KeptLogits(recycled, BadStore(bad), MODEL, VOCABULARY).load() == 0
    assert not _content(recycled)
    assert "outside the vocabulary" in caplog.text
    run(model, recycled, prompt)


def test_padded_logits_are_not_kept() -> None:
    recycled = RecycledLogits(1 << 8)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 40] = 5.0
    verified = Verified(1, DraftTree.empty(), logits, np.zeros(0, np.int64), 40)
    recycled.learn(verified, np.array([1, 2, -1], np.int32))
    drafter = EmbeddedDrafter()
    KeptLogits(recycled, drafter.state, MODEL, 40).save()
    assert not len(all_of(drafter.state, MODEL))
    KeptLogits(recycled, drafter.state, MODEL, VOCABULARY).save()
    assert len(all_of(drafter.state, MODEL)) == 2


def test_it_is_kept_while_it_runs(tmp_path: Path, model: PreTrainedModel) -> None:
    """A thread keeps what was learned, while the loop goes on learning."""
    drafter, recycled = EmbeddedDrafter(state=tmp_path), RecycledLogits(1 << 16)
    kept = KeptLogits(recycled, drafter.state, MODEL, VOCABULARY, period_s=0.01)
    with kept:
        for seed in range(6):
            run(model, recycled, prompt_of(12, seed), 20)
        assert len(all_of(drafter.state, MODEL))
    found = rows(all_of(drafter.state, MODEL))
    assert all(found[context] == row for context, row in _content(recycled).items())
    kept.close()
    drafter.shut_down()


def test_entering_equals_its_twin() -> None:
    """Of a key the last; of the keys that share four places, those that came last."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        table = Table.of(32, NUM_LIKELY)
        sets: list[dict[int, list[int]]] = [{} for _ in range(8)]
        first = 2
        for _ in range(5):
            count = int(rng.integers(0, 30))
            keys = 2 * rng.integers(0, 60, count) + 1
            tokens = rng.integers(0, 99, (count, NUM_LIKELY)).astype(np.int32)
            enter(table, keys, tokens, tokens.astype(np.float32), first)
            first += 2 * count
            for key, row in zip(keys.tolist(), tokens.tolist(), strict=True):
                ways = sets[(key >> 1 & 31) // 4]
                ways.pop(key, None)  # the last written stands last
                ways[key] = row
                if len(ways) > 4:
                    del ways[next(iter(ways))]
        expected = {key: row for ways in sets for key, row in ways.items()}
        for key, row in expected.items():
            entry = find(table.entries, key)
            assert table.tokens[entry].tolist() == table.log_odds[entry].tolist() == row
        assert {key for key in table.entries["key"].tolist() if key} == set(expected)


def test_contexts_keep_their_numbers() -> None:
    """Kept findings are found by them: other numbers would need another fingerprint."""
    context = np.array([5, 17, 2], np.int32)
    assert [key_of(context, order) for order in (1, 2, 3)] == [
        5323229122419862481,
        175756861753194789,
        4308342777361044519,
    ]


def test_a_fingerprint_tells_models_apart(model: PreTrainedModel) -> None:
    known = fingerprint_of(model, "aa")
    assert known == fingerprint_of(tiny_llama(), "aa")
    others = [
        fingerprint_of(model, "bb"),
        fingerprint_of(tiny_gemma(), "aa"),
        fingerprint_of(tiny_llama(dtype=torch.bfloat16), "aa"),
    ]
    tuned = tiny_llama()
    with torch.no_grad():
        next(reversed(list(tuned.parameters()))).mul_(1.001)
    others.append(fingerprint_of(tuned, "aa"))
    assert len({known, *others}) == 5


def test_settings_keep_and_share(
    language_model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = language_model.encode("what was kept")
    tokens: list[list[int]] = []

    def passes(settings: DraftOptions) -> int:
        with connect_drafter(settings, language_model) as drafter:
            decoder = decoder_with(language_model.model, drafter)
            generation = decoder.generate(prompt, 30)
            tokens.append([token for step in generation for token in step])
            return generation.statistics.num_passes

    cold = passes(DraftOptions())
    assert passes(DraftOptions(state=tmp_path)) == cold
    with monkeypatch.context() as alone:  # the generations would draft it, too
        alone.setattr("retriever.sessions.embedded.EmbeddedDrafter.draft", _nothing)
        assert passes(DraftOptions(state=tmp_path)) < cold
    with serving(EmbeddedDrafter()) as address:
        assert passes(DraftOptions(server=[address])) == cold
        assert passes(DraftOptions(server=[address])) < cold
    assert len({tuple(each) for each in tokens}) == 1
    with (
        connect_drafter(DraftOptions(state=tmp_path), language_model),
        pytest.raises(StateError, match="another drafter uses"),
    ):
        passes(DraftOptions(state=tmp_path))
    with pytest.raises(ContradictoryOptionsError, match="serve --state"):
        DraftOptions(state=tmp_path, server=["localhost:1"])


def _nothing(_self: EmbeddedDrafter, requests: list[object]) -> list[DraftTree]:
    return [DraftTree.empty() for _ in requests]
