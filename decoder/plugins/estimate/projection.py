"""Replaying a log as the decoding loop would decode it; a cost curve gives the time of each pass.

A draft changes no output, so the recording shows what each pass would accept. The pass over the
prompt yields the first token of an output. Neither that pass nor that token is counted.
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
"""A budget without a number: as many nodes as pay off by the curve, as in the decoder."""

Nodes = int | str
"""Largest number of nodes in a draft, or `PAYING`."""

_SESSION: Final = "estimate"


class ProjectedRule(Protocol):
    """A drafting rule; see `decoder.plugins.contenders.drafting_rules`."""

    @property
    def name(self) -> str:
        """Name of the rule in reports."""
        ...

    @property
    def opened(self) -> Callable[[int], AbstractContextManager[Drafter]]:
        """Opens a drafter that has seen no text; the argument is its largest number of nodes."""
        ...


@dataclass(slots=True)
class Tally:
    """Sums of counts and times of decoding.

    Attributes:
        records: number of outputs.
        tokens: tokens of the outputs, without the first token of each.
        steps: passes that yielded these tokens.
        nodes: nodes that the passes verified.
        pass_s: seconds of the passes, from the curve.
        draft_s: measured seconds of drafting, for all sequences of a batch.
    """

    records: int = 0
    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    pass_s: float = 0.0
    draft_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens per pass; 1 if there was no pass."""
        return self.tokens / self.steps if self.steps else 1.0

    @property
    def nodes_per_step(self) -> float:
        """Mean number of nodes per pass."""
        return self.nodes / self.steps if self.steps else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of passes and drafting."""
        return self.pass_s + self.draft_s

    def add(self, other: "Tally") -> None:
        """Add the counts and times of another tally."""
        self.records += other.records
        self.tokens += other.tokens
        self.steps += other.steps
        self.nodes += other.nodes
        self.pass_s += other.pass_s
        self.draft_s += other.draft_s


@dataclass(slots=True)
class ProjectedOutcome:
    """The outcome of one drafting rule with one budget.

    Attributes:
        drafter: name of the rule; empty for plain decoding.
        nodes: largest number of nodes in a draft, or `PAYING`.
        tallies: counts and times by kind of traffic.
    """

    drafter: str
    nodes: Nodes
    tallies: dict[str, Tally] = field(default_factory=dict)

    def tally(self, kind: str = ALL) -> Tally:
        """Return the counts and times of a kind, or of all kinds together."""
        if kind in self.tallies:
            return self.tallies[kind]
        total = Tally()
        for each in self.tallies.values() if kind == ALL else ():
            total.add(each)
        return total

    def speedup(self, plain: "ProjectedOutcome", kind: str = ALL) -> float:
        """Return the speed-up over plain decoding; 1 if nothing was decoded."""
        seconds = self.tally(kind).seconds
        return plain.tally(kind).seconds / seconds if seconds else 1.0


class Replay(NamedTuple):
    """A drafting rule and a budget to replay.

    Attributes:
        rule: the drafting rule.
        nodes: largest number of nodes in a draft, or `PAYING`.
        curve: costs of passes.
        max_nodes: largest number of nodes in any replay of the rule.
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
    """Replay a log with every drafting rule and every budget; plain decoding comes first.

    Each rule starts with no outputs. It then drafts from the outputs before the current one, in the
    order of the log. The log is read once for each outcome.

    Args:
        log: the records; they are read several times.
        rules: drafting rules.
        budgets: largest numbers of nodes, or `PAYING`; 0 is plain decoding and is left out.
        curve: costs of passes, up to the largest budget.
        clock: returns seconds; the default counts this thread's processor time alone, which a busy
            machine disturbs less.

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
    """Return the largest number of nodes that a draft can have under any of the budgets."""
    widest = curve.surface.widths[-1] - 1 if PAYING in budgets else 0
    return max([widest, *(nodes for nodes in budgets if isinstance(nodes, int))])


def plain_outcome(log: Iterable[LoggedRecord], curve: CostCurve) -> ProjectedOutcome:
    """Return the outcome of plain decoding."""
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
    """Replay a log with one drafting rule, which starts with no outputs, and one budget.

    Args:
        log: the records; they are read once.
        replay: the rule and the budget.
        clock: returns seconds; see `project`.
        seen: called after each record with the outcome so far.

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
    """Decodes one recorded output as the decoding loop would, and adds it to a tally."""

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
        self._sent = 0  # tokens of the output that the drafter has received

    def decode(self, trace: Trace) -> None:
        """Decode the output to its end, and close the session so that the drafter stores it."""
        began = self._clock()
        self._drafter.open(_SESSION, trace.prompt)
        self._charge(began)
        done = min(1, len(trace.output))  # the prompt's pass yields the first
        while done < len(trace.output):
            done += self._step(trace, done)
        began = self._clock()
        self._drafter.close(_SESSION, trace.output[self._sent :])
        self._charge(began)

    def _step(self, trace: Trace, done: int) -> int:
        """Count a pass and return how many tokens it yields."""
        context, coming = len(trace.prompt) + done, trace.output[done:]
        tree = self._draft(trace.output, done, context)
        path = tree.follow(coming[:-1])  # the target adds the last token itself
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
        if max_nodes == 0 or done == len(output) - 1:  # no draft for the last token
            return DraftTree.empty()
        new, self._sent = output[self._sent : done], done
        began = self._clock()
        tree = self._drafter.draft([DraftRequest(_SESSION, new, context, max_nodes)])[0]
        return self._budget.share([tree], Load.of(context), self._charge(began))[0]

    def _charge(self, began: float) -> float:
        """Add the time since `began`, once for each sequence of the batch, and return the sum."""
        seconds = (self._clock() - began) * self._curve.batch
        self._tally.draft_s += seconds
        return seconds


def best_of(
    outcomes: Iterable[ProjectedOutcome], plain: ProjectedOutcome, drafter: str, kind: str = ALL
) -> ProjectedOutcome:
    """Return the fastest outcome of a drafter for a kind of traffic."""
    own = [outcome for outcome in outcomes if outcome.drafter == drafter]
    return own[int(np.argmax([outcome.speedup(plain, kind) for outcome in own]))]
