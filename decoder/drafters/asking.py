"""When a model is asked to read a draft, and for how many passes."""

import time
from dataclasses import dataclass
from typing import Final

from decoder.budget.payoff import FadingLine, FadingRatio, RecentMedian
from retriever.tree import DraftTree

_DECAY: Final = 0.995
"""Gains are those of some two hundred steps: the tokens that a draft adds vary by three times their
mean. With twenty drafts a rule is wrong so often that it obtains a tenth of what could be gained,
with two hundred nine tenths; with a thousand it notices later where gains turn."""

_PAUSE: Final = 31
"""Steps between two trials of what does not pay: every 32nd takes 3% of the reader's time."""

_KNOWN: Final = 4.0
"""Drafts that a guess counts for before there are any."""

_GUESS: Final = 0.4
"""Tokens that a reader is thought to add where there is no tree; where that is sure, none."""

_RECENT: Final = 15
"""Passes whose median time counts: those of a few drafts; seven pauses of the machine change
nothing."""

_LITTLE: Final = 8
"""Tokens that a reader catches up with in hardly more time than with one. A draft before which it
had more to read, such as a prompt, only bounds what it costs to be asked at every step."""

_TIMED: Final = 6
"""Drafts without much to catch up with before time is judged: the first ones, in caches that are
cold, take twice as long."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of the target's and the draft model's passes.

    Attributes:
        target_s: seconds of a decoding step without its model draft.
        pass_s: seconds of a pass of the draft model; 0 lets a draft grow as long as it can.
    """

    target_s: float
    pass_s: float


class DecodingPace:
    """How long a token takes at present: recent steps, and the tokens that came of them.

    The tokens of a single step vary from one to as many as a draft has, so their mean counts.
    """

    def __init__(self) -> None:
        self._step_s = RecentMedian(_RECENT)
        self._tokens = FadingRatio(_DECAY)

    def note(self, seconds: float, num_tokens: int) -> None:
        """Take in a step."""
        self._step_s.add(seconds)
        self._tokens.add(num_tokens)

    def token_s(self) -> float:
        """Return seconds for a token; 0 before the first step."""
        return (self._step_s.value() or 0.0) / self._tokens.value(default=1.0)


class Trials:
    """Has what does not pay tried again now and then, as it may have begun to."""

    def __init__(self) -> None:
        self._waited = 0

    def allow(self, *, pays: bool) -> bool:
        """Return whether to ask in this step; call it once a step."""
        if pays or self._waited == _PAUSE:
            self._waited = 0
            return True
        self._waited += 1
        return False


class AskingRule:
    """Decides whether a reader is asked for a draft, and whether it takes another pass for it.

    A reader is asked where the tokens that it has lately added to the tree that there was already,
    at the pace of decoding, save more time than it takes. RASD (arXiv:2503.03434) sets such a
    threshold by hand. Gains fall evenly with the tree's sureness, so they are a line, fitted to
    recent drafts: each draft then tells something of all trees. They fade by the step, asked or
    not, so that what was learned long ago is soon outweighed by trials.

    The first pass, which reads the sequence, brings most: what it adds is learned by itself. A
    further pass pays where the tokens that it is expected to bring are worth its time, as for draft
    models alone (SpecDec++, arXiv:2405.19715). It is expected to bring what such passes have lately
    brought, times how probable it is that the target comes to one of the nodes that it reads.

    Args:
        pace: of decoding, shared with the rules of other readers; its owner keeps it up to date.
        costs: what passes cost, `target_s` for each token; measured if not given. Where passes are
            given as free, the reader is always asked and reads as far as it can.
    """

    def __init__(self, pace: DecodingPace, costs: StepCosts | None = None) -> None:
        self._pace = pace
        self._costs = costs
        self._gains = FadingLine(_DECAY, _KNOWN, at_0=_GUESS, at_1=0.0)
        self._asking_s = RecentMedian(_RECENT)
        self._untimed = _TIMED
        self._asking_trials = Trials()
        self._pass_s = RecentMedian(_RECENT)
        self._brought = FadingRatio(_DECAY)  # tokens that further passes brought, to nodes reached
        self._pass_trials = Trials()

    def asks(self, tree: DraftTree) -> bool:
        """Return whether to ask the reader for this draft; each call counts as a step.

        Args:
            tree: that there is without it.
        """
        if self._costs is not None and self._costs.pass_s == 0:
            return True
        self._gains.fade()
        seconds, token_s = self._asking_s.value(), self._token_s()
        if seconds is None or self._untimed > 0 or token_s == 0:
            return True
        gain = self._gains.at(_sureness_of(tree))
        return self._asking_trials.allow(pays=gain * token_s >= seconds)

    def is_worthwhile(self, reach: float) -> bool:
        """Return whether a further pass pays; each call counts as one.

        Args:
            reach: expected number of nodes of the pass that the target comes to.
        """
        pass_s = self._pass_s.value() if self._costs is None else self._costs.pass_s
        token_s = self._token_s()
        if not pass_s or token_s == 0:
            return True
        share = (self._brought.numerator + 1) / (self._brought.denominator + 1)
        return self._pass_trials.allow(pays=share * reach * token_s >= pass_s)

    def record_pass(self, seconds: float) -> None:
        """Take in the time of a further pass."""
        self._pass_s.add(seconds)

    def learn(self, asked: "AskedDraft", before: int, first: int | None, gained: int) -> None:
        """Take in how many tokens of a draft were accepted.

        Args:
            asked: for the draft.
            before: accepted tokens of the tree before.
            first: those of the tree after the first pass; `None` where passes are not told apart,
                and count as one.
            gained: those of the whole draft.
        """
        if first is None:
            added, num_passes, seconds = gained - before, asked.num_passes, asked.seconds
            self._brought.add(added, 1.0 + asked.reach)
        else:
            added, num_passes, seconds = first - before, 1, asked.first_s
            if asked.num_passes > 1:
                self._brought.add(gained - first, asked.reach)
        self._gains.add(_sureness_of(asked.tree), added)
        is_typical = self._costs is not None or asked.num_behind <= _LITTLE
        if self._costs is not None:
            seconds = num_passes * self._costs.pass_s
        if is_typical or seconds < (self._asking_s.value() or 0.0):
            self._untimed -= is_typical
            self._asking_s.add(seconds)

    def _token_s(self) -> float:
        return self._pace.token_s() if self._costs is None else self._costs.target_s


def _sureness_of(tree: DraftTree) -> float:
    """Return the probability of a tree's first node, 0 where it is empty."""
    return float(tree.probabilities[0]) if len(tree) else 0.0


class AskedDraft:
    """What asking a reader for one draft took.

    Args:
        number: of the reader.
        tree: that there was before.
        num_behind: tokens of the sequence that the reader had not read.

    Attributes:
        number: as given.
        tree: as given.
        num_behind: as given.
        first: the tree after its first pass, which reads the sequence; `None` where passes are not
            told apart.
        first_s: seconds from the beginning to the end of that.
        seconds: that all passes took, with all that was done in between.
        reach: expected number of nodes of further passes that the target comes to.
        num_passes: that the reader took.
    """

    def __init__(self, number: int, tree: DraftTree, num_behind: int) -> None:
        self.number = number
        self.tree = tree
        self.num_behind = num_behind
        self.first: DraftTree | None = None
        self.first_s = self.seconds = self.reach = 0.0
        self.num_passes = 0
        self._start = time.perf_counter()

    def note_pass(self, reach: float = 0.0) -> float:
        """Note a pass that has just ended; return the seconds that it took.

        Args:
            reach: expected number of its nodes that the target comes to; none of the first pass.
        """
        before, self.seconds = self.seconds, time.perf_counter() - self._start
        if self.num_passes == 0:
            self.first_s = self.seconds
        self.num_passes += 1
        self.reach += reach
        return self.seconds - before
