"""What became of drafts: counted as a slow twin counts, and at a price that no draft feels."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import DraftRequest, SequenceOptions
from retriever.kernels.entries import count_outcome
from retriever.kernels.layout import MAX_POSITIONS, Grown
from retriever.service.draft_stream import DraftStream
from retriever.service.jobs import Jobs
from retriever.sessions.draft_counts import BOUNDS_S, DraftCounts, Latencies
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.tree import DraftTree, Source
from retriever.v1 import retriever_pb2 as pb


def random_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    parents = np.array([rng.integers(-1, node) if node else -1 for node in range(num_nodes)])
    tokens = rng.integers(0, 3, num_nodes) + 3 * np.arange(num_nodes)  # no equal siblings
    tokens[rng.random(num_nodes) < 0.8] %= 3
    children = {(int(p), int(t)) for p, t in zip(parents, tokens, strict=True)}
    if len(children) < num_nodes:
        return random_tree(rng, num_nodes)
    sources = rng.integers(0, len(Source), num_nodes)
    falling = np.linspace(0.9, 0.1, num_nodes)
    return DraftTree.checked(tokens, parents, falling, sources)


def committed(counts: DraftCounts, tree: DraftTree, tokens: NDArray[np.int32]) -> None:
    """Count what came of a tree as a step does."""
    nodes = Grown(tree.token_ids, tree.parents, tree.probabilities, tree.sources)
    counted = np.zeros_like(counts.by_source)
    depth = count_outcome(nodes, len(tree), tokens, counted)
    counts.by_source += counted
    counts.by_accepted[min(depth, MAX_POSITIONS)] += 1
    counts.by_accepted[-1] += len(tokens)


def test_nodes_and_accepted_tokens_equal_the_twins() -> None:
    rng = np.random.default_rng(3)
    draft_counts, nodes, accepted = DraftCounts(), Counter[int](), Counter[int]()
    positions = Counter[int]()
    for _ in range(1000):
        tree = random_tree(rng, int(rng.integers(0, 7)))
        tokens = rng.integers(0, 3, int(rng.integers(0, 6))).astype(np.int32)
        committed(draft_counts, tree, tokens)
        nodes.update(tree.sources.tolist())
        accepted.update(tree.sources[tree.follow(tokens)].tolist())
        positions.update(range(len(tree.follow(tokens))))
    assert accepted.total() > 300
    assert draft_counts.accepted_at() == [positions[at] for at in range(MAX_POSITIONS)]
    assert positions[1] > 30
    assert draft_counts.by_source[:, : len(Source)].tolist() == [
        [each[s] for s in Source] for each in (nodes, accepted)
    ]
    assert draft_counts.num_outcomes == 1000


def test_sessions_are_counted_by_what_they_commit(index: Path) -> None:
    """Each step commits the first path of the tree before, and one token that it did not have."""
    drafter = EmbeddedDrafter.open_indexes([index])
    corpus = drafter.stats().indexes[0].segments[0].tokens[:12].astype(np.int32)
    drafter.open("s", corpus)
    length, new, expected = len(corpus), np.empty(0, np.int32), 0
    for _ in range(5):
        (tree,) = drafter.draft([DraftRequest("s", new, length, 8)])
        chain = tree.best_chain(3)
        expected += len(chain)
        new = np.append(chain.token_ids, 49).astype(np.int32)
        length += len(new)
    assert drafter.state.draft_counts.by_source[1].sum() < expected  # the last is pending
    drafter.close("s", new)
    drafter.draft_context(corpus, 4)
    draft_counts = drafter.state.draft_counts
    assert expected > 5
    assert draft_counts.by_source[1].sum() >= expected
    assert draft_counts.by_source[0].sum() == 5 * 8
    assert (draft_counts.num_outcomes, draft_counts.num_bare) == (5, 1)
    assert draft_counts.num_committed == length - len(corpus)
    assert (sum(draft_counts.steps.counts), sum(draft_counts.drafts.counts)) == (5, 6)
    drafter.shut_down()


def test_numbered_message_is_one_step_of_all_its_sequences(index: Path) -> None:
    drafter = EmbeddedDrafter.open_indexes([index])
    names = ("a", "b", "c")
    message = pb.DraftStreamRequest(
        sequence_number=1,
        openings=[pb.OpenSessionRequest(session_id=name, prompt=[1, 2, 3]) for name in names],
        steps=[pb.SessionStep(session_id=name, length=3, budget_nodes=4) for name in names],
    )

    async def answer() -> pb.DraftStreamResponse:
        jobs = Jobs(ServiceFace(drafter.state))
        with jobs.fair.slot("", is_stream=True) as slot:
            return await DraftStream(jobs, "", slot).answer(message)

    response = asyncio.run(answer())
    assert not response.statuses
    assert (
        sum(drafter.state.draft_counts.steps.counts),
        sum(drafter.state.draft_counts.drafts.counts),
    ) == (
        1,
        3,
    )
    drafter.shut_down()


def test_latencies_fall_into_the_buckets_of_their_bounds() -> None:
    latencies = Latencies()
    for seconds in (1e-6, 1e-5, 1.01e-5, 0.99, 1.0, 5.0):
        latencies.add(seconds, 2)
    assert list(BOUNDS_S) == sorted(BOUNDS_S)
    assert BOUNDS_S[0] == 1e-5
    assert latencies.counts[0] == 4
    assert latencies.counts[1] == 2
    assert latencies.counts[-2:] == [4, 2]
    assert np.isclose(latencies.total_s, 2 * sum((1e-6, 1e-5, 1.01e-5, 0.99, 1.0, 5.0)))


def test_a_census_counts_what_is_held() -> None:
    drafter = EmbeddedDrafter()
    drafter.open("a", [1, 2, 3], SequenceOptions(tenant="one"))
    drafter.open("b", [1, 2], SequenceOptions(tenant="one"))
    drafter.open("c", [1], SequenceOptions(tenant="two"))
    drafter.remember([1, 2, 3, 4], tenant="two")
    census = drafter.state.census()
    assert (census.sessions, census.session_tokens) == ({"one": 2, "two": 1}, 6)
    assert (census.tenants, census.generations_tokens) == (
        3,
        5,
    )  # and the unnamed tenant
    assert census.session_bytes > 6 * 4
    assert census.generations_bytes > 5 * 24
    drafter.close("a")
    assert drafter.state.census().sessions == {"one": 1, "two": 1}
    drafter.shut_down()


def test_counting_a_step_takes_about_a_microsecond() -> None:
    """The least of many rounds: what others do on the machine at the same time is not ours."""
    draft_counts, rounds, best = DraftCounts(), 1000, 1.0
    for _ in range(100):
        began = time.perf_counter()
        for _ in range(rounds):
            draft_counts.stepped(1, 3e-5)
        best = min(best, (time.perf_counter() - began) / rounds)
    assert best < 2e-6


def test_drafts_longer_than_what_is_counted_apart_count_at_every_position() -> None:
    draft_counts = DraftCounts()
    long = MAX_POSITIONS + 5
    chain = DraftTree.checked(
        range(long), range(-1, long - 1), np.linspace(0.9, 0.5, long), [Source.CORPUS] * long
    )
    committed(draft_counts, chain, chain.token_ids)
    committed(draft_counts, chain, chain.token_ids[:2])
    assert draft_counts.accepted_at() == [2, 2, *[1] * (MAX_POSITIONS - 2)]
