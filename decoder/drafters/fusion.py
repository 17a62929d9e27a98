"""Fuses drafts of several drafters and models and the target's earlier logits into one tree.

Trees are merged by longest common prefix, as in RASD (arXiv:2503.03434): a path that two trees
share becomes one path, and the rest of each tree continues from it. At every node, each source that
knows the node gives probabilities for its children. A logistic model combines these into one
probability for each child, and learns from every committed token. Nodes that several sources
propose gain probability; nodes that a confident source lacks lose it. The merged tree is cut to the
budget.

Drafting models extend the merged tree while it grows: they give probabilities for its nodes and
propose further nodes below them. RASD prunes the first retrieved tokens with a draft model; in this
module each drafting model is one more source, at every depth.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.asking import AskedDraft, StepCosts
from decoder.drafters.following import (
    NO_TABLE,
    Likely,
    NoDrafter,
    SequenceDrafter,
    Verified,
    following,
)
from decoder.drafters.kernels.forest import NOWHERE, Forest, plant
from decoder.drafters.kernels.fused_growth import Growth, grow
from decoder.drafters.kernels.fused_learning import learn
from decoder.drafters.kernels.readings import MAX_READ
from decoder.drafters.kernels.recycled import NUM_ORDERS, WAYS
from decoder.drafters.kernels.siblings import Hints, Siblings
from decoder.drafters.options import MAX_NODES
from decoder.drafters.readers import Readers, ReadTree, TreeReader
from decoder.drafters.recycling import NO_HINTS, RecycledLogits
from decoder.drafters.source_weights import SourceWeights
from retriever.drafter import (
    DEFAULT,
    NUM_FOUND,
    Drafter,
    DraftRequest,
    OfOneProcess,
    Prediction,
    SequenceOptions,
    TokenIds,
)
from retriever.follower import FIRST_PATIENCE_S, DraftLimits, Followers
from retriever.kernels.compiling import RareKernels
from retriever.sequences import (
    OpenSessions,
    TokenSequence,
    check_named_once,
    check_step,
    checked_options,
)
from retriever.tree import ROOT, DraftTree, Source

RATE: Final = 0.2
"""Learning rate of AdaGrad, before division by the root of the sum of squared gradients."""

_CONSIDERED: Final = 1.5
"""Nodes that a drafting model may read, as a multiple of the budget: its logits change which nodes
are within the budget."""

WIDTH: Final = 8
"""Most nodes in a drafting model's pass; such a pass costs little more than a pass with one."""

_FIRST_WIDTH: Final = 64
"""Most nodes in a model's first pass over the tree, if it reads paths: usually the whole tree."""

MAX_PASSES: Final = 5
"""Most passes of a drafting model for one draft, in addition to the pass that reads the
sequence."""


_LEAST_PROBABILITY: Final = 1e-4
"""Least probability of a node in the tree. 256 less probable nodes together yield at most 0.026
tokens, but each candidate has to be scored."""


KERNELS: Final = RareKernels(__name__)
"""Kernels of fused drafts; callers that must not wait for a compiler check whether these are
ready."""


@cache
def warm() -> None:
    """Compile or load the kernels that fuse drafts with recycled logits, once per process."""
    size = 2 * NUM_FOUND
    drafter = FusedDrafter([NoDrafter()], DraftLimits(size, size), recycled=RecycledLogits(WAYS))
    sequence = drafter.follow(TokenSequence(np.zeros(NUM_ORDERS, np.int32)))
    for _ in range(2):
        tree = sequence.draft(1)
        logits = np.zeros((1 + len(tree), size), np.float32)
        sequence.learn(Verified(0, tree, logits, np.empty(0, np.int64), 0))
        sequence.sequence.extend([0])
    sequence.close()


@dataclass(slots=True, eq=False)
class FusedSequence:
    """The fused drafter of one sequence; the decoding loop uses it like a `Follower`.

    Its members draft for the sequence to which the loop appends. `FusedDrafter.follow` creates it.

    Attributes:
        drafter: the drafter that fuses the trees and learns.
        members: the sequence's drafter from each fused drafter.
        read: the drafting models' logits for the sequence's tree.
        sequence: the sequence of committed tokens, which its owner extends.
        trees: the members' trees for the last draft, one for each member.
        asked: the drafting models' work on the last draft.
        hints: the target's other likely tokens at the position of the last token.
    """

    drafter: "FusedDrafter"
    members: list[SequenceDrafter]
    read: ReadTree
    sequence: TokenSequence
    trees: list[DraftTree] = field(default_factory=list)
    asked: list[AskedDraft] = field(default_factory=list)
    hints: Hints = NO_HINTS
    _num_paced: int | None = None
    _drafted_length: int = -1

    @property
    def num_failures(self) -> int:
        """Number of members' failed or refused drafts, plus the failed drafting models."""
        return sum(member.num_failures for member in self.members) + self.read.num_failures

    @property
    def has_drafted(self) -> bool:
        """Whether `trees` are drafts for the sequence at its current length."""
        return self._drafted_length == len(self.sequence)

    def context(self) -> TokenIds:
        """Return int32[NUM_ORDERS], the last tokens, the latest first; -1 for missing tokens."""
        context = np.full(NUM_ORDERS, -1, np.int32)
        last = self.sequence.tokens[-NUM_ORDERS:]
        context[: len(last)] = last[::-1]
        return context

    def draft(self, budget_nodes: int, min_probability: float = 0.0) -> DraftTree:
        """Fuse the members' trees; let drafting models extend the result if that pays off."""
        return self.drafter.draft_together([(self, budget_nodes)], min_probability)[0]

    def take_trees(self, trees: list[DraftTree]) -> None:
        """Store the members' trees for the sequence at its current length."""
        self.trees = trees
        self._drafted_length = len(self.sequence)

    def num_new(self) -> int:
        """Return the number of new tokens since the last call; 0 in the first call."""
        before, self._num_paced = self._num_paced, len(self.sequence)
        return 0 if before is None else self._num_paced - before

    def learn(self, verified: Verified) -> None:
        """Learn from a pass which tokens the target finds likely, and each source's weights."""
        for member in self.members:
            member.learn(verified)
        self.read.learn(verified)
        self.hints = self.drafter.take_in(self, verified)

    def close(self) -> None:
        """End the sessions of all members."""
        with ExitStack() as members:
            members.callback(self.read.close)
            for member in reversed(self.members):
                members.callback(member.close)


class FusedDrafter(OfOneProcess):
    """Merges the trees of other drafters into one tree; a `Drafter` that learns from passes.

    A decoding loop calls `follow` with its sequence and needs no session names. For other callers
    this is an ordinary drafter. If a drafter or drafting model fails, only its nodes are missing.
    Not thread-safe.

    Args:
        drafters: drafters that answer in microseconds, such as retrieval.
        limits: vocabulary sizes of the target and the drafters.
        readers: drafting models, the fastest first. Each is called if the tokens that it recently
            added to the tree saved more time than it took.
        recycled: likely tokens from earlier passes of the target; `None` for none.
        costs: seconds of the target's and the drafting models' passes; measured if not given.
        patience_s: see `Followers`.

    Attributes:
        followers: followers of each drafter, in order. They count requests answered in time, drafts
            requested in advance, and failures.

    Raises:
        VocabularyMismatchError: a drafting model proposes tokens that the target lacks.
    """

    _asks_all = True
    """Whether all drafting models that may pay off extend the tree, or only the first."""

    def __init__(  # noqa: PLR0913  (the last four are options)
        self,
        drafters: Sequence[Drafter],
        limits: DraftLimits,
        *,
        readers: Sequence[TreeReader] = (),
        recycled: RecycledLogits | None = None,
        costs: StepCosts | None = None,
        patience_s: float = FIRST_PATIENCE_S,
    ) -> None:
        self._limits = limits
        self.followers = tuple(
            Followers(drafter, limits, patience_s=patience_s) for drafter in drafters
        )
        self._drafters = [following(each) for each in self.followers]
        self._readers = Readers(readers, costs, limits.model_vocabulary)
        self._recycled = recycled
        self._table = NO_TABLE if recycled is None else recycled.table
        self._sessions: OpenSessions[str, FusedSequence] = OpenSessions()
        self._weights = SourceWeights(len(drafters), self._readers.kinds)
        self._forest = Forest.of(len(drafters), MAX_NODES)
        self._siblings = Siblings.of(len(drafters), len(readers))
        self._growth = Growth.of(len(drafters), MAX_NODES, len(readers))
        self._growth.places[0] = np.arange(len(drafters) + len(readers))
        self._num_trees = len(drafters)
        self._planted: Sequence[DraftTree] = ()
        self._asked_at: float | None = None

    @property
    def states(self) -> frozenset[int]:
        """Numbers of the target's hidden states that the drafter needs; see `FollowingDrafter`."""
        return self._readers.states

    def follow(self, sequence: TokenSequence, limits: DraftLimits | None = None) -> FusedSequence:
        """Return the drafter of one sequence; see `FollowingDrafter.follow`.

        Raises:
            InvalidRequestError: the sequence is of another tenant than earlier sequences, whose
                tokens recycled logits would leak.
        """
        if self._recycled is not None:
            self._recycled.serve(sequence.options.tenant)
        with ExitStack() as opened:
            members = []
            for drafter in self._drafters:
                members.append(drafter.follow(sequence, self._limits.within(limits)))
                opened.callback(members[-1].close)
            read = ReadTree(self._readers, sequence)
            opened.pop_all()
        return FusedSequence(self, members, read, sequence)

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        """Begin a sequence; see `Drafter.open`."""
        self._sessions.check_free(session)
        sequence = TokenSequence(prompt, options=checked_options(options))
        self._sessions.add(session, self.follow(sequence))

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add texts that an output may contain; see `EmbeddedDrafter.add_predictions`."""
        self._sessions.get(session).sequence.expect(predictions)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Request trees from all drafters and fuse them; see `Drafter.draft`."""
        check_named_once(requests)
        fused = [self._sessions.get(request.session) for request in requests]
        for request, each in zip(requests, fused, strict=True):
            check_step(request, len(each.sequence), len(request.new_tokens))
        for request, each in zip(requests, fused, strict=True):
            each.sequence.extend(request.new_tokens)
        return [
            each.draft(request.budget_nodes, request.min_probability)
            for request, each in zip(requests, fused, strict=True)
        ]

    def draft_together(
        self, asked: Sequence[tuple[FusedSequence, int]], min_probability: float = 0.0
    ) -> list[DraftTree]:
        """Call each drafter once for all sequences, and fuse each sequence's trees.

        Args:
            asked: distinct sequences, each with the most nodes of its tree.
            min_probability: least probability of the nodes in a tree.
        """
        self._note_pace([sequence for sequence, _ in asked])
        limits = [min(nodes, MAX_NODES) for _, nodes in asked]
        drafted = [
            drafter.draft_together(
                [(each.members[at], most) for (each, _), most in zip(asked, limits, strict=True)]
            )
            for at, drafter in enumerate(self._drafters)
        ]
        for number, (sequence, _) in enumerate(asked):
            sequence.take_trees([trees[number] for trees in drafted])
        return [
            self.fuse(sequence, most, min_probability)
            for (sequence, _), most in zip(asked, limits, strict=True)
        ]

    def ask_ahead(self, asked: Sequence[Likely], busy_s: float) -> None:
        """Let each drafter draft for likely outcomes; see `Followers.ask_ahead`.

        The drafters return their trees in advance. The trees are fused when the outcome is known,
        because recycled logits and drafting models need the target's pass. Recycled logits also
        help to guess the likely outcomes.
        """
        if self._recycled is not None:
            asked = [
                (each, nodes, replace(pending, table=self._table)) for each, nodes, pending in asked
            ]
        for at, drafter in enumerate(self._drafters):
            of_members = [
                (sequence.members[at], min(nodes, MAX_NODES), pending)
                for sequence, nodes, pending in asked
            ]
            drafter.ask_ahead(of_members, busy_s)

    def learn(self, session: str, verified: Verified) -> None:
        """Learn each source's weights from a pass over the session's last draft."""
        self._sessions.get(session).learn(verified)

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        fused = self._sessions.remove(session)
        if new_tokens is not None:
            fused.sequence.extend(new_tokens)
        fused.close()

    def _note_pace(self, sequences: Sequence[FusedSequence]) -> None:
        """Record the time and the number of new tokens since the last drafts."""
        now, num_tokens = time.perf_counter(), sum(each.num_new() for each in sequences)
        if self._asked_at is not None and num_tokens:
            self._readers.pace.note(now - self._asked_at, num_tokens)
        self._asked_at = now

    def fuse(self, sequence: FusedSequence, budget_nodes: int, min_probability: float) -> DraftTree:
        """Fuse members' trees, recycled logits and drafting models' logits into a tree."""
        self._plant(sequence.trees)
        floor = max(min_probability, _LEAST_PROBABILITY)
        self._growth.contexts[0] = sequence.context()
        sequence.read.drop()
        sequence.asked.clear()
        tree = self._tree(self._grow(sequence, budget_nodes, floor))
        for number in sequence.read.present():
            asked = AskedDraft(number, tree, sequence.read.num_behind(number))
            if self._readers.rules[number].asks(tree) and sequence.read.begin(number):
                tree = self._read(sequence, asked, budget_nodes, floor)
                sequence.asked.append(asked)
                if not self._asks_all:
                    break
        return tree

    def take_in(self, sequence: FusedSequence, verified: Verified) -> Hints:
        """Learn from a pass; return the likely tokens that the target did not choose."""
        came = np.append(verified.tree.token_ids[verified.path], verified.next_token)
        came = came.astype(np.int32)
        if sequence.has_drafted:
            self._learn_gains(sequence, verified, came)
            self._learn_weights(sequence, came)
        if self._recycled is None:
            return NO_HINTS
        keep = sequence.sequence.options.remember
        return self._recycled.learn(verified, sequence.context(), keep=keep)

    def _read(
        self, sequence: FusedSequence, asked: AskedDraft, budget_nodes: int, floor: float
    ) -> DraftTree:
        """Let a drafting model extend the tree, pass by pass, as long as that pays off."""
        number, rule = asked.number, self._readers.rules[asked.number]
        considered = min(int(_CONSIDERED * budget_nodes), MAX_NODES)
        size = self._grow(sequence, considered, floor)
        asked.first = self._tree(min(size, budget_nodes))
        asked.note_pass()
        while asked.num_passes <= MAX_PASSES:
            nodes = self._unread(sequence.read, asked, size)
            reach = self._reach(nodes, size, budget_nodes)
            if reach == 0.0 or not rule.is_worthwhile(reach):
                break
            goes_on = self._read_nodes(sequence.read, number, nodes)
            size = self._grow(sequence, considered, floor)
            rule.record_pass(asked.note_pass(reach))
            if not goes_on:
                break
        return self._tree(min(size, budget_nodes))

    def _unread(self, read: ReadTree, asked: AskedDraft, size: int) -> NDArray[np.intp]:
        """Return the most probable nodes that a drafting model can read in its next pass."""
        reader, rows = self._readers.all[asked.number], self._rows(asked.number)
        can_be_read = self._known_paths(size) & (rows[1 : size + 1] == NOWHERE)
        if not reader.reads_paths:
            can_be_read &= rows[self._growth.parents[:size] + 1] != NOWHERE
        if reader.max_depth is not None:
            can_be_read &= self._tree(size).depths() <= reader.max_depth
        is_first = asked.num_passes == 1
        width = _FIRST_WIDTH if is_first and reader.reads_paths else WIDTH
        return np.flatnonzero(can_be_read)[: min(width, MAX_READ + 1 - read.num_rows[asked.number])]

    def _known_paths(self, size: int) -> NDArray[np.bool_]:
        """Return bool[size], whether the drafters know all tokens on the path to each node."""
        if self._limits.drafter_vocabulary is None:
            return np.ones(size, np.bool_)
        known = self._growth.tokens[:size] < self._limits.drafter_vocabulary
        for node in range(size) if not known.all() else ():
            parent = self._growth.parents[node]
            known[node] &= parent == ROOT or known[parent]
        return known

    def _rows(self, number: int) -> NDArray[np.int32]:
        """Return int32[1 + B], a view of a model's row for the root and for each node."""
        return self._growth.places[:, self._num_trees + number]

    def _reach(self, nodes: NDArray[np.intp], size: int, budget_nodes: int) -> float:
        """Return the expected number of the given nodes that the target reaches.

        A node outside the budget does not count: its children could not enter the tree either.
        """
        probabilities = self._growth.probabilities
        least = probabilities[budget_nodes - 1] if 0 < budget_nodes <= size else 0.0
        reached = probabilities[nodes]
        return float(reached[reached > least].sum())

    def _read_nodes(self, read: ReadTree, number: int, nodes: NDArray[np.intp]) -> bool:
        """Let a drafting model read nodes of the last grown tree; return whether it succeeded."""
        growth, rows, first = self._growth, self._rows(number), int(read.num_rows[number])
        rows[nodes + 1] = np.arange(first, first + len(nodes))
        parents = rows[growth.parents[nodes] + 1]
        return read.read(number, growth.tokens[nodes], parents)

    def _grow(self, sequence: FusedSequence, max_nodes: int, floor: float) -> int:
        """Grow the tree from all sources and return its number of nodes."""
        growth = self._growth
        if self._readers.all:
            growth.places[0, self._num_trees :] = sequence.read.root_rows()
        return grow(
            growth,
            self._siblings,
            self._forest,
            self._table,
            self._weights.values,
            sequence.hints,
            sequence.read.readings,
            max_nodes,
            floor,
            int(Source.MODEL),
        )

    def _tree(self, size: int) -> DraftTree:
        growth = self._growth
        return DraftTree(
            growth.tokens[:size].copy(),
            growth.parents[:size].copy(),
            growth.probabilities[:size].copy(),
            growth.sources[:size].copy(),
        )

    def _plant(self, trees: Sequence[DraftTree]) -> None:
        """Enter trees into the forest, unless it already holds them."""
        if trees is self._planted:
            return
        self._planted, start = trees, len(trees)
        for number, tree in enumerate(trees):
            start = plant(
                self._forest,
                number,
                start,
                tree.token_ids,
                tree.parents,
                tree.probabilities,
                tree.sources,
            )

    def _learn_gains(self, sequence: FusedSequence, verified: Verified, came: TokenIds) -> None:
        """Learn how many accepted tokens each drafting model added."""
        gained, size = len(verified.path), len(verified.tree)
        for asked in reversed(sequence.asked):
            before = len(asked.tree.prefix(size).follow(came))
            first = None if asked.first is None else len(asked.first.prefix(size).follow(came))
            self._readers.rules[asked.number].learn(asked, before, first, gained)
            gained = before

    def _learn_weights(self, sequence: FusedSequence, came: TokenIds) -> None:
        """Learn the sources' weights from the tokens that followed a draft."""
        self._plant(sequence.trees)
        places = np.zeros((2, self._growth.places.shape[1]), np.int32)
        places[0, : self._num_trees] = np.arange(self._num_trees)
        places[0, self._num_trees :] = sequence.read.root_rows()
        learn(
            self._siblings,
            self._forest,
            self._table,
            self._weights.values,
            self._weights.curvature,
            places,
            sequence.context(),
            sequence.hints,
            sequence.read.readings,
            came,
            RATE,
        )
