"""A service drafts what the embedded drafter drafts, whichever client asks, with every option."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexer.reader import Index
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import (
    DEFAULT,
    AheadDrafter,
    DraftRequest,
    Prediction,
    SequenceOptions,
    TokenIds,
)
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree, Source
from tests.retriever.client.kinds_of_clients import CLIENTS, LONG_S, Awaited, ready
from tests.retriever.security.in_process import serving

NAMES = ("a", "b", "c")
NUM_ROUNDS, NUM_STEPS = 3, 15


def padded(name: str, address: str) -> Any:
    """A client that hides sizes; the sharded one cannot."""
    kinds: dict[str, Callable[..., Any]] = {"resilient": ResilientDrafter, "async": Awaited}
    return kinds[name](address, deadline_s=LONG_S, local=False, pad_requests=True)


def assert_same(one: DraftTree, other: DraftTree) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.parents.tolist() == other.parents.tolist()
    assert one.probabilities.tolist() == other.probabilities.tolist()
    assert one.sources.tolist() == other.sources.tolist()


class Both:
    """A client of a service, and an embedded drafter that is told the same."""

    def __init__(self, client: Any, path: Path) -> None:
        self.client, self.local = client, EmbeddedDrafter.open_indexes([path])
        tokens = self.local.stats().indexes[0].segments[0].tokens
        self.corpus: TokenIds = tokens[tokens < 50].astype(np.int32)
        self.lengths: dict[str, int] = {}
        self.sources: set[int] = set()
        self.num_nodes = 0

    def open(self, name: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        for each in (self.client, self.local):
            each.open(name, prompt, options)
        self.lengths[name] = len(prompt)

    def call(self, method: str, *arguments: Any) -> None:
        for each in (self.client, self.local):
            getattr(each, method)(*arguments)

    def draft(self, new: dict[str, TokenIds]) -> None:
        requests = []
        for name, tokens in new.items():
            self.lengths[name] += len(tokens)
            requests.append(DraftRequest(name, tokens, self.lengths[name], 16, 0.001))
        pairs = zip(self.client.draft(requests), self.local.draft(requests), strict=True)
        for one, other in pairs:
            assert_same(one, other)
            self.num_nodes += len(one)
            self.sources.update(one.sources.tolist())

    def ahead(self, new: dict[str, TokenIds], outcomes: Sequence[TokenIds]) -> None:
        """Ask for the drafts after some outcomes, of the first sequence alone."""
        requests = []
        for number, (name, tokens) in enumerate(new.items()):
            self.lengths[name] += len(tokens)
            asked = tuple(outcomes) if number == 0 else ()
            requests.append(DraftRequest(name, tokens, self.lengths[name], 8, outcomes=asked))
        found = self.client.draft_ahead(requests, LONG_S)
        assert [len(each) for each in found] == [len(outcomes), *(0 for _ in requests[1:])]
        for trees, expected in zip(found, self.local.draft_ahead(requests), strict=True):
            for one, other in zip(trees, expected, strict=True):
                assert_same(one, other)
                self.num_nodes += len(one)

    def pieces(self, rng: np.random.Generator, most: int = 9) -> dict[str, TokenIds]:
        """New tokens for each sequence."""
        return {
            name: self.corpus[int(rng.integers(0, 300)) :][: int(rng.integers(0, most))]
            for name in self.lengths
        }


def step(both: Both, rng: np.random.Generator, opening: Callable[[int], SequenceOptions]) -> None:
    """Open three sessions, step them at once, close them; again and again."""
    for _ in range(NUM_ROUNDS):
        for number, name in enumerate(NAMES):
            begin = int(rng.integers(0, 300))
            both.open(name, both.corpus[begin : begin + 20], opening(number))
        for _ in range(NUM_STEPS):
            both.draft(both.pieces(rng))
        for name in NAMES:
            both.call("close", name, both.corpus[:7])
        both.lengths.clear()
    assert both.num_nodes > 15 * NUM_ROUNDS * NUM_STEPS


def plainly(both: Both, rng: np.random.Generator) -> None:
    step(both, rng, lambda _: DEFAULT)
    assert {Source.CORPUS, Source.CONTEXT} <= both.sources


def in_groups(both: Both, rng: np.random.Generator) -> None:
    def opening(number: int) -> SequenceOptions:
        return SequenceOptions(group="g" if number else "", policy_version=number)

    step(both, rng, opening)
    assert Source.SIBLINGS in both.sources


def with_predictions(both: Both, rng: np.random.Generator) -> None:
    """Given at the opening, added later, and the same ones again."""
    file, later = rng.permutation(50).astype(np.int32), rng.permutation(50).astype(np.int32)
    both.open("a", both.corpus[:9], SequenceOptions(predictions=(Prediction(file, "file"),)))
    both.draft({"a": file[:3]})
    assert Source.PREDICTIONS in both.sources
    both.call("add_predictions", "a", [Prediction(later, "later")])
    both.call("add_predictions", "a", [Prediction(file), Prediction(later)])
    for new in (file[3:6], later[:2], later[2:9], both.corpus[:4]):
        both.draft({"a": new})


def ahead(both: Both, rng: np.random.Generator) -> None:
    client: object = both.client
    assert isinstance(client, AheadDrafter)
    for name in NAMES:
        both.open(name, both.corpus[int(rng.integers(0, 300)) :][:20])
    for _ in range(NUM_STEPS):
        most = int(rng.integers(1, 5))
        outcomes = [both.corpus[int(rng.integers(300)) :][: number + 1] for number in range(most)]
        both.ahead(both.pieces(rng), outcomes)
        both.draft(both.pieces(rng))


OPTIONS = [plainly, in_groups, with_predictions, ahead]


@pytest.mark.parametrize(
    ("name", "option"),  # a client of several shards asks for what has come alone
    [pair for pair in product(CLIENTS, OPTIONS) if pair != ("sharded", ahead)],
)
def test_a_service_drafts_what_the_embedded_drafter_drafts(
    name: str, option: Callable[[Both, np.random.Generator], None], index: Path
) -> None:
    service = EmbeddedDrafter.open_indexes([index])
    with serving(service) as address, ready(CLIENTS[name](address)) as client:
        both = Both(client, index)
        option(both, np.random.default_rng(17))
    for each in (service, both.local):
        each.shut_down()


@pytest.mark.parametrize("name", ["resilient", "async"])
@pytest.mark.parametrize("option", OPTIONS)
def test_so_it_does_where_sizes_are_hidden(
    name: str, option: Callable[[Both, np.random.Generator], None], index: Path
) -> None:
    service = EmbeddedDrafter.open_indexes([index])
    with serving(service, pad_replies=True) as address, ready(padded(name, address)) as client:
        both = Both(client, index)
        option(both, np.random.default_rng(18))
    for each in (service, both.local):
        each.shut_down()


def test_bare_contexts_are_drafted_for_as_embedded(index: Path, tmp_path: Path) -> None:
    """Over a unix socket, with a service that has not generated anything."""
    service = EmbeddedDrafter.open_indexes([index])
    with Index.open(index) as opened:
        context = opened.segments[0].tokens[:9].astype(np.int32)
        with serving(service, f"unix:{tmp_path}/s") as address, RemoteDrafter(address) as remote:
            tree = remote.draft_context(context, 20)
    assert len(tree) > 0
    assert_same(tree, EmbeddedDrafter.open_indexes([index]).draft_context(context, 20))
    service.shut_down()
