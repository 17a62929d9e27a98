"""When a model is asked to read a draft and how many passes it may take."""

import time
from dataclasses import dataclass
from typing import Final

from decoder.budget.payoff import FadingLine, FadingRatio, RecentMedian
from retriever.tree import DraftTree

_DECAY: Final = 0.995
"""Gains average over about two hundred steps, because the tokens that a draft adds vary by three
times their mean. With twenty drafts a rule is wrong so often that it obtains a tenth of the
possible gain, with two hundred nine tenths; with a thousand it is slower to notice when gains
change."""

_PAUSE: Final = 31
"""Steps between two trials of a reader that does not pay: trying every 32nd step takes 3% of the
reader's time."""

_KNOWN: Final = 4.0
"""Weight of the initial guess, in drafts."""

_GUESS: Final = 0.4
"""Initial guess of the tokens that a reader adds to an empty tree; for a certain tree the guess is
0."""

_RECENT: Final = 15
"""Number of passes for the median time: those of a few drafts; seven pauses of the machine change
nothing."""

_LITTLE: Final = 8
"""Tokens that a reader catches up with in hardly more time than with one. If it had more to read
before a draft, such as a prompt, the time is only an upper bound of the cost per step."""

_TIMED: Final = 6
"""Drafts with little to catch up with before times are used: the first ones, with cold caches, take
twice as long."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of the target's and the draft model's passes.

    Attributes:
        target_s: seconds of a decoding step without the model's draft.
        pass_s: seconds of a pass of the draft model; 0 lets a draft grow without limit.
    """

    target_s: float
    pass_s: float


class DecodingPace:
    """The current time per token, from recent steps and their tokens.

    The tokens of a single step vary from one to the length of a draft, so their mean is used.
    """

    def __init__(self) -> None:
        self._step_s = RecentMedian(_RECENT)
        self._tokens = FadingRatio(_DECAY)

    def note(self, seconds: float, num_tokens: int) -> None:
        """Record a step."""
        self._step_s.add(seconds)
        self._tokens.add(num_tokens)

    def token_s(self) -> float:
        """Return the seconds per token; 0 before the first step."""
        return (self._step_s.value() or 0.0) / self._tokens.value(default=1.0)


class Trials:
    """Allows occasional trials of something that does not pay, in case it does by now."""

    def __init__(self) -> None:
        self._waited = 0

    def allow(self, *, pays: bool) -> bool:
        """Return whether to ask in this step; call it once per step."""
        if pays or self._waited == _PAUSE:
            self._waited = 0
            return True
        self._waited += 1
        return False


class AskingRule:
    """Decides whether a reader is asked for a draft and whether it takes another pass for it.

    A reader is asked if the tokens that it has recently added to existing trees save more time, at
    the current pace, than it takes. RASD (arXiv:2503.03434) sets such a threshold by hand. Gains
    fall linearly with the certainty of the tree, so they are modelled as a line fitted to recent
    drafts; each draft then informs the estimate for all trees. The line fades with every step,
    asked or not, so that trials soon outweigh old observations.

    The first pass, which reads the sequence, gains the most; its gain is learned separately. A
    further pass pays if its expected tokens are worth its time, as in drafting with a draft model
    alone (SpecDec++, arXiv:2405.19715). The expected tokens are the recent gain of such passes per
    node reached, times the expected number of its nodes that the target reaches.

    Args:
        pace: the pace of decoding, shared with the rules of other readers; its owner keeps it up to
            date.
        costs: costs of passes, `target_s` per token; measured if not given. If passes are free, the
            reader is always asked and reads as far as it can.
    """

    def __init__(self, pace: DecodingPace, costs: StepCosts | None = None) -> None:
        self._pace = pace
        self._costs = costs
        self._gains = FadingLine(_DECAY, _KNOWN, at_0=_GUESS, at_1=0.0)
        self._asking_s = RecentMedian(_RECENT)
        self._untimed = _TIMED
        self._asking_trials = Trials()
        self._pass_s = RecentMedian(_RECENT)
        self._brought = FadingRatio(_DECAY)  # tokens gained by further passes per node reached
        self._pass_trials = Trials()

    def asks(self, tree: DraftTree) -> bool:
        """Return whether to ask the reader for this draft; each call counts as a step.

        Args:
            tree: the tree without this reader.
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
            reach: expected number of the pass's nodes that the target reaches.
        """
        pass_s = self._pass_s.value() if self._costs is None else self._costs.pass_s
        token_s = self._token_s()
        if not pass_s or token_s == 0:
            return True
        share = (self._brought.numerator + 1) / (self._brought.denominator + 1)
        return self._pass_trials.allow(pays=share * reach * token_s >= pass_s)

    def record_pass(self, seconds: float) -> None:
        """Record the time of a further pass."""
        self._pass_s.add(seconds)

    def learn(self, asked: "AskedDraft", before: int, first: int | None, gained: int) -> None:
        """Learn how many tokens of a draft were accepted.

        Args:
            asked: the reader's work on the draft.
            before: accepted tokens of the tree before the reader.
            first: accepted tokens of the tree after the first pass; `None` if passes are not
                tracked separately and count as one.
            gained: accepted tokens of the whole draft.
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
    """Return the probability of a tree's first node; 0 if it is empty."""
    return float(tree.probabilities[0]) if len(tree) else 0.0


class AskedDraft:
    """The passes and time that a reader spent on one draft.

    Args:
        number: number of the reader.
        tree: the tree before the reader.
        num_behind: tokens of the sequence that the reader had not yet read.

    Attributes:
        number: as given.
        tree: as given.
        num_behind: as given.
        first: the tree after the first pass, which reads the sequence; `None` if passes are not
            tracked separately.
        first_s: seconds from the start to the end of the first pass.
        seconds: seconds of all passes, including the work between them.
        reach: expected number of nodes of further passes that the target reaches.
        num_passes: passes that the reader took.
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
        """Record a pass that has just ended; return its seconds.

        Args:
            reach: expected number of its nodes that the target reaches; 0 for the first pass.
        """
        before, self.seconds = self.seconds, time.perf_counter() - self._start
        if self.num_passes == 0:
            self.first_s = self.seconds
        self.num_passes += 1
        self.reach += reach
        return self.seconds - before
