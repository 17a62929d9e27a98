"""Retrieval on top of a trained drafter that an engine runs itself: EAGLE, MTP, a draft model.

The engine's drafter answers for a whole step at once, from inside the engine. What it proposes is
one more tree, so the fusion of our own decoder merges it with the retrieved one: by longest prefix,
at each node by a probability that both give together, with weights learned from what is accepted.
The same tokens that it is worth are compared with its time: where retrieval is sure of a whole
batch, the engine's drafter is not run in a step.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike

from decoder.budget.payoff import FadingLine, FadingRatio
from decoder.drafters.asking import GainEstimate, Pace, sureness_of
from decoder.drafters.following import NoDrafter, Verified
from decoder.drafters.fusion import MAX_NODES, FusedDrafter, FusedSequence
from retriever.drafter import TokenIds
from retriever.follower import DraftLimits
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, DraftTree, Source

_RATE_DECAY: Final = 0.995
"""Rates of acceptance are those of some two hundred drafts, as gains are in `asking.py`."""

_FIRST_RATE: Final = 0.7
"""Share of first tokens that a trained drafter is taken to have right before any outcome: published
heads lie between 0.5 and 0.9."""

_KNOWN_DRAFTS: Final = 4.0
"""Drafts for which a position's rate leans on that of the position before."""

_CHAIN_NODES: Final = 4
"""Nodes of a merged tree for each token of the chain that is taken from it: a chain is a path of
the tree, and the best one may leave its first child."""

_ADDED_DECAY: Final = 0.998
"""What retrieval adds to a trained drafter's tree is that of some five hundred drafts: most add
nothing and lose nothing."""

_SURE_GAIN: Final = 0.4
"""Tokens that retrieval is thought to add where it is sure, as `asking.py` guesses of a reader;
where it knows nothing, none."""

_SKIP_SHARE: Final = 0.5
"""A drafter is not run where what it adds is worth less than half of its time. The gain of single
steps says too little: where retrieval alone is wrong, the next steps are at hard places, too. In
replays of agents with a chain of a drafter that is right half of the time, 1 skipped 53 to 94% of
the steps and 0.5 skips 20%, which brings 2.65 tokens per step instead of 2.05 to 2.42."""

_NO_LOGITS: Final = torch.empty(0)


class PositionRates:
    """How often a drafter is right at each position of its draft, if it was before.

    Some engines keep no probabilities of the drafter's own: a chain's are then what its positions
    have lately been worth.
    """

    def __init__(self) -> None:
        self._rates: list[FadingRatio] = []

    def shares(self, length: int) -> list[float]:
        """Return a probability for each position, given those before, from the first on."""
        self._extend(length)
        shares, before = [], _FIRST_RATE
        for rate in self._rates[:length]:
            known = rate.denominator + _KNOWN_DRAFTS
            before = (rate.numerator + _KNOWN_DRAFTS * before) / known
            shares.append(before)
        return shares

    def learn(self, num_right: int, length: int) -> None:
        """Take in a draft.

        Args:
            num_right: first tokens of it that came true.
            length: its tokens whose outcome is known.
        """
        self._extend(length)
        for position in range(min(num_right + 1, length)):
            self._rates[position].add(float(position < num_right))

    def _extend(self, length: int) -> None:
        self._rates += [FadingRatio(_RATE_DECAY) for _ in range(length - len(self._rates))]


def trained_tree(tokens: ArrayLike, parents: ArrayLike, probabilities: ArrayLike) -> DraftTree:
    """Return what an engine's drafter proposes as a tree, its nodes by falling probability.

    A child is no more probable than its parent is. Of siblings with the same token the first
    stays, with all that is below it.

    Args:
        tokens: integers[n].
        parents: integers[n], of a node an earlier one or `ROOT`.
        probabilities: float[n], that the node and all above it come true, as the drafter states it.
    """
    ids, above = np.asarray(tokens, np.int32), np.asarray(parents, np.int32)
    stated = np.nan_to_num(np.asarray(probabilities, np.float32), nan=0.0).clip(0.0, 1.0)
    kept = np.ones(len(ids), np.bool_)
    seen: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(ids.tolist(), above.tolist(), strict=True)):
        if parent != ROOT:
            stated[node] = min(stated[node], stated[parent])
        is_new = (parent, token) not in seen
        kept[node] = is_new and (parent == ROOT or bool(kept[parent]))
        seen.add((parent, token))
    order = np.argsort(-stated, kind="stable")
    places = np.empty(len(ids) + 1, np.int32)
    places[order], places[ROOT] = np.arange(len(ids)), ROOT
    sources = np.full(len(ids), Source.MODEL, np.uint8)
    tree = DraftTree(ids[order], places[above[order]], stated[order], sources)
    return tree if kept.all() else tree.among(kept[order])


class MergedSequence:
    """One sequence of an engine, drafted for by both; made by `TrainedDrafts.follow`.

    Args:
        fused: fuses its two trees, and follows its tokens.

    Attributes:
        fused: as given.
        retrieved: what is verified where the engine's drafter is not run.
        trained: what the engine's drafter has; `None` where that was not run.
        merged: the tree of both.
        verified: the tree that the engine verifies: that, or the drafter's own.
    """

    def __init__(self, fused: FusedSequence) -> None:
        self.fused = fused
        self.retrieved = self.merged = self.verified = DraftTree.empty()
        self.trained: DraftTree | None = None

    @property
    def sequence(self) -> TokenSequence:
        """Its committed tokens; extended by `TrainedDrafts.commit`."""
        return self.fused.sequence


class TrainedDrafts:
    """Merges the drafts of an engine's trained drafter with retrieved ones, for steps of a batch.

    In a step, `commit` is called for each sequence with what came, then `asks` with all retrieved
    trees; `merge` for each sequence, and `note_asked` if the drafter was run. One object learns for
    all sequences of an engine: how to weigh both, and what either adds. Not safe for use from
    several threads.

    Attributes:
        num_asked: steps in which the drafter was run.
        num_skipped: steps in which it was not.
    """

    def __init__(self) -> None:
        # Both trees are handed over: the fused drafter has nothing to ask.
        self._fusion = FusedDrafter([NoDrafter(), NoDrafter()], DraftLimits())
        self._rates = PositionRates()
        self._gain = GainEstimate()  # of the engine's drafter, to what retrieval has
        self._added = FadingLine(_ADDED_DECAY, _KNOWN_DRAFTS, at_0=0.0, at_1=_SURE_GAIN)
        self._pace = Pace()
        self.num_asked = self.num_skipped = 0

    def follow(self, sequence: TokenSequence) -> MergedSequence:
        """Return a sequence to draft for; `commit` extends it."""
        return MergedSequence(self._fusion.follow(sequence))

    def asks(self, retrieved: Sequence[DraftTree]) -> bool:
        """Return whether to run the engine's drafter in this step.

        It is run where the tokens that it is expected to add for all sequences save more time than
        it takes; each 32nd time it is run in any case, as that may have changed.

        Args:
            retrieved: a tree for each sequence of the step.
        """
        token_s = self._pace.token_s() / _SKIP_SHARE
        asks = self._gain.pays_together(list(map(sureness_of, retrieved)), token_s)
        self.num_asked += asks
        self.num_skipped += not asks
        return asks

    def note_asked(self, seconds: float) -> None:
        """Take in how long the engine's drafter took for a step."""
        self._gain.learn_seconds(seconds)

    def note_step(self, seconds: float, num_tokens: int) -> None:
        """Take in a whole step: its time, and the tokens that all its sequences gained."""
        self._pace.note(seconds, num_tokens)

    def chain(self, tokens: ArrayLike) -> DraftTree:
        """Return a chain without stated probabilities as a tree, by how its positions did lately.

        Args:
            tokens: integers[n].
        """
        ids = np.asarray(tokens, np.int32)
        stated = np.cumprod(self._rates.shares(len(ids)))
        return trained_tree(ids, np.arange(-1, len(ids) - 1), stated)

    def merge(
        self,
        followed: MergedSequence,
        retrieved: DraftTree,
        trained: DraftTree | None,
        max_nodes: int,
        *,
        is_chain: bool = False,
    ) -> DraftTree:
        """Return one tree of both, the most probable nodes of all.

        Where retrieval is as unsure as it was when it lately cost tokens, it is the drafter's own
        tree: nodes that retrieval takes are nodes that the drafter lacks.

        Args:
            followed: the sequence that they are for.
            retrieved: tree of our drafter, empty where it has none.
            trained: tree of the engine's; `None` where that was not run.
            max_nodes: of the merged tree.
            is_chain: whether the engine verifies chains only.
        """
        fused, trees = followed.fused, [retrieved, trained or DraftTree.empty()]
        fused.take_trees([tree.prefix(MAX_NODES) for tree in trees])
        most = min(_CHAIN_NODES * max_nodes if is_chain else max_nodes, MAX_NODES)
        merged = self._fusion.fuse(fused, most, 0.0)
        followed.retrieved = _cut(retrieved, max_nodes, is_chain=is_chain)
        followed.trained = trained
        followed.merged = followed.verified = _cut(merged, max_nodes, is_chain=is_chain)
        if trained is not None and self._added.at(sureness_of(retrieved)) < 0:
            followed.verified = _cut(trained, max_nodes, is_chain=is_chain)
        return followed.verified

    def commit(self, followed: MergedSequence, came: TokenIds, max_nodes: int) -> None:
        """Append what came of a step, and learn from it.

        Args:
            followed: the sequence.
            came: int32[n], the tokens after those before; n is 0 if there was no step.
            max_nodes: of the step's tree.
        """
        if len(came) and followed.fused.has_drafted:
            self._learn(followed, came, max_nodes)
        followed.sequence.extend(came)

    def _learn(self, followed: MergedSequence, came: TokenIds, max_nodes: int) -> None:
        path = followed.verified.follow(came[:-1])
        if followed.trained is not None:
            self._learn_gains(followed, followed.trained, came, max_nodes)
        verified = Verified(
            int(followed.sequence.tokens[-1]),
            followed.verified,
            _NO_LOGITS,
            path,
            int(came[len(path)]),
        )
        followed.fused.learn(verified)

    def _learn_gains(
        self, followed: MergedSequence, trained: DraftTree, came: TokenIds, max_nodes: int
    ) -> None:
        """Learn what either has added to the other, from what is known to come."""
        sureness = sureness_of(followed.retrieved)
        right = len(trained.prefix(max_nodes).follow(came))
        retrieved = len(followed.retrieved.follow(came))
        merged = len(followed.merged.follow(came))
        self._gain.learn_gain(sureness, max(merged, right) - retrieved)
        self._rates.learn(right, min(int(trained.depths().max(initial=0)), len(came)))
        self._added.fade()
        self._added.add(sureness, merged - right)


def _cut(tree: DraftTree, max_nodes: int, *, is_chain: bool) -> DraftTree:
    """Return what an engine verifies of a tree."""
    return tree.best_chain(max_nodes) if is_chain else tree.prefix(max_nodes)
