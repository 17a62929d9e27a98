"""Retrieved trees merged with those of a trained drafter of known quality."""

import numpy as np
import pytest

from benchmarks.engines.merged_replay import Replay, Tally
from benchmarks.engines.scripted_head import ScriptedHead, Shape
from decoder.drafters.fusion import FusedDrafter, FusedSequence
from decoder.speculators.trained_drafts import PositionRates, TrainedDrafts, trained_tree
from retriever.replay.traces import Trace
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, DraftTree, Source

TREE, CHAIN = Shape(16, 4, 4), Shape(6, 5, 1)


def traces(copied: float, count: int = 6, length: int = 300) -> list[Trace]:
    """Outputs that copy pieces of their prompts for a share of the time, and are new else."""
    random = np.random.default_rng(5)
    made = []
    for _ in range(count):
        prompt = random.integers(0, 4000, 400).astype(np.int32)
        pieces: list[np.ndarray] = []
        while sum(map(len, pieces)) < length:
            size, start = int(random.integers(8, 40)), int(random.integers(0, 350))
            is_copy = random.random() < copied
            pieces.append(
                prompt[start : start + size] if is_copy else random.integers(0, 4000, size)
            )
        made.append(Trace(prompt, np.concatenate(pieces)[:length].astype(np.int32)))
    return made


def replayed(way: str, shape: Shape, head: ScriptedHead, copied: float, batch: int = 2) -> Tally:
    return Replay(way, head, shape, [], batch).run(traces(copied))


def per_step(tally: Tally) -> float:
    return tally.tokens / tally.rows


@pytest.mark.parametrize("copied", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("shape", "top1", "is_overconfident"),
    [
        (TREE, 0.5, False),
        (TREE, 0.7, True),
        (TREE, 0.9, False),
        (TREE, 0.9, True),
        (CHAIN, 0.5, False),
        (CHAIN, 0.9, False),
    ],
)
def test_merged_drafts_bring_what_the_better_part_brings_and_more(
    shape: Shape, top1: float, copied: float, *, is_overconfident: bool
) -> None:
    head = ScriptedHead(top1, is_overconfident, num_tokens=4000)
    ways = {
        way: per_step(replayed(way, shape, head, copied))
        for way in ("drafter", "retrieval", "merged")
    }
    better = max(ways["drafter"], ways["retrieval"])
    assert ways["merged"] >= 0.97 * better  # what it costs to learn, in 1,800 tokens
    if copied == 0.5:
        assert ways["merged"] > better


def test_the_drafter_is_skipped_where_the_text_is_copied_and_nowhere_else() -> None:
    head = ScriptedHead(0.7, num_tokens=4000)
    copied, new = (replayed("skipping", TREE, head, share) for share in (1.0, 0.0))
    assert copied.skipped > 0.2 * copied.steps
    assert new.skipped < 0.05 * new.steps
    without = replayed("merged", TREE, head, 0.0)
    assert per_step(new) > 0.98 * per_step(without)


def test_every_merged_tree_is_valid_and_of_its_size() -> None:
    random = np.random.default_rng(4)
    drafts = TrainedDrafts()
    followed = drafts.follow(TokenSequence(np.arange(4, dtype=np.int32)))
    for _ in range(200):
        trees = [random_proposal(random) for _ in range(2)]
        merged = drafts.merge(followed, trees[0], trees[1], 9)
        DraftTree.checked(merged.token_ids, merged.parents, merged.probabilities, merged.sources)
        assert len(merged) <= 9
        chain = drafts.merge(followed, trees[0], trees[1], 5, is_chain=True)
        assert chain.parents.tolist() == list(range(-1, len(chain) - 1))
        drafts.commit(followed, random.integers(0, 5, 3).astype(np.int32), 9)


def random_proposal(random: np.random.Generator) -> DraftTree:
    size = int(random.integers(0, 12))
    parents = [int(random.integers(-1, node)) if node else ROOT for node in range(size)]
    return trained_tree(random.integers(0, 5, size), parents, random.random(size))


def test_proposals_in_any_order_become_trees() -> None:
    random = np.random.default_rng(1)
    for _ in range(300):
        tree = random_proposal(random)
        DraftTree.checked(tree.token_ids, tree.parents, tree.probabilities, tree.sources)
        assert set(tree.sources.tolist()) <= {int(Source.MODEL)}


def test_of_siblings_with_one_token_the_first_stays() -> None:
    tree = trained_tree([7, 7, 8, 9], [ROOT, ROOT, 0, 1], [0.9, 0.8, 0.7, 0.6])
    assert tree.token_ids.tolist() == [7, 8]
    assert tree.parents.tolist() == [ROOT, 0]


def test_probabilities_that_are_none_count_as_none() -> None:
    tree = trained_tree([3, 4], [ROOT, 0], [float("nan"), 2.0])
    assert tree.probabilities.tolist() == [0.0, 0.0]


def test_a_chain_is_as_probable_as_its_positions_were_right() -> None:
    rates = PositionRates()
    random = np.random.default_rng(0)
    for _ in range(2000):
        right = int(np.argmin(np.append(random.random(4) < [0.9, 0.6, 0.3, 0.3], False)))
        rates.learn(right, 4)
    assert rates.shares(4) == pytest.approx([0.9, 0.6, 0.3, 0.3], abs=0.12)


def test_the_merge_is_that_of_our_own_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fused drafter merges and learns in both; an engine hands its trees over."""
    called: list[str] = []
    for name in ("fuse", "take_in"):
        original = getattr(FusedDrafter, name)

        def noting(
            self: FusedDrafter, *given: object, n: str = name, o: object = original
        ) -> object:
            called.append(n)
            return o(self, *given)  # type: ignore[operator]

        monkeypatch.setattr(FusedDrafter, name, noting)
    drafts = TrainedDrafts()
    followed = drafts.follow(TokenSequence(np.arange(4, dtype=np.int32)))
    assert isinstance(followed.fused, FusedSequence)
    trees = [
        trained_tree([1, 2], [ROOT, 0], [0.9, 0.8]),
        trained_tree([1, 3], [ROOT, 0], [0.7, 0.6]),
    ]
    merged = drafts.merge(followed, trees[0], trees[1], 8)
    assert sorted(merged.token_ids.tolist()) == [1, 2, 3]  # by longest prefix
    drafts.commit(followed, np.array([1, 3, 9], np.int32), 8)
    assert called == ["fuse", "take_in"]
