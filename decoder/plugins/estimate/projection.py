"""Replaying a log as the decoding loop would run, with passes that take what a curve says.

A draft changes no output, so what a pass accepts can be counted from the recording. The prompt's
pass brings the first token of an output and is not counted, with or without drafts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from decoder.budget.budget import Budget, FixedBudget, Load, MeasuredBudget, PassOutcome
from decoder.plugins.estimate.cost_curve import CostCurve
from decoder.plugins.estimate.token_log import ALL, LoggedRecord
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.traces.traces import Trace
from retriever.tree import DraftTree

PAYING: Final = "paying"
"""In place of a number of nodes: drafts are cut to what pays by the curve, as the decoder does."""

Nodes = int | str
"""Most nodes of a draft, or `PAYING`."""

_SESSION: Final = "estimate"


class ProjectedRule(Protocol):
    """A way of drafting; see `decoder.plugins.contenders.drafting_rules`."""

    @property
    def name(self) -> str:
        """In reports."""
        ...

    @property
    def opened(self) -> Callable[[int], AbstractContextManager[Drafter]]:
        """Gives a drafter that has seen nothing, for at most so many nodes."""
        ...


@dataclass(slots=True)
class Tally:
    """Counts and times of decoding, added up.

    Attributes:
        records: outputs.
        tokens: of them, but for the first of each.
        steps: passes that brought these.
        nodes: that the passes verified.
        pass_s: seconds of the passes, by the curve.
        draft_s: seconds of drafting, as measured, for all sequences of a batch.
    """

    records: int = 0
    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    pass_s: float = 0.0
    draft_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a pass; 1 where there was none."""
        return self.tokens / self.steps if self.steps else 1.0

    @property
    def nodes_per_step(self) -> float:
        """Mean nodes of a pass."""
        return self.nodes / self.steps if self.steps else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of passes and drafts."""
        return self.pass_s + self.draft_s

    def add(self, other: "Tally") -> None:
        """Add another's counts and times."""
        self.records += other.records
        self.tokens += other.tokens
        self.steps += other.steps
        self.nodes += other.nodes
        self.pass_s += other.pass_s
        self.draft_s += other.draft_s


@dataclass(slots=True)
class ProjectedOutcome:
    """What one way of drafting with one budget came to.

    Attributes:
        drafter: its name; empty for plain decoding.
        nodes: most nodes of a draft, or `PAYING`.
        tallies: by kind of traffic.
    """

    drafter: str
    nodes: Nodes
    tallies: dict[str, Tally] = field(default_factory=dict)

    def tally(self, kind: str = ALL) -> Tally:
        """Return the counts of a kind, or of all kinds together."""
        if kind in self.tallies:
            return self.tallies[kind]
        total = Tally()
        for each in self.tallies.values() if kind == ALL else ():
            total.add(each)
        return total

    def speedup(self, plain: "ProjectedOutcome", kind: str = ALL) -> float:
        """Return how many times as fast as plain decoding this is; 1 where nothing was decoded."""
        seconds = self.tally(kind).seconds
        return plain.tally(kind).seconds / seconds if seconds else 1.0


class Replay(NamedTuple):
    """A way of drafting with a budget, to be replayed.

    Attributes:
        rule: the way.
        nodes: most nodes of a draft, or `PAYING`.
        curve: what passes cost.
        max_nodes: most nodes of any replay of the rule.
    """

    rule: ProjectedRule
    nodes: Nodes
    curve: CostCurve
    max_nodes: int


def project(
    log: Iterable[LoggedRecord],
    rules: Sequence[ProjectedRule],
    budgets: Sequence[Nodes],
    curve: CostCurve,
    clock: Callable[[], float] = time.thread_time,
) -> Iterator[ProjectedOutcome]:
    """Replay a log with every way of drafting and every budget; plain decoding comes first.

    Each way begins with no output and drafts from those that it has been through, in the order of
    the log. The log is gone through once for each outcome.

    Args:
        log: can be gone through repeatedly.
        rules: ways of drafting.
        budgets: most nodes, or `PAYING`; 0 is plain decoding and is left out.
        curve: reaches the largest budget.
        clock: tells seconds; by default of this thread alone, so that a busy machine counts less.

    Raises:
        RetrieverError: a drafter refuses a record.
    """
    yield plain_outcome(log, curve)
    most = most_nodes(budgets, curve)
    for rule in rules:
        for nodes in budgets:
            if nodes != 0:
                yield replayed(log, Replay(rule, nodes, curve, most), clock)


def most_nodes(budgets: Sequence[Nodes], curve: CostCurve) -> int:
    """Return the most nodes of a draft under any of some budgets."""
    widest = curve.surface.widths[-1] - 1 if PAYING in budgets else 0
    return max([widest, *(nodes for nodes in budgets if isinstance(nodes, int))])


def plain_outcome(log: Iterable[LoggedRecord], curve: CostCurve) -> ProjectedOutcome:
    """Return what plain decoding comes to."""
    outcome = ProjectedOutcome("", 0)
    for record in log:
        tally = outcome.tallies.setdefault(record.kind, Tally())
        tally.records += 1
        begin = len(record.trace.prompt)
        for context in range(begin + 1, begin + len(record.trace.output)):
            tally.pass_s += curve.seconds(0, context)
            tally.steps += 1
            tally.tokens += 1
    return outcome


def replayed(
    log: Iterable[LoggedRecord],
    replay: Replay,
    clock: Callable[[], float] = time.thread_time,
    seen: Callable[[ProjectedOutcome], None] = lambda _: None,
) -> ProjectedOutcome:
    """Replay a log with one way of drafting, which begins with no output, and one budget.

    Args:
        log: gone through once.
        replay: the way and the budget.
        clock: as for `project`.
        seen: is told of the outcome so far behind each record.

    Raises:
        RetrieverError: the drafter refuses a record.
    """
    rule, nodes, curve, max_nodes = replay
    outcome = ProjectedOutcome(rule.name, nodes)
    budget = FixedBudget(nodes) if isinstance(nodes, int) else MeasuredBudget(curve.surface)
    with rule.opened(max_nodes) as drafter:
        for record in log:
            tally = outcome.tallies.setdefault(record.kind, Tally())
            tally.records += 1
            _RecordedSequence(drafter, budget, curve, clock, tally).decode(record.trace)
            seen(outcome)
    return outcome


class _RecordedSequence:
    """Decodes one recorded output as the loop would, and counts it in a tally."""

    def __init__(
        self,
        drafter: Drafter,
        budget: Budget,
        curve: CostCurve,
        clock: Callable[[], float],
        tally: Tally,
    ) -> None:
        self._drafter = drafter
        self._budget = budget
        self._curve = curve
        self._clock = clock
        self._tally = tally
        self._sent = 0  # tokens of the output that the drafter has been told

    def decode(self, trace: Trace) -> None:
        """Open, step to the end and close, so that the output is remembered."""
        began = self._clock()
        self._drafter.open(_SESSION, trace.prompt)
        self._charge(began)
        done = min(1, len(trace.output))  # the prompt's pass brings the first
        while done < len(trace.output):
            done += self._step(trace, done)
        began = self._clock()
        self._drafter.close(_SESSION, trace.output[self._sent :])
        self._charge(began)

    def _step(self, trace: Trace, done: int) -> int:
        """Count a pass and return how many tokens it brings."""
        context, coming = len(trace.prompt) + done, trace.output[done:]
        tree = self._draft(trace.output, done, context)
        path = tree.follow(coming[:-1])  # the last token is the target's own
        num_tokens = len(path) + 1
        pass_s = self._curve.seconds(len(tree), context)
        next_token = int(coming[num_tokens - 1])
        self._budget.learn([PassOutcome(tree, path, next_token)], Load.of(context), pass_s)
        self._tally.steps += 1
        self._tally.tokens += num_tokens
        self._tally.nodes += len(tree)
        self._tally.pass_s += pass_s
        return num_tokens

    def _draft(self, output: TokenIds, done: int, context: int) -> DraftTree:
        max_nodes = self._budget.ask(Load.of(context))
        if max_nodes == 0 or done == len(output) - 1:  # for the last token no draft is asked
            return DraftTree.empty()
        new, self._sent = output[self._sent : done], done
        began = self._clock()
        tree = self._drafter.draft([DraftRequest(_SESSION, new, context, max_nodes)])[0]
        return self._budget.share([tree], Load.of(context), self._charge(began))[0]

    def _charge(self, began: float) -> float:
        """Add the time since then, once for each sequence of the batch, and return it."""
        seconds = (self._clock() - began) * self._curve.batch
        self._tally.draft_s += seconds
        return seconds


def best_of(
    outcomes: Iterable[ProjectedOutcome], plain: ProjectedOutcome, drafter: str, kind: str = ALL
) -> ProjectedOutcome:
    """Return the quickest outcome of a drafter for a kind of traffic."""
    own = [outcome for outcome in outcomes if outcome.drafter == drafter]
    return own[int(np.argmax([outcome.speedup(plain, kind) for outcome in own]))]
