"""How much of a draft is worth verifying: the cost of a pass against what it may bring."""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.budget.asking import Asking
from decoder.budget.calibration import Calibration
from decoder.budget.costs import CostSurface, LiveCosts
from retriever.tree import DraftTree

_PACE_MEMORY: Final = 0.97


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a pass brought and took.

    Attributes:
        tree: what was verified, empty for a plain step.
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
        """Return the most nodes that could pay behind `context` tokens; 0 to ask nobody."""
        ...

    def cut(self, tree: DraftTree, context: int, draft_s: float) -> DraftTree:
        """Return the prefix of a tree, drafted in `draft_s` seconds, that is worth verifying."""
        ...

    def learn(self, outcome: Outcome) -> None:
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

    def learn(self, outcome: Outcome) -> None:
        """Take in an outcome; nothing follows from it."""

    def halve(self) -> None:
        """Verify half as many from now on."""
        self.max_nodes //= 2


class MeasuredBudget:
    """Verifies as much as brings most tokens in a given time.

    The first n nodes bring the sum of their probabilities in tokens and make the pass longer.
    They are worth it where the same time brings fewer tokens otherwise, at the pace that decoding
    has had lately, drafts included (Dinkelbach, 1967, doi:10.1287/mnsc.13.7.492: so the ratio of
    all tokens to all time is greatest, not that of each step). At worst that is the pace of plain
    decoding. Probabilities are corrected by outcomes first, costs by what passes take, and a
    drafter that takes longer than it saves is left alone.

    Args:
        surface: what passes cost.
        max_nodes: never verify more; `None` for as many as the surface is wide.
    """

    def __init__(self, surface: CostSurface, max_nodes: int | None = None) -> None:
        self.costs = LiveCosts(surface)
        widest = surface.widths[-1] - 1
        self.max_nodes = widest if max_nodes is None else min(max_nodes, widest)
        self._calibration = Calibration()
        self._asking = Asking()
        self._drafted = DraftTree.empty()
        self._draft_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def ask(self, context: int) -> int:
        """Return the most nodes that pay if all are right; 0 where the drafter does not pay."""
        extra_s = self._extra_seconds(context)
        nodes = int(np.argmax(np.arange(len(extra_s)) - self._pace(context) * extra_s))
        return nodes if nodes and self._asking.is_due() else 0

    def cut(self, tree: DraftTree, context: int, draft_s: float) -> DraftTree:
        """Return the prefix of the tree that is expected to save most time."""
        pace = self._pace(context)
        probabilities = self._calibration.corrected(tree)[: self.max_nodes]
        extra_s = self._extra_seconds(context)[: len(probabilities) + 1]
        gained = np.concatenate(([0.0], np.cumsum(probabilities))) - pace * extra_s
        nodes = int(np.argmax(gained))
        self._drafted, self._draft_s = tree, draft_s
        self._asking.learn(draft_s, float(gained[nodes]) / pace, self._plain_seconds(context))
        return tree.prefix(nodes)

    def learn(self, outcome: Outcome) -> None:
        """Take in what a pass over the last tree, or without one, brought and took."""
        tree, path, context = outcome.tree, outcome.path, outcome.context
        if len(self._drafted):
            self._calibration.learn(self._drafted, len(tree), path, outcome.next_token)
        self.costs.learn(1 + len(tree), context, outcome.seconds)
        table = self.costs.table(context)
        pass_s = float(table[min(len(tree), len(table) - 1)])
        self._tokens = _PACE_MEMORY * self._tokens + 1 + len(path)
        self._seconds = _PACE_MEMORY * self._seconds + pass_s + self._draft_s
        self._drafted, self._draft_s = DraftTree.empty(), 0.0

    def halve(self) -> None:
        """Never again verify more than half the nodes."""
        self.max_nodes //= 2

    def _plain_seconds(self, context: int) -> float:
        return float(self.costs.table(context)[0])

    def _extra_seconds(self, context: int) -> NDArray[np.float64]:
        """Return float64[1 + max_nodes], what each number of nodes adds to a pass."""
        table = self.costs.table(context)[: self.max_nodes + 1]
        extra: NDArray[np.float64] = table - table[0]
        return extra

    def _pace(self, context: int) -> float:
        """Return tokens per second lately, at least those of plain decoding."""
        plain = 1 / self._plain_seconds(context)
        return max(plain, self._tokens / self._seconds) if self._seconds else plain
