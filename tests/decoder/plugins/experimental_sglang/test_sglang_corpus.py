import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest

from decoder.engines.engine_sequences import EngineSequences
from decoder.plugins.experimental_sglang.corpus import DrafterCorpus, Nodes
from retriever.client.local import LocalDrafter
from retriever.drafter import DEFAULT, DraftRequest, SequenceOptions
from retriever.errors import DrafterUnavailableError
from retriever.tree import DraftTree, Source
from tests.decoder.plugins.experimental_sglang.sglang_decoding import Request, plain, step

WIDTH = 6
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


class Watched(LocalDrafter):
    """Notes what it is told, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[str, list[int]] = {}
        self.calls: list[list[tuple[str, list[int]]]] = []
        self.closed: dict[str, list[int]] = {}
        self.fails: Callable[[], list[DraftTree]] | None = None

    def open(self, session: str, prompt: Any, options: SequenceOptions = DEFAULT) -> None:
        super().open(session, prompt, options)
        self.opened[session] = prompt.tolist()

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.calls.append([(each.session, each.new_tokens.tolist()) for each in requests])
        if self.fails is not None:
            return self.fails()
        return super().draft(requests)

    def close(self, session: str, new_tokens: Any = None) -> None:
        super().close(session, new_tokens)
        self.closed[session] = [] if new_tokens is None else new_tokens.tolist()


def corpus_of(drafter: Watched, **options: Any) -> DrafterCorpus:
    return DrafterCorpus(EngineSequences(drafter), WIDTH, **options)


def test_output_is_the_targets_own_and_comes_in_fewer_steps() -> None:
    corpus = corpus_of(Watched())
    requests = [Request.of(str(seed), [seed, *PROMPT, *range(seed)]) for seed in range(5)]
    num_steps = 0
    while min(len(request.output_ids) for request in requests) < 200:
        step(corpus, requests, WIDTH)
        num_steps += 1
    for request in requests:
        wanted = plain(request.origin_input_ids_unpadded, len(request.output_ids))
        assert list(request.output_ids) == wanted
    assert sum(len(request.output_ids) for request in requests) > 2 * 5 * num_steps


def test_a_session_is_told_the_prompt_then_what_is_new_and_at_its_end_the_rest() -> None:
    drafter = Watched()
    corpus = corpus_of(drafter)
    long = Request.of("long", [5] * 40)  # longer than the tokens that a step shows
    step(corpus, [long], WIDTH)
    step(corpus, [long, Request.of("short", [9, 8])], WIDTH)
    corpus.erase_match_state(["long", "unknown"])
    first, second = drafter.opened
    assert drafter.opened == {first: [5] * 40, second: [9, 8]}
    assert [len(call) for call in drafter.calls] == [1, 2]  # one call a step
    told = [tokens for call in drafter.calls for session, tokens in call if session == first]
    assert [*chain(*told), *drafter.closed[first]] == list(long.output_ids)
    assert len(corpus) == 1


def test_overlapped_scheduling_shows_tokens_before_the_request_has_them() -> None:
    drafter = Watched()
    corpus = corpus_of(drafter)
    request = Request.of("a", PROMPT)
    ahead = [*request.tokens, 7, 8, 9]
    corpus.show([request])
    corpus.batch_get(["a"], [ahead[-4:]], [len(ahead)])
    assert drafter.calls[0][0][1] == ahead[len(PROMPT) :]


def test_another_request_of_the_same_name_is_another_session() -> None:
    drafter = Watched()
    corpus = corpus_of(drafter)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        step(corpus, [Request.of("same", prompt)], WIDTH)
    assert list(drafter.opened.values()) == [[1, 2, 3], [4, 5, 6]]
    assert len(drafter.closed) == 1
    assert len(corpus) == 1


@pytest.mark.parametrize(
    ("tail", "length"), [([1, 2, 9], 3), ([3], 1), ([7, 7], 40)], ids=["other", "shorter", "gap"]
)
def test_a_request_that_does_not_go_on_as_it_was_begins_anew(tail: list[int], length: int) -> None:
    drafter = Watched()
    corpus = corpus_of(drafter)
    for tokens, total in (([1, 2, 3], 3), (tail, length)):
        corpus.batch_get(["a"], [tokens], [total])
    assert list(drafter.opened.values()) == [[1, 2, 3], tail]
    assert len(corpus) == 1


def test_without_show_the_last_tokens_are_all_that_is_known() -> None:
    drafter = Watched()
    corpus = corpus_of(drafter)
    corpus.batch_get(["a"], [[1, 2, 3]], [100])
    corpus.batch_get(["a"], [[2, 3, 4, 5]], [102])
    assert [call[0][1] for call in drafter.calls] == [[], [4, 5]]


def unavailable() -> list[DraftTree]:
    raise DrafterUnavailableError("gone")


def broken() -> list[DraftTree]:
    raise ZeroDivisionError


def foreign() -> list[DraftTree]:
    return [DraftTree.checked([999], [-1], [1.0], [Source.CORPUS])]


def too_few() -> list[DraftTree]:
    return []


@pytest.mark.parametrize("fails", [unavailable, broken, foreign, too_few])
def test_a_drafter_that_fails_leaves_the_root_alone_in_rows_of_full_width(
    fails: Callable[[], list[DraftTree]], caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Watched()
    corpus = corpus_of(drafter, vocabulary_size=50)
    request = Request.of("a", PROMPT)
    drafter.fails = fails
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            before = len(request.output_ids)
            step(corpus, [request], WIDTH)
            assert len(request.output_ids) == before + 1
    assert len(caplog.records) == 1
    drafter.fails = None
    corpus.erase_match_state(["a"])
    assert len(corpus) == 0


def test_drafts_come_back_after_an_error() -> None:
    drafter = Watched()
    corpus = corpus_of(drafter)
    request = Request.of("a", PROMPT)
    drafter.fails = broken
    step(corpus, [request], WIDTH)
    drafter.fails = None
    while len(request.output_ids) < 100:
        step(corpus, [request], WIDTH)
    assert len(drafter.calls) < 80
    assert list(request.output_ids) == plain(PROMPT, len(request.output_ids))


def test_sessions_end_with_their_requests_and_with_a_reset() -> None:
    drafter = Watched()
    corpus = corpus_of(drafter)
    requests = [Request.of(str(number), [number, 1, 2]) for number in range(8)]
    for number in range(8):  # each leaves after a step of its own
        step(corpus, requests[number:], WIDTH)
        corpus.erase_match_state([str(number)])
    assert len(corpus) == 0
    step(corpus, requests[:3], WIDTH)
    corpus.reset()
    assert len(corpus) == 0
    assert set(drafter.closed) == set(drafter.opened)


def test_ranks_verify_what_the_first_has_drafted() -> None:
    sent: list[Nodes] = []

    def receive(nodes: Nodes) -> None:
        nodes[:] = sent[-1]

    first = corpus_of(Watched(), share=lambda nodes: sent.append(nodes.copy()))
    second = DrafterCorpus(None, WIDTH, share=receive)
    request = Request.of("a", PROMPT)
    for corpus in (first, second):
        corpus.show([request])
    asked = (["a"], [request.tokens[-8:]], [len(request.tokens)])
    drafted, received = first.batch_get(*asked), second.batch_get(*asked)
    assert drafted[0].tolist() == received[0].tolist()
    assert drafted[1].tolist() == received[1].tolist()
    assert len(set(drafted[0].tolist())) > 1
    second.erase_match_state(["a"])
    second.reset()


@pytest.mark.parametrize(("width", "num_rows"), [(1, 1), (400, 1), (20, 30)])
def test_no_more_nodes_are_asked_for_than_drafters_take(width: int, num_rows: int) -> None:
    asked: list[int] = []

    class Counted(Watched):
        def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
            asked.extend(request.budget_nodes for request in requests)
            return super().draft(requests)

    corpus = DrafterCorpus(EngineSequences(Counted()), width, max_step_nodes=300)
    names = [str(row) for row in range(num_rows)]
    tokens, masks = corpus.batch_get(names, [[1, 2, 1]] * num_rows, [3] * num_rows)
    assert (tokens.size, masks.size) == (num_rows * width, num_rows * width * width)
    assert max(asked) <= min(256, width - 1)
    assert sum(asked) <= 300


def test_a_batch_of_nobody_is_empty() -> None:
    tokens, masks = corpus_of(Watched()).batch_get([], [], [])
    assert (len(tokens), len(masks)) == (0, 0)


def test_corpora_of_the_engines_kind_are_refused() -> None:
    corpus = corpus_of(Watched())
    assert corpus.list_external_corpora() == {}
    with pytest.raises(ValueError, match="foredraft's own indexes"):
        corpus.load_external_corpus_named("a", [])
    with pytest.raises(ValueError, match="foredraft's own indexes"):
        corpus.commit_external_corpus_load("a", 0)
    with pytest.raises(ValueError, match="no corpus 'a'"):
        corpus.remove_external_corpus("a")


def test_memory_of_a_request_is_let_go() -> None:
    corpus = corpus_of(Watched())
    for number in range(300):
        request = Request.of(str(number), np.arange(1, 200).tolist())
        step(corpus, [request], WIDTH)
        corpus.erase_match_state([request.rid])
    assert len(corpus) == 0
