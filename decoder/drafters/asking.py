"""Decides when a drafting model extends a draft, and how many passes it may take."""

import time
from dataclasses import dataclass
from typing import Final

from decoder.budget.payoff import FadingLine, FadingRatio, RecentMedian
from retriever.tree import DraftTree

_DECAY: Final = 0.995
"""Gains are averaged over about 200 steps, because the tokens that a draft adds vary by three times
their mean. With 20 drafts the rule is wrong so often that it obtains a tenth of the possible gain.
With 200 drafts it obtains nine tenths. With 1000 drafts it notices changed gains later."""

_PAUSE: Final = 31
"""Steps between two trials of a drafting model that does not pay off: a trial in every 32nd step
takes 3% of the model's time."""

_KNOWN: Final = 4.0
"""Weight of the initial guess, in drafts."""

_GUESS: Final = 0.4
"""Initial guess of the tokens that a drafting model adds to an empty tree; for a certain tree the
guess is 0."""

_RECENT: Final = 15
"""Number of passes that the median time covers. They belong to a few drafts, and even seven machine
pauses do not change the median."""

_LITTLE: Final = 8
"""Number of new tokens that a drafting model reads in hardly more time than one token. If it reads
more before a draft, such as a prompt, the measured time is only an upper bound of the cost per
step."""

_TIMED: Final = 6
"""Number of drafts, with few new tokens each, to ignore before times are used. The first drafts,
with cold caches, take twice as long."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds that passes of the target and of the draft model take.

    Attributes:
        target_s: seconds of a decoding step without the draft model.
        pass_s: seconds of one pass of the draft model; with 0 it always extends drafts as far as it
            can.
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
        """Record one step."""
        self._step_s.add(seconds)
        self._tokens.add(num_tokens)

    def token_s(self) -> float:
        """Return the seconds per token; 0 before the first step."""
        return (self._step_s.value() or 0.0) / self._tokens.value(default=1.0)


class Trials:
    """Allows occasional trials of something that did not pay off, because it may pay off now."""

    def __init__(self) -> None:
        self._waited = 0

    def allow(self, *, pays: bool) -> bool:
        """Return whether to try it in this step; call this once per step."""
        if pays or self._waited == _PAUSE:
            self._waited = 0
            return True
        self._waited += 1
        return False


class AskingRule:
    """Decides whether a drafting model extends a draft, and whether it takes another pass.

    A drafting model is called if the tokens that it recently added to trees save more time, at the
    current pace, than it takes. RASD (arXiv:2503.03434) sets such a threshold by hand. Gains fall
    linearly as trees become more certain, so the gain is modelled as a line fitted to recent
    drafts; each draft then informs the estimate for all trees. The line fades with every step, even
    without a call, so that trials soon outweigh old observations.

    The first pass, which reads the sequence, gains the most; its gain is learned separately. A
    further pass pays off if its expected tokens save more time than it takes, as in drafting with
    only a draft model (SpecDec++, arXiv:2405.19715). The expected tokens are the recent gain of
    further passes per node that the target reached, times the expected number of nodes of the new
    pass that the target reaches.

    Args:
        pace: the pace of decoding, shared with the rules of other drafting models; its owner
            updates it.
        costs: costs of passes, with `target_s` per token; measured if not given. If passes are
            free, the drafting model is always called and extends drafts as far as it can.
    """

    def __init__(self, pace: DecodingPace, costs: StepCosts | None = None) -> None:
        self._pace = pace
        self._costs = costs
        self._gains = FadingLine(_DECAY, _KNOWN, at_0=_GUESS, at_1=0.0)
        self._asking_s = RecentMedian(_RECENT)
        self._untimed = _TIMED
        self._asking_trials = Trials()
        self._pass_s = RecentMedian(_RECENT)
        self._brought = FadingRatio(_DECAY)  # tokens that further passes gain per node reached
        self._pass_trials = Trials()

    def asks(self, tree: DraftTree) -> bool:
        """Return whether the model should extend this draft; each call counts as one step.

        Args:
            tree: the tree without this model's nodes.
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
        """Return whether a further pass pays off; each call counts as one considered pass.

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
            asked: the drafting model's work on the draft.
            before: number of accepted tokens in the tree that the model was given.
            first: number of accepted tokens in the tree after the first pass; `None` if all passes
                are tracked as one.
            gained: number of accepted tokens in the final draft.
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
    """The passes and time that a drafting model spent on one draft.

    Args:
        number: number of the drafting model.
        tree: the tree that the model was given.
        num_behind: number of tokens of the sequence that the model had not yet read.

    Attributes:
        number: number of the drafting model.
        tree: the tree that the model was given.
        num_behind: number of tokens of the sequence that the model had not yet read.
        first: the tree after the first pass, which reads the sequence; `None` if all passes are
            tracked as one.
        first_s: seconds from the start to the end of the first pass.
        seconds: seconds of all passes, including the work between them.
        reach: expected number of nodes in further passes that the target reaches.
        num_passes: number of passes that the model took.
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
            reach: expected number of nodes in the pass that the target reaches; 0 for the first
                pass.
        """
        before, self.seconds = self.seconds, time.perf_counter() - self._start
        if self.num_passes == 0:
            self.first_s = self.seconds
        self.num_passes += 1
        self.reach += reach
        return self.seconds - before
