"""The draft model for llama-cpp-python against its published interface, without the engine.

How `Llama.generate` calls a draft model stands in `Engine` below: with a view of its own tokens,
before every pass but a prompt's; what is returned is cut to the room that is left.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from ctypes import POINTER, c_float
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.drafters.following import NoDrafter
from decoder.errors import UnsupportedEngineError
from indexer.reader import Vocabulary
from retriever.errors import InvalidRequestError, VocabularyMismatchError
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.decoder.engines.scripted import ScriptedDrafter, chain_tree
from tests.decoder.engines.stated_fields import check_drafts

PACKAGE = "decoder.plugins.llama_cpp"
MODULE = f"{PACKAGE}.attaching"
VOCABULARY = 64


class LlamaDraftModel(ABC):
    @abstractmethod
    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]: ...


class Llama:
    """A model whose choice depends on the last tokens, in the engine's own loop.

    It keeps a row of logits for each token that it read, later rejected ones included.
    """

    def __init__(self, n_ctx: int = 512, *, logits_all: bool = True) -> None:
        self.input_ids = np.zeros(n_ctx, np.intc)
        self.n_tokens = 0
        self.draft_model: Any = None
        self.scores = np.zeros((n_ctx if logits_all else 8, VOCABULARY), np.float32)
        self._logits_all = logits_all
        self._n_ctx = n_ctx
        self.n_batch = 512
        self.model = SimpleNamespace(is_recurrent=False, is_hybrid=False, n_swa=0)
        self.context_params = SimpleNamespace(swa_full=True)
        self.num_passes = self.num_rows = 0

    @property
    def ctx(self) -> "Llama":
        return self

    def n_ctx(self) -> int:
        return self._n_ctx

    def n_vocab(self) -> int:
        return VOCABULARY

    def token_bos(self) -> int:
        return 0

    def reset(self) -> None:
        self.n_tokens = 0

    def tokenize(self, text: bytes, add_bos: bool = True) -> list[int]:  # noqa: FBT001, FBT002  (the engine's)
        return [0] * add_bos + [byte % VOCABULARY for byte in text]

    def eval(self, tokens: list[int]) -> None:
        assert all(0 <= token < VOCABULARY for token in tokens), "the engine ends at such a token"
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        for at in range(self.n_tokens, self.n_tokens + len(tokens)) if self._logits_all else ():
            self.scores[at] = logits_after(self.input_ids[: at + 1].tolist())
        self.n_tokens += len(tokens)
        self.num_rows += len(tokens) if self._logits_all else 1
        self.num_passes += 1

    def _create_completion(
        self, prompt: list[int], logprobs: int | None = None, *, echo: bool = False
    ) -> Iterator[int]:
        yield from self.generate(prompt)
        assert echo or logprobs is None

    def generate(self, prompt: list[int]) -> Iterator[int]:
        self.n_tokens = _common(self.input_ids[: self.n_tokens].tolist(), prompt[:-1])
        tokens = prompt[self.n_tokens :]
        at = self.n_tokens + len(tokens) - 1
        while True:
            self.eval(tokens)
            while at < self.n_tokens:
                token = script(self.input_ids[: at + 1].tolist(), 1)[0]
                at += 1
                yield token
                tokens = [token]
                if at < self.n_tokens and token != self.input_ids[at]:
                    self.n_tokens = at
                    break
            self.input_ids[self.n_tokens : self.n_tokens + 1] = tokens
            if self.draft_model is not None:
                drafted = self.draft_model(self.input_ids[: self.n_tokens + 1])
                assert drafted.dtype == np.intc
                tokens.extend(drafted.astype(int)[: self._n_ctx - self.n_tokens - 1].tolist())


def script(tokens: list[int], number: int) -> list[int]:
    out = list(tokens)
    for _ in range(number):
        out.append(2 + (31 * sum(out[-3:]) + len(out) // 16) % (VOCABULARY - 2))
    return out[len(tokens) :]


def logits_after(tokens: list[int]) -> NDArray[np.float32]:
    """The likeliest token is the script's; others come as near as a model's do."""
    logits = np.random.default_rng(tokens[-1]).normal(0, 1, VOCABULARY).astype(np.float32)
    logits[script(tokens, 1)[0]] = 6.0
    return logits


def last_logits(llm: Llama, at: int) -> Any:
    assert at == -1
    logits = logits_after(llm.input_ids[: llm.n_tokens].tolist())
    return logits.ctypes.data_as(POINTER(c_float))


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter's module over the engine's published names."""
    engine, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    vars(engine).update(
        Llama=Llama,
        llama_get_logits_ith=last_logits,
        llama_model_is_recurrent=lambda model: model.is_recurrent,
        llama_model_is_hybrid=lambda model: model.is_hybrid,
        llama_model_n_swa=lambda model: model.n_swa,
    )
    speculative.LlamaDraftModel = LlamaDraftModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    monkeypatch.setitem(sys.modules, speculative.__name__, speculative)
    forget_adapter()
    yield import_module(MODULE)
    forget_adapter()


def forget_adapter() -> None:
    for name in [each for each in sys.modules if each.startswith(PACKAGE)]:
        del sys.modules[name]


def generated(llm: Llama, prompt: list[int], number: int) -> list[int]:
    return [token for _, token in zip(range(number), llm.generate(prompt), strict=False)]


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, 5])
def test_output_is_that_of_no_drafts_however_wrong_they_are(adapter: Any, wrong_at: int) -> None:
    drafter = ScriptedDrafter(script, wrong_at, VOCABULARY)
    llm = Llama()
    ours = adapter.attach(llm, drafter, measure=False, recycle=False)
    prompts = [[5, 9, 13], [5, 9, 13, 20], [40], [5, 9, 13]]
    for prompt in prompts:
        assert generated(llm, prompt, 100) == script(prompt, 100)
    assert (ours.num_accepted > 0) == (wrong_at != 1)
    assert (llm.num_passes < 4 * 70) == (wrong_at != 1)
    assert ours.num_passes in {llm.num_passes - len(prompts), llm.num_passes - len(prompts) + 1}
    assert ours.num_failures == 0


def test_only_new_tokens_reach_the_drafter(adapter: Any) -> None:
    drafter = ScriptedDrafter(script, 3, VOCABULARY)
    llm = Llama()
    adapter.attach(llm, drafter, measure=False)
    prompt = script([1], 300)
    generated(llm, prompt, 100)
    assert drafter.told <= len(prompt) + 100


def test_each_prompt_is_a_session_of_its_own_and_its_output_is_remembered(adapter: Any) -> None:
    drafter = ScriptedDrafter(script, 0, VOCABULARY)
    llm = Llama()
    ours = adapter.attach(llm, drafter, measure=False)
    first = generated(llm, [5, 9, 13], 40)
    second = generated(llm, [5, 9, 13, *first, 3, 3, 3], 40)  # a chat's next turn
    again = generated(llm, [5, 9, 13, *first, 3, 3, 3], 40)  # its answer, once more
    assert again == second
    assert len(drafter.sessions) == 1
    ours.end()
    assert not drafter.sessions
    assert [output[:20] for output in drafter.outputs] == [first[:20], second[:20], second[:20]]
    assert all(output == first[: len(output)] for output in drafter.outputs[:1])


def test_a_view_that_changes_afterwards_changes_nothing(adapter: Any) -> None:
    drafter = ScriptedDrafter(script, 0, VOCABULARY)
    ours = adapter.DrafterDraftModel(drafter, VOCABULARY)
    tokens = np.array([5, 9, 13], np.intc)
    drafted = ours(tokens)
    tokens[:] = 0
    longer = np.array([5, 9, 13, *drafted[:2], 30], np.intc)
    ours(longer)
    assert list(drafter.sessions.values()) == [longer.tolist()]


@pytest.mark.parametrize("failure", [None, RuntimeError("our bug")])
def test_a_drafter_that_goes_away_in_the_middle_costs_drafts_alone(
    adapter: Any, failure: Exception | None
) -> None:
    drafter = ScriptedDrafter(script, 0, VOCABULARY)
    drafter.failure = failure or drafter.failure
    llm = Llama()
    ours = adapter.attach(llm, drafter, measure=False)
    tokens = []
    for _, token in zip(range(100), llm.generate([5, 9, 13]), strict=False):
        tokens.append(token)
        drafter.is_away = 20 < len(tokens) < 60
    assert tokens == script([5, 9, 13], 100)
    assert ours.num_accepted > 0
    ours.close()


def test_tokens_that_the_model_does_not_have_are_never_drafted(adapter: Any) -> None:
    drafter = ScriptedDrafter(lambda tokens, _: [*script(tokens, 1), VOCABULARY, 3])
    llm = Llama()
    adapter.attach(llm, drafter, measure=False)
    assert generated(llm, [5, 9, 13], 50) == script([5, 9, 13], 50)


def test_a_full_context_ends_with_all_that_fits(adapter: Any) -> None:
    llm = Llama(64)
    adapter.attach(llm, ScriptedDrafter(script, 0, VOCABULARY), measure=False)
    assert generated(llm, [5, 9, 13], 61) == script([5, 9, 13], 61)


def test_a_model_that_keeps_one_tokens_logits_is_refused(adapter: Any) -> None:
    with pytest.raises(adapter.UnsupportedModelError, match="logits_all=True"):
        adapter.attach(Llama(logits_all=False), ScriptedDrafter(script))


@pytest.mark.parametrize("kind", ["is_recurrent", "is_hybrid", "n_swa"])
def test_a_cache_that_cannot_give_up_tokens_is_refused(adapter: Any, kind: str) -> None:
    llm = Llama()
    llm.context_params.swa_full = False
    setattr(llm.model, kind, 1)
    with pytest.raises(adapter.UncroppableCacheError, match=r"rejected tokens|swa_full=True"):
        adapter.attach(llm, ScriptedDrafter(script))


def test_a_drafter_for_another_tokenizer_is_refused(adapter: Any) -> None:
    drafter = EmbeddedDrafter(vocabulary=Vocabulary(VOCABULARY, "a" * 64))
    with pytest.raises(VocabularyMismatchError, match="the model's own tokenizer"):
        adapter.attach(Llama(), drafter, vocabulary=Vocabulary(VOCABULARY, "b" * 64))


def test_a_token_beyond_the_drafters_vocabulary_ends_drafting_for_that_prompt(adapter: Any) -> None:
    drafter = EmbeddedDrafter(vocabulary=Vocabulary(32, "a" * 64))
    llm = Llama()
    ours = adapter.attach(llm, drafter, measure=False)
    for prompt in ([5, 9, 60, 13], [5, 9, 13]):
        assert generated(llm, prompt, 60) == script(prompt, 60)
    assert ours.num_failures == 0


def test_a_draft_that_does_not_pay_is_not_verified(adapter: Any) -> None:
    """Where a pass of two tokens takes ten times as long as one of one, plain decoding wins."""
    costs = adapter.CostSurface.flat((1, 2, 17), (0.001, 0.1, 0.2))
    budget = adapter.MeasuredBudget(costs)
    ours = adapter.DrafterDraftModel(ScriptedDrafter(script), VOCABULARY, budget=budget)
    assert len(ours(np.array([5, 9, 13], np.intc))) == 0
    cheap = adapter.MeasuredBudget(adapter.CostSurface.flat((1, 17), (0.1, 0.11)))
    ours = adapter.DrafterDraftModel(ScriptedDrafter(script), VOCABULARY, budget=cheap)
    assert len(ours(np.array([5, 9, 13], np.intc))) == 8


def test_costs_are_measured_before_drafting_begins(adapter: Any) -> None:
    llm = Llama()
    surface = adapter.measure_costs(llm, 17)
    assert surface.widths == (1, 2, 3, 4, 6, 8, 12, 16, 17)
    assert len(surface.seconds[0]) == 9
    assert llm.n_tokens == 0


def test_the_embedded_drafter_learns_from_earlier_prompts(adapter: Any) -> None:
    drafter = EmbeddedDrafter()
    passes = []
    for _ in range(2):
        llm = Llama()
        ours = adapter.attach(llm, drafter, measure=False)
        assert generated(llm, [5, 9, 13], 100) == script([5, 9, 13], 100)
        ours.close()
        passes.append(llm.num_passes)
    assert passes[1] < 0.5 * passes[0]
    assert len(drafter.state.sessions) == 0


def test_a_chain_is_the_best_path_clamped(adapter: Any) -> None:
    ours = adapter.DrafterDraftModel(ScriptedDrafter(script), VOCABULARY, num_pred_tokens=3)
    tokens = [5, 9, 13]
    assert ours(np.array(tokens, np.intc)).tolist() == script(tokens, 3)
    assert chain_tree(script(tokens, 3)).token_ids.tolist() == script(tokens, 3)


def accepted(llm: Llama, ours: Any, prompt: list[int], number: int = 100) -> int:
    """Check the output of a prompt from an empty cache; return how many were accepted."""
    llm.reset()
    before = int(ours.num_accepted)
    assert generated(llm, prompt, number) == script(prompt, number)
    return int(ours.num_accepted) - before


def test_what_the_model_found_likely_is_drafted_again(adapter: Any) -> None:
    """Without any retrieval: logits alone, of passes, of prompts and of rejected tokens."""
    llm = Llama()
    ours = adapter.attach(llm, NoDrafter(), measure=False)
    assert min(accepted(llm, ours, [5, 9, 13]) for _ in range(2)) > 40
    assert ours.num_failures == 0
    plain = Llama()
    assert (
        accepted(plain, adapter.attach(plain, NoDrafter(), measure=False, recycle=False), [5]) == 0
    )


def test_logits_of_a_prompt_are_computed_where_they_are_shown_alone(adapter: Any) -> None:
    prompt = script([1], 200)

    def rows(**shown: Any) -> int:
        llm = Llama()
        adapter.attach(llm, NoDrafter(), measure=False)
        for _ in zip(range(1), llm._create_completion(prompt, **shown), strict=False):
            pass
        assert (llm.scores[len(prompt) - 1] == logits_after(prompt)).all()
        return llm.num_rows

    assert rows() == rows(echo=True) == 1
    assert rows(echo=True, logprobs=1) == len(prompt)
    llm = Llama()
    adapter.attach(llm, NoDrafter(), measure=False)
    llm.eval(prompt)  # the user's own call
    assert llm.num_rows == len(prompt)


def noting(adapter: Any) -> list[tuple[DraftTree, int]]:
    """Have drafts learn as they do, check what of, and note the trees and what was accepted.

    What is learned of any tokens must be what the model's logits after these very tokens say.
    """
    learned: list[tuple[DraftTree, int]] = []

    class Noting(adapter.FusedDrafter):  # type: ignore[misc]  # made at run time
        def take_in(self, sequence: Any, verified: Any) -> Any:
            context = sequence.sequence.tokens.tolist()
            rows = [context] + [
                [*context, *verified.tree.token_ids[verified.tree.path_to(node)].tolist()]
                for node in range(len(verified.tree))
            ]
            assert len(rows) == len(verified.logits)
            for tokens, logits in zip(rows, verified.logits, strict=True):
                assert (logits == logits_after(tokens)).all()
            learned.append((verified.tree, len(verified.path)))
            return super().take_in(sequence, verified)

    adapter.FusedDrafter = Noting
    return learned


def test_rows_of_rejected_tokens_are_learned_as_behind_these_tokens(adapter: Any) -> None:
    learned = noting(adapter)
    llm = Llama()
    ours = adapter.attach(llm, ScriptedDrafter(script, 3, VOCABULARY), measure=False)
    for prompt in ([5, 9, 13], [5, 9, 13, 20], [40]):
        accepted(llm, ours, prompt)
    assert ours.num_failures == 0
    assert sum(len(tree) - num_accepted > 1 for tree, num_accepted in learned) > 10


@pytest.mark.parametrize("is_written_to", [False, True])
def test_memory_that_was_written_to_by_others_is_not_taken_for_the_drafts(
    adapter: Any,
    is_written_to: bool,  # noqa: FBT001
) -> None:
    """Of a chain whose last place holds another token by now, only accepted tokens are learned."""
    learned = noting(adapter)
    llm, prompt = Llama(), [5, 9, 13]
    truth = np.array([*prompt, *script(prompt, 100)])
    ours = adapter.attach(llm, ScriptedDrafter(script, 3, VOCABULARY), measure=False)
    for _, token in zip(range(80), llm.generate(prompt), strict=False):
        assert token in truth
        wrong = np.flatnonzero(llm.input_ids[: llm.n_tokens] != truth[: llm.n_tokens])
        last = llm.n_tokens - 1
        if is_written_to and len(wrong) and wrong[0] < last:
            llm.input_ids[last], llm.scores[last] = 1, 0.0  # no token that is ever drafted
    assert ours.num_failures == 0
    assert sum(num_accepted > 0 for _, num_accepted in learned) > 10
    num_rejected = [len(tree) - num_accepted for tree, num_accepted in learned]
    assert any(number > 1 for number in num_rejected) != is_written_to


def test_calls_are_drafted_for_as_they_state(
    adapter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm, vocabulary = Llama(), Vocabulary(VOCABULARY, "a" * 64)
    drafter = EmbeddedDrafter(vocabulary=vocabulary)
    ours = adapter.attach(
        llm, drafter, measure=False, recycle=False, vocabulary=vocabulary, tenants=["a", "b"]
    )
    assert "chains, not trees: Llama has no `_lora_adapter`" in caplog.text
    caplog.clear()
    prompt = [5, 9, 13]
    truth = script(prompt, 100)

    def within(**stated: Any) -> int:
        with ours.request(**stated) as request:
            count = accepted(llm, ours, prompt)
        ours.close()
        assert request.statistics.num_accepted == count
        return count

    cold = check_drafts(within, truth, caplog, most_tokens=16, vocabulary_size=VOCABULARY)
    for stated in ({"tenant": "c"}, {"budget": -1}, {"budgets": 1}, {"predictions": 3}):
        with pytest.raises(InvalidRequestError, match="foredraft_"), ours.request(**stated):
            pass
    assert accepted(llm, ours, prompt) == cold
    assert ours.statistics.num_accepted == ours.num_accepted


def test_tenants_share_no_recycled_logits(adapter: Any) -> None:
    llm = Llama()
    ours = adapter.attach(llm, EmbeddedDrafter(), measure=False, tenants=["*"])
    counts = []
    for tenant in ("a", "b", "a", "c", ""):
        with ours.request(tenant=tenant):
            counts.append(accepted(llm, ours, [5, 9, 13]))
    first, other, again, third, none = counts
    assert again > first == other == third == none
    assert ours.num_failures == 0


def test_a_block_begins_a_sequence_of_its_own_even_where_its_tokens_go_on(adapter: Any) -> None:
    """What is not to be remembered is not, though the next call goes on with the same tokens."""
    drafter = EmbeddedDrafter()
    llm = Llama()
    ours = adapter.attach(llm, drafter, measure=False, recycle=False)
    with ours.request(remember=False):
        first = generated(llm, [5, 9, 13], 40)
    with ours.request(remember=False):
        generated(llm, [5, 9, 13, *first], 40)
    ours.close()
    llm.reset()
    with ours.request(remember=False) as request:
        again = generated(llm, [5, 9, 13], 40)
    assert again == first
    assert "generations" not in request.statistics.accepted_by_source()


class LaterDraftModel(ABC):
    @abstractmethod
    def __call__(self, input_ids: NDArray[np.intc], n_past: int, /) -> NDArray[np.intc]: ...

    @abstractmethod
    def begin(self, prompt: list[int]) -> None: ...


class LaterLlama(Llama):
    token_bos = None  # type: ignore[assignment]  # it went

    def eval(self, tokens: list[int], *, batch: int) -> None:  # type: ignore[override]
        raise NotImplementedError(tokens, batch)


def test_a_version_that_works_otherwise_is_refused_with_what_changed(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = Llama()
    del llm.scores
    with pytest.raises(UnsupportedEngineError, match="Llama has no `scores`"):
        adapter.attach(llm, ScriptedDrafter(script))
    monkeypatch.setattr(sys.modules["llama_cpp"], "Llama", LaterLlama)
    monkeypatch.setattr(
        sys.modules["llama_cpp.llama_speculative"], "LlamaDraftModel", LaterDraftModel
    )
    forget_adapter()
    later = import_module(MODULE)
    with pytest.raises(UnsupportedEngineError) as caught:
        later.DrafterDraftModel(ScriptedDrafter(script), VOCABULARY)
    for told in (
        "LlamaDraftModel demands a method `begin`",
        "LlamaDraftModel.__call__ has a new parameter `n_past`",
        "Llama.eval needs `batch`, which the adapter does not pass",
        "Llama.token_bos is not there",
    ):
        assert told in str(caught.value)
