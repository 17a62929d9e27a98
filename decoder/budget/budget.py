"""Decides how many draft nodes to verify, from the cost of a pass and its expected gain."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from decoder.budget.calibration import CorrectedDraft, DraftCalibration
from decoder.budget.costs import AdaptiveCosts, CostSurface, StepOverhead
from decoder.budget.payoff import FadingRatio, Payoff, RecentMedian
from retriever.tree import DraftTree

# "Simulated decoding" is the simulation in `tests/decoder/budget/test_budget.py`. Its costs are
# synthetic. Its drafters are partly right all the time, always wrong, or switch between the two
# every few to 100 steps. One constant was changed at a time.

_PACE_DECAY: Final = 0.97
"""Decay of the recent pace: it averages over about 33 steps, roughly a paragraph. In simulated
decoding 0.9 is 1% slower with a slow drafter, and 0.99 is up to 8% slower if the text changes every
100 steps."""

_LIKENESS: Final = 0.7
"""Weight of this step's own pace against the recent pace, in a mean of logarithms. A weight of 1.0
would maximize the ratio of each step. Compared with 1.0, a weight of 0.7 is as fast on replayed
chats and 2% faster on edits of code. In simulated decoding, 0 is 7% faster if drafters switch every
seven steps, and 1 is 1.5% faster with slow drafters."""

_LEAST_ASKED: Final = 16
"""Nodes that may always be requested, even if fewer paid off recently: retrieval drafts 16 nodes in
hardly more time than one, and calibration also learns from unverified nodes. With fewer, doubling
would start lower once text repeats; with more, drafting would take longer for nodes that have not
paid off."""

_RECENT_CUTS: Final = 16
"""Number of recent steps whose largest verified tree bounds the requested nodes: a sentence or a
few lines of code. With fewer, the budget forgets within a sentence that long drafts paid off; with
more, it requests many nodes long after they stopped paying off."""

_RECENT_DRAFTS: Final = 9
"""Number of drafts that the median drafting time covers: a slower drafter shows after five drafts,
and up to four machine pauses do not change the median."""

_DRAFTER_DECAY: Final = 0.8
"""Decay of a drafter's gain: it averages over about five drafts. Each useless draft of a slow
drafter costs its full time, so the drafter is paused soon. The latest draft also counts by itself,
so that the drafter is not paused too soon. In simulated decoding 0.95 loses 1% with a slow drafter
and gains 1% if the text changes; 0.5 loses up to 4% if drafters switch every seven steps."""

_PROBING_SHARE: Final = 0.01
"""Share of decoding time that trials of a useless drafter may take. In simulated decoding a useless
drafter costs 1.6% more with 0.03. With 0.003 the budget notices late that a drafter is right again,
which costs 5%."""

_LONGEST_PAUSE: Final = 512
"""Most steps between two trials of a drafter, so that a drafter that is right again is noticed in
time. For drafters that take up to five passes' time, `_PROBING_SHARE` gives a shorter pause."""

_FIRST_PLAIN: Final = 4
"""Steps with drafts between the first three plain steps, which show how much time drafts add to a
step (see `StepOverhead`). After that, each interval is twice the previous interval."""

_MOST_DRAFTED: Final = 512
"""Most steps with drafts between two plain steps."""

_SURELY_FASTER: Final = 2.0
"""Speedup above which no plain step is inserted: the unmeasured overhead of drafts has never halved
the pace."""


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a pass apart from draft nodes.

    Attributes:
        contexts: number of tokens of each running sequence, at least one sequence.
        num_read: number of prompt tokens that the pass reads for other sequences.
        most_rows: most tokens of a pass to which the measured costs apply, because wider passes run
            in a slower way. `None` for no limit.
    """

    contexts: Sequence[int]
    num_read: int = 0
    most_rows: int | None = None

    @classmethod
    def of(cls, context: int) -> Self:
        """Return the load of a pass over one sequence with `context` tokens."""
        return cls((context,))

    @property
    def context(self) -> int:
        """Mean tokens per sequence: the cost of attention is proportional to rows times tokens."""
        return sum(self.contexts) // len(self.contexts)

    @property
    def width(self) -> int:
        """Number of rows in the pass without drafts."""
        return len(self.contexts) + self.num_read

    def fitting(self, num_nodes: int) -> int:
        """Return how many of `num_nodes` nodes, over all trees, the pass has room for."""
        if self.most_rows is None:
            return num_nodes
        return min(num_nodes, max(self.most_rows - self.width, 0))


@dataclass(frozen=True, slots=True, eq=False)
class PassOutcome:
    """The result of a pass for one sequence.

    Attributes:
        tree: the verified tree; empty for a plain step.
        path: int64[k], the accepted nodes of the tree.
        next_token: the target's token after the accepted nodes.
    """

    tree: DraftTree
    path: NDArray[np.int64]
    next_token: int


class Budget(Protocol):
    """Decides whether to draft, and how many nodes of the draft trees to verify.

    Each step calls `ask`, then `share` if there are drafts, then `learn`.
    """

    def ask(self, load: Load) -> int:
        """Return the most nodes per sequence that could pay off; 0 to skip drafting."""
        ...

    def share(self, trees: Sequence[DraftTree], load: Load, draft_s: float) -> list[DraftTree]:
        """Return, for each tree, the prefix of nodes to verify.

        Args:
            trees: the draft tree of each sequence in the load.
            load: the load of the pass.
            draft_s: seconds that drafting all trees took.
        """
        ...

    def learn(
        self,
        outcomes: Sequence[PassOutcome | None],
        load: Load,
        seconds: float,
        other_s: float = 0.0,
    ) -> None:
        """Learn the result and duration of a pass over the last trees, or without trees.

        Args:
            outcomes: the outcome for each sequence of the last load; `None` if the sequence ended
                before the pass.
            load: the load of the pass.
            seconds: duration of the pass, including the wait for its chosen tokens.
            other_s: seconds of the step besides the pass and drafting, such as learning.
        """
        ...

    def halve(self) -> None:
        """Halve the largest number of nodes for good, because memory ran out."""
        ...


@dataclass(slots=True)
class FixedBudget:
    """Verifies the first `max_nodes` nodes of each sequence, regardless of cost."""

    max_nodes: int

    def ask(self, load: Load) -> int:  # noqa: ARG002  the protocol's
        """Return `max_nodes`."""
        return self.max_nodes

    def share(self, trees: Sequence[DraftTree], load: Load, draft_s: float) -> list[DraftTree]:  # noqa: ARG002
        """Return the first `max_nodes` nodes of each tree."""
        return [tree.prefix(self.max_nodes) for tree in trees]

    def learn(
        self,
        outcomes: Sequence[PassOutcome | None],
        load: Load,
        seconds: float,
        other_s: float = 0.0,
    ) -> None:
        """Ignore the outcomes."""

    def halve(self) -> None:
        """Halve `max_nodes`."""
        self.max_nodes //= 2


class MeasuredBudget:
    """Verifies as many nodes as maximize tokens per second.

    The expected number of accepted tokens is the sum of the nodes' probabilities; each node also
    makes the pass longer. Nodes pay off if the next steps, at their expected pace, would yield
    fewer tokens in the extra time. This maximizes tokens over all time; maximizing the ratio of
    each step does not (Dinkelbach, 1967, doi:10.1287/mnsc.13.7.492). Similar steps come in runs, so
    the expected pace lies between this step's own pace and the recent pace. It is at least the pace
    of plain decoding. Probabilities are calibrated by outcomes, and costs by the durations of
    passes and whole steps. A drafter that takes longer than it saves is paused.

    If a pass holds several sequences, the nodes of all their trees compete. The most probable nodes
    come first, whatever their sequence, and each node makes the shared pass longer.

    Args:
        surface: measured costs of passes, or costs that are learned while passes run.
        max_nodes: most nodes of a tree to verify; `None` for the surface's largest width.
    """

    def __init__(self, surface: CostSurface | AdaptiveCosts, max_nodes: int | None = None) -> None:
        self.costs = AdaptiveCosts(surface) if isinstance(surface, CostSurface) else surface
        widest = self.costs.surface.widths[-1] - 1
        self.max_nodes = widest if max_nodes is None else min(max_nodes, widest)
        self._calibration = DraftCalibration()
        self._drafts: Sequence[CorrectedDraft] = ()
        self._drafter = Payoff(_DRAFTER_DECAY, latest_counts=True)
        self._drafts_s = RecentMedian(_RECENT_DRAFTS)
        self._overhead = StepOverhead()
        self._num_drafted, self._until_plain = 0, _FIRST_PLAIN
        self._chosen: deque[int] = deque(maxlen=_RECENT_CUTS)
        self._draft_s = 0.0
        self._late = FadingRatio(_PACE_DECAY)  # recent speedup over plain passes

    def ask(self, load: Load) -> int:
        """Return the most nodes per sequence that pay off if all are right; see `Budget.ask`.

        Drafting time grows with the requested nodes. So at most twice as many are requested as paid
        off recently: each draft that is verified to its end doubles the next request.
        """
        table = self._table(load, load.fitting(self.max_nodes))
        plain_s = self._plain_s(load)
        certain = np.arange(len(table))
        nodes = int(np.argmax(certain - (len(load.contexts) / plain_s) * table))
        if self._chosen:
            nodes = min(nodes, max(2 * max(self._chosen), _LEAST_ASKED))
        is_asked = nodes and self._goes_drafted() and self._is_drafter_due(plain_s)
        return nodes if is_asked else 0

    def share(self, trees: Sequence[DraftTree], load: Load, draft_s: float) -> list[DraftTree]:
        """Return the trees' prefixes that together are expected to save the most time."""
        drafts = self._drafts = [self._calibration.corrected(tree) for tree in trees]
        probabilities, owners = _most_probable(drafts, self.max_nodes)
        probabilities = probabilities[: load.fitting(len(probabilities))]
        num_plain, plain_s = len(trees), self._plain_s(load)
        table = self._table(load, len(probabilities))
        expected = np.cumsum(np.concatenate(([num_plain], probabilities)))
        with_prompts_s = float(table[0]) - plain_s
        own = float((expected / (table - with_prompts_s)).max())
        pace = self._pace(own, num_plain / plain_s)
        gained = expected - pace * table
        nodes = int(np.argmax(gained))
        counts = np.bincount(owners[:nodes], minlength=num_plain).tolist()
        self._chosen.append(max(counts))
        self._draft_s = draft_s
        self._drafts_s.add(draft_s)
        self._drafter.learn(float(gained[nodes] - gained[0]) / pace)
        return [tree.prefix(count) for tree, count in zip(trees, counts, strict=True)]

    def learn(
        self,
        outcomes: Sequence[PassOutcome | None],
        load: Load,
        seconds: float,
        other_s: float = 0.0,
    ) -> None:
        """Learn the result and duration of a pass over the last trees, or without trees."""
        drafts, self._drafts = self._drafts, ()
        for draft, outcome in zip(drafts, outcomes, strict=bool(drafts)):
            if outcome is None:
                continue
            tree, path = outcome.tree, outcome.path
            began_rightly = self._calibration.learn(draft, len(tree), path, outcome.next_token)
            if began_rightly and len(tree) == 0:
                self._drafter.encourage()
        passed = [outcome for outcome in outcomes if outcome is not None]
        if not passed:
            self._draft_s = 0.0
            return
        num_nodes = sum(len(outcome.tree) for outcome in passed)
        if seconds > 0 and load.num_read == 0:
            self._learn_step(num_nodes, load, seconds + other_s)
        self.costs.learn(load.width + num_nodes, load.context, seconds)
        plain_s, table = self._plain_s(load), self._table(load, num_nodes)
        longer_s = float(table[num_nodes] - table[0])
        tokens = sum(1 + len(outcome.path) for outcome in passed)
        self._late.add(tokens / len(passed), (plain_s + longer_s + self._draft_s) / plain_s)
        self._draft_s = 0.0

    def halve(self) -> None:
        """Halve `max_nodes` for good."""
        self.max_nodes //= 2

    def _learn_step(self, num_nodes: int, load: Load, step_s: float) -> None:
        """Learn the duration of a step that read no prompts."""
        width = load.width + num_nodes
        pass_s = float(self.costs.table_to(width, load.context)[width - 1])
        self._overhead.learn(num_nodes, pass_s, step_s, self.costs.load)
        if num_nodes:
            self._num_drafted += 1
            return
        if self._overhead.is_known and self._num_drafted >= self._until_plain:
            self._until_plain = min(2 * self._until_plain, _MOST_DRAFTED)
        self._num_drafted = 0

    def _goes_drafted(self) -> bool:
        """Return whether to draft; false if a plain step is due, which shows what drafts gain."""
        if self._num_drafted < self._until_plain:
            return True
        return self._late.value() >= _SURELY_FASTER

    def _is_drafter_due(self, plain_s: float) -> bool:
        """Return whether recent drafts saved more time than they took, or a trial is due."""
        draft_s = self._drafts_s.value() or 0.0
        longest = min(int(draft_s / (_PROBING_SHARE * plain_s)), _LONGEST_PAUSE)
        return self._drafter.is_due(1.0, draft_s, longest)

    def _table(self, load: Load, num_nodes: int) -> NDArray[np.float64]:
        """Return float64[1 + n], the seconds of steps with 0 to n = `num_nodes` nodes."""
        passes = self.costs.table_to(load.width + num_nodes, load.context)[load.width - 1 :]
        if not self._overhead.is_known:
            return passes
        node_s = self._overhead.node_s * self.costs.load
        return self._overhead.plain * passes + node_s * np.arange(len(passes))

    def _plain_s(self, load: Load) -> float:
        """Return the seconds of a step that reads one token of each sequence, and no prompt."""
        num_plain = len(load.contexts)
        passes = self.costs.table_to(num_plain, load.context)
        return self._overhead.plain * float(passes[num_plain - 1])

    def _pace(self, own: float, plain: float) -> float:
        """Return the expected tokens per second of the next steps.

        Args:
            own: highest tokens per second that this step can have.
            plain: tokens per second of plain decoding.
        """
        late = self._late.value(default=own / plain) * plain
        return max(math.pow(own, _LIKENESS) * math.pow(late, 1 - _LIKENESS), plain)


def _most_probable(
    drafts: Sequence[CorrectedDraft], most: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the probabilities of all drafts' nodes, descending, and each node's draft.

    The nodes of each draft keep their order; at most `most` nodes of each are used.
    """
    if len(drafts) == 1:
        probabilities = drafts[0].probabilities[:most]
        return probabilities, np.zeros(len(probabilities), np.int64)
    cut = [draft.probabilities[:most] for draft in drafts]
    joined = np.concatenate(cut)
    order = np.argsort(-joined, kind="stable")
    owners = np.repeat(np.arange(len(cut)), [len(each) for each in cut])
    return joined[order], owners[order]
