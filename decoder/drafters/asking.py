"""When a model is asked to read a draft, and for how many passes."""

import time
from typing import Final

from decoder.budget.payoff import FadingRatio, Payoff, RecentMedian
from decoder.drafters.model_trees import StepCosts
from retriever.tree import DraftTree

_NUM_BINS: Final = 8
"""Levels of sureness of the tree. Fewer are learned sooner, more tell apart what pays; 4 and 16
obtain 3% more and 1% less of what could be gained in simulation, where gains fall evenly, but more
where they turn."""

_DECAY: Final = 0.95
"""Gains are those of some twenty drafts of a level. In simulation 0.98 obtains 3% more of what
could be gained while gains stay as they are, and 6% less where they turn every 1,500 steps; 0.9
loses 3% and gains 1%."""

_TRIALS: Final = 6
"""Drafts of a level before it is judged: accepted tokens vary as much as their mean, so six give it
to within 40%. 2 and 20 obtain the same to 1% while gains stay as they are."""

_PAUSE: Final = 31
"""Steps of a level between two trials once it does not pay: every 32nd takes 3% of the reader's
time. In simulation 127 obtains 2% less of what could be gained, and 17% less where gains turn."""

_RECENT: Final = 15
"""Passes whose median time counts: those of a few drafts; seven pauses of the machine change
nothing."""


class GainEstimate:
    """Learns what asking adds to the tree that there is already, by how sure that tree is.

    A reader is asked where the tokens that it has lately added there, at the pace of decoding, save
    more time than it takes. RASD (arXiv:2503.03434) sets such a threshold by hand. Each kind of
    tree is tried a few times first, and again now and then.
    """

    def __init__(self) -> None:
        self._by_sureness = [
            Payoff(_DECAY, trials=_TRIALS, first_pause=_PAUSE) for _ in range(_NUM_BINS)
        ]
        self._seconds = FadingRatio(_DECAY)

    @property
    def seconds(self) -> float:
        """Mean seconds that a recent draft of the reader took."""
        return self._seconds.value()

    def pays(self, sureness: float, token_s: float) -> bool:
        """Return whether to ask the reader now.

        Args:
            sureness: probability of the tree's first node, 0 where it is empty.
            token_s: seconds that a token takes at the present pace.
        """
        return self._at(sureness).is_due(token_s, self.seconds, _PAUSE)

    def learn(self, sureness: float, gain: float, seconds: float) -> None:
        """Take in a draft that the reader was asked for.

        Args:
            sureness: of the tree before it was asked.
            gain: tokens that were accepted beyond those of that tree alone.
            seconds: that asking took.
        """
        self._at(sureness).learn(gain)
        self._seconds.add(seconds)

    def _at(self, sureness: float) -> Payoff:
        return self._by_sureness[min(int(sureness * _NUM_BINS), _NUM_BINS - 1)]


class AskingRule:
    """Decides whether a reader is asked for a draft, and whether it takes another pass for it.

    A pass pays where the tokens that it is expected to bring are worth its time at the pace of
    decoding, as for draft models alone (`StoppingRule`, after SpecDec++, arXiv:2405.19715). It is
    expected to bring what readings have lately brought, times how probable it is that the target
    comes to one of the nodes that it reads.

    Args:
        costs: what passes cost, `target_s` for each token; measured if not given. Where passes are
            given as free, the reader is always asked and reads as far as it can.
    """

    def __init__(self, costs: StepCosts | None = None) -> None:
        self._costs = costs
        self._gain = GainEstimate()
        self._pass_s = RecentMedian(_RECENT)
        self._brought = FadingRatio(_DECAY)  # tokens that readings brought, to nodes reached

    def asks(self, tree: DraftTree, token_s: float) -> bool:
        """Return whether to ask the reader for this draft; each call counts as one.

        Args:
            tree: that there is without it.
            token_s: seconds that a token takes now.
        """
        sureness = sureness_of(tree)
        if self._costs is None:
            return self._gain.pays(sureness, token_s)
        return self._costs.pass_s == 0 or self._gain.pays(sureness, self._costs.target_s)

    def is_worthwhile(self, reach: float, token_s: float) -> bool:
        """Return whether a pass pays.

        Args:
            reach: expected number of nodes of the pass that the target comes to.
            token_s: seconds that a token takes now; 0 where that is not known.
        """
        pass_s = self._pass_s.value()
        if self._costs is not None:
            pass_s, token_s = self._costs.pass_s, self._costs.target_s
        if pass_s is None or token_s == 0:
            return True
        share = (self._brought.numerator + 1) / (self._brought.denominator + 1)
        return max(share, 0.0) * reach * token_s >= pass_s

    def record_pass(self, seconds: float) -> None:
        """Take in the time of a pass."""
        self._pass_s.add(seconds)

    def learn(self, asked: "AskedDraft", gain: int) -> None:
        """Take in how many tokens asking added to a draft."""
        seconds = asked.seconds
        if self._costs is not None:
            seconds = asked.num_passes * self._costs.pass_s
        self._gain.learn(asked.sureness, gain, seconds)
        self._brought.add(gain, asked.reach)


def sureness_of(tree: DraftTree) -> float:
    """Return the probability of a tree's first node, 0 where it is empty."""
    return float(tree.probabilities[0]) if len(tree) else 0.0


class AskedDraft:
    """What asking a reader for one draft took.

    Args:
        number: of the reader.
        tree: that there was before.

    Attributes:
        number: as given.
        tree: as given.
        reach: expected number of nodes read that the target comes to, the root among them.
        num_passes: that the reader took.
        seconds: that they took, with all that was done in between.
    """

    def __init__(self, number: int, tree: DraftTree) -> None:
        self.number = number
        self.tree = tree
        self.reach = 0.0
        self.num_passes = 0
        self._start = time.perf_counter()
        self._end = self._start

    @property
    def sureness(self) -> float:
        """Probability of the first node of the tree before, 0 where it was empty."""
        return sureness_of(self.tree)

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the end of the last pass."""
        return self._end - self._start

    def note_pass(self, reach: float) -> float:
        """Note a pass that has just ended; return the seconds since the one before."""
        before, self._end = self._end, time.perf_counter()
        self.num_passes += 1
        self.reach += reach
        return self._end - before
