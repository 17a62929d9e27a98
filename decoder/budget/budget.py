"""How much of a draft is worth verifying: the cost of a pass against what it may bring."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.budget.calibration import DraftCalibration
from decoder.budget.costs import AdaptiveCosts, CostSurface
from decoder.budget.payoff import FadingRatio, Payoff, RecentMedian
from retriever.tree import DraftTree

# Simulated decoding is that of `tests/decoder/budget/test_budget.py`: made-up costs, and drafters
# that are always right in part, always wrong, or change sides every few to 100 steps. One number
# was changed at a time.

_PACE_DECAY: Final = 0.97
"""The recent pace is that of some 33 steps: about a paragraph. In simulated decoding 0.9 brings
1% less with a slow drafter, and 0.99 up to 8% less where the text turns every 100 steps."""

_LIKENESS: Final = 0.7
"""Weight of this step's own pace against the recent one, for their logarithms. On replayed chats it
is on par with the best ratio of each step (1.0), on edits of code it brings 2% more. Simulated
decoding prefers less where steps change every seven (0: +7%), more for slow drafters (1: +1.5%)."""

_LEAST_ASKED: Final = 16
"""Nodes that may be asked for whatever paid recently: retrieval drafts 16 in hardly more time than
one, and nodes that are not verified calibrate, too. Less would double from lower once text repeats;
more would take time for nodes that have not paid."""

_RECENT_CUTS: Final = 16
"""Steps whose largest cut bounds what is asked for: a sentence or a few lines of code. Fewer forget
within a sentence that long drafts paid, more ask for many nodes long after they did."""

_RECENT_DRAFTS: Final = 9
"""Drafts whose median time counts: a drafter that became slow shows after five of them, and up to
four pauses of the machine change nothing."""

_DRAFTER_DECAY: Final = 0.8
"""A drafter's gain is that of some five drafts: each useless one of a slow drafter costs its whole
time, so it is left alone soon. The latest counts by itself, too, so it is not left alone too soon.
In simulated decoding 0.95 loses 1% with a slow drafter and gains as much where the text turns; 0.5
loses up to 4% where steps change every seven."""

_PROBING_SHARE: Final = 0.01
"""Share of the time that trying a useless drafter may take. With 0.03 one costs 1.6% more in
simulated decoding; with 0.003 one that begins to be right is noticed late, which costs 5%."""

_LONGEST_PAUSE: Final = 512
"""Steps between two trials of the slowest drafter: it bounds how much of a text is over before one
is noticed that is right again. Drafters of up to five passes' time reach the share above first."""


@dataclass(frozen=True, slots=True, eq=False)
class PassOutcome:
    """The outcome and the time of a pass.

    Attributes:
        tree: the verified tree, empty for a plain step.
        path: int64[k], the nodes of it that were accepted.
        next_token: the target's choice after them.
        context: tokens of the sequence before the pass.
        seconds: what the pass took, the wait for its choices included.
    """

    tree: DraftTree
    path: NDArray[np.int64]
    next_token: int
    context: int
    seconds: float


class Budget(Protocol):
    """Decides whether a drafter is asked, and how many nodes of its tree are verified.

    In each step `ask` is called, then `cut` if there is a draft, then `learn`.
    """

    def ask(self, context: int) -> int:
        """Return the most nodes that could pay behind `context` tokens; 0 to ask no drafter."""
        ...

    def cut(self, tree: DraftTree, context: int, draft_s: float) -> DraftTree:
        """Return the prefix of a tree, drafted in `draft_s` seconds, that is worth verifying."""
        ...

    def learn(self, outcome: PassOutcome) -> None:
        """Take in what a pass over the last tree, or without one, brought and took."""
        ...

    def halve(self) -> None:
        """Never again verify more than half the nodes: there is no memory for them."""
        ...


@dataclass(slots=True)
class FixedBudget:
    """Verifies the first `max_nodes` nodes, whatever they cost."""

    max_nodes: int

    def ask(self, context: int) -> int:  # noqa: ARG002  the protocol's
        """Return `max_nodes`."""
        return self.max_nodes

    def cut(self, tree: DraftTree, context: int, draft_s: float) -> DraftTree:  # noqa: ARG002
        """Return the first `max_nodes` nodes."""
        return tree.prefix(self.max_nodes)

    def learn(self, outcome: PassOutcome) -> None:
        """Ignore the outcome."""

    def halve(self) -> None:
        """Verify half as many from now on."""
        self.max_nodes //= 2


class MeasuredBudget:
    """Verifies as much as brings most tokens in a given time.

    The first n nodes bring the sum of their probabilities in tokens and make the pass longer.
    They are worth it where the same time brings fewer tokens otherwise, that is at the pace to
    expect of the steps to come: most tokens for all time want that, not the best ratio of each
    step (Dinkelbach, 1967, doi:10.1287/mnsc.13.7.492). Steps come in runs of similar ones, so that
    pace lies between this step's own and the recent one. At worst it is that of plain decoding.
    Probabilities are corrected by outcomes first, costs by what passes take, and a drafter that
    takes longer than it saves is left alone.

    Args:
        surface: what passes cost.
        max_nodes: never verify more; `None` for as many as the surface is wide.
    """

    def __init__(self, surface: CostSurface, max_nodes: int | None = None) -> None:
        self.costs = AdaptiveCosts(surface)
        widest = surface.widths[-1] - 1
        self.max_nodes = widest if max_nodes is None else min(max_nodes, widest)
        self._calibration = DraftCalibration()
        self._drafter = Payoff(_DRAFTER_DECAY, latest_counts=True)
        self._drafts_s = RecentMedian(_RECENT_DRAFTS)
        self._chosen: deque[int] = deque(maxlen=_RECENT_CUTS)
        self._draft_s = 0.0
        self._late = FadingRatio(_PACE_DECAY)  # tokens to seconds

    def ask(self, context: int) -> int:
        """Return the most nodes that pay if all are right; 0 where the drafter does not pay.

        Drafting takes longer the more nodes are asked for, so at most twice as many are as paid
        recently: a draft that pays to its end doubles the next one.
        """
        table = self._table(context)
        certain = np.arange(1, len(table) + 1)
        nodes = int(np.argmax(certain - table / table[0]))
        if self._chosen:
            nodes = min(nodes, max(2 * max(self._chosen), _LEAST_ASKED))
        return nodes if nodes and self._is_drafter_due(float(table[0])) else 0

    def cut(self, tree: DraftTree, context: int, draft_s: float) -> DraftTree:
        """Return the prefix of the tree that is expected to save most time."""
        probabilities = self._calibration.corrected(tree)[: self.max_nodes]
        table = self._table(context)[: len(probabilities) + 1]
        expected = np.cumsum(np.concatenate(([1.0], probabilities)))
        pace = self._pace(float((expected / table).max()), float(table[0]))
        gained = expected - pace * table
        nodes = int(np.argmax(gained))
        self._chosen.append(nodes)
        self._draft_s = draft_s
        self._drafts_s.add(draft_s)
        self._drafter.learn(float(gained[nodes] - gained[0]) / pace)
        return tree.prefix(nodes)

    def learn(self, outcome: PassOutcome) -> None:
        """Take in what a pass over the last tree, or without one, brought and took."""
        tree, path, context = outcome.tree, outcome.path, outcome.context
        began_rightly = self._calibration.learn(len(tree), path, outcome.next_token)
        if began_rightly and len(tree) == 0:
            self._drafter.encourage()
        self.costs.learn(1 + len(tree), context, outcome.seconds)
        table = self._table(context)
        pass_s = float(table[min(len(tree), len(table) - 1)])
        self._late.add(1 + len(path), pass_s + self._draft_s)
        self._draft_s = 0.0

    def halve(self) -> None:
        """Never again verify more than half the nodes."""
        self.max_nodes //= 2

    def _is_drafter_due(self, plain_s: float) -> bool:
        """Return whether recent drafts saved more time than they took, or one is to be tried."""
        draft_s = self._drafts_s.value() or 0.0
        longest = min(int(draft_s / (_PROBING_SHARE * plain_s)), _LONGEST_PAUSE)
        return self._drafter.is_due(1.0, draft_s, longest)

    def _table(self, context: int) -> NDArray[np.float64]:
        """Return float64[1 + max_nodes], seconds of a pass with each number of nodes."""
        return self.costs.table(context)[: self.max_nodes + 1]

    def _pace(self, own: float, plain_s: float) -> float:
        """Return tokens per second to expect of the next steps, given what this one may have."""
        late = self._late.value(default=own)
        return max(math.pow(own, _LIKENESS) * math.pow(late, 1 - _LIKENESS), 1 / plain_s)
