"""What an estimate says: a verdict in a sentence, two tables, and all figures as values."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.plugins.estimate.cost_curve import CostCurve
from decoder.plugins.estimate.projection import PAYING, Nodes, ProjectedOutcome, best_of
from decoder.plugins.estimate.token_log import ALL
from retriever.commands.factories import OWN
from retriever.traces.traces import TokenizerFit

WORTH_IT: Final = 1.05
"""Least speed-up that counts: a machine's own noise is a few percent."""

REPETITIVE: Final = 1.15
"""Tokens per step below which drafts fail because texts do not repeat, whatever passes cost."""


FEW_OUTPUTS: Final = 50
"""With fewer outputs, a verdict is that of a handful of texts."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """All that was replayed, and what it took for granted.

    Attributes:
        plain: plain decoding of the same outputs.
        outcomes: every way of drafting with every budget.
        curve: what passes cost.
        kinds: of traffic; one for all where they are not told apart.
        field: of the log that tells them; empty if none does.
        assumptions: of the replay, a sentence each.
        num_outputs: that were replayed.
        num_repeats: answers that were read before, and count once.
        fit: how the tokenizer divides their texts.
        crowded: for passes by a roofline, what our drafts gain where more sequences share one.
    """

    plain: ProjectedOutcome
    outcomes: Sequence[ProjectedOutcome]
    curve: CostCurve
    kinds: Sequence[str]
    field: str
    assumptions: Sequence[str]
    num_outputs: int
    num_repeats: int = 0
    fit: TokenizerFit | None = None
    crowded: "Crowded | None" = None

    @property
    def drafters(self) -> list[str]:
        """Names of the ways of drafting, our own first."""
        return list(dict.fromkeys(outcome.drafter for outcome in self.outcomes))

    @property
    def budgets(self) -> list[Nodes]:
        """What drafts were limited to, in order."""
        return list(dict.fromkeys(outcome.nodes for outcome in self.outcomes))

    @property
    def shown_kinds(self) -> list[str]:
        """The kinds, and, where there are several, all together at the end."""
        return [*self.kinds, ALL] if len(self.kinds) > 1 else list(self.kinds)

    def of(self, drafter: str, nodes: Nodes) -> ProjectedOutcome:
        """Return the outcome of a way of drafting with a budget."""
        return next(o for o in self.outcomes if (o.drafter, o.nodes) == (drafter, nodes))

    def best(self, drafter: str, kind: str = ALL) -> ProjectedOutcome:
        """Return the quickest outcome of a way of drafting."""
        return best_of(self.outcomes, self.plain, drafter, kind)

    def speedup(self, drafter: str, kind: str = ALL) -> float:
        """Return the speed-up of a way of drafting at its best budget."""
        return self.best(drafter, kind).speedup(self.plain, kind)

    def helps(self, kind: str = ALL) -> bool:
        """Return whether our drafts are worth it."""
        return self.speedup(OWN, kind) >= WORTH_IT


@dataclass(frozen=True, slots=True)
class Crowded:
    """What our drafts, cut to what pays, gain where many sequences share a pass.

    Attributes:
        batch: sequences in a pass.
        speedup: over plain decoding of as many.
    """

    batch: int
    speedup: float


def verdict(estimate: Estimate) -> str:
    """Return in one sentence whether our drafts help, how much, and where they do not."""
    if estimate.fit is not None and estimate.fit.caution:
        return f"no verdict: {estimate.fit.caution}"
    best = estimate.best(OWN)
    speedup = estimate.speedup(OWN)
    helped = [kind for kind in estimate.kinds if estimate.helps(kind)]
    if not estimate.helps():
        told = f"it won't help: {speedup:.2f} times plain decoding at best, {_reason(estimate)}"
        return told + (f"; but {_listed(estimate, helped)}" if helped else "")
    told = (
        f"{_about(estimate)} {speedup:.1f} times plain decoding with {_budget(best)}"
        f"{_bounds(estimate)}"
    )
    if estimate.num_outputs < FEW_OUTPUTS:
        told += f"; {estimate.num_outputs} outputs are few: more of them may tell otherwise"
    others = [kind for kind in estimate.kinds if kind not in helped]
    return told + (f"; it won't help with {_listed(estimate, others)}" if others else "")


def _about(estimate: Estimate) -> str:
    return "at most" if estimate.curve.roofline else "about"


def _bounds(estimate: Estimate) -> str:
    """Return for how many sequences computed passes hold, and what they leave out."""
    if not estimate.curve.roofline:
        return ""
    batch, crowded = estimate.curve.batch, estimate.crowded
    told = ", for one sequence at a time" if batch == 1 else f", for {batch} sequences in a pass"
    if crowded is not None:
        told += f" ({crowded.speedup:.1f} times for {crowded.batch} in a pass)"
    return (
        f"{told}, computed for {estimate.curve.roofline} without the engine's own time, not "
        "measured: `--model M` measures yours"
    )


def beside(estimate: Estimate) -> str:
    """Return the best of the other ways of drafting, in a line."""
    others = [drafter for drafter in estimate.drafters if drafter != OWN]
    return ", ".join(
        f"{drafter}: {estimate.speedup(drafter):.2f} with {_budget(estimate.best(drafter))}"
        for drafter in others
    )


def tables(estimate: Estimate) -> Iterator[Table]:
    """Give tokens per step, then the projected speed-up, by kind, drafter and budget."""
    yield _table(
        estimate, "tokens per step", lambda outcome, kind: outcome.tally(kind).tokens_per_step
    )
    yield _table(
        estimate,
        "projected speed-up over plain decoding",
        lambda outcome, kind: outcome.speedup(estimate.plain, kind),
    )


def assumptions(estimate: Estimate) -> list[str]:
    """Return what the figures take for granted, a sentence each; drafting times come last."""
    batch = estimate.curve.batch
    times = ", ".join(
        f"{drafter} {_draft_us(estimate, drafter):.0f} µs" for drafter in estimate.drafters
    )
    many = f", {batch} times in a pass" if batch > 1 else ""
    return [
        f"passes: {estimate.curve.source}",
        *estimate.curve.assumptions,
        *estimate.assumptions,
        f"drafting, in processor time measured here, counts too; at most in a step: {times}{many}",
    ]


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Return all figures as plain values."""
    return {
        "verdict": verdict(estimate),
        "helps": estimate.helps(),
        "speedup": estimate.speedup(OWN),
        "nodes": estimate.best(OWN).nodes,
        "outputs": estimate.num_outputs,
        "repeats": estimate.num_repeats,
        "tokenizer": None if estimate.fit is None else estimate.fit.as_json(),
        "is_bound": bool(estimate.curve.roofline),
        "crowded": None if estimate.crowded is None else asdict(estimate.crowded),
        "kinds": {"field": estimate.field, "names": list(estimate.kinds)},
        "assumptions": assumptions(estimate),
        "costs": {"batch": estimate.curve.batch, **asdict(estimate.curve.surface)},
        "plain": {kind: asdict(estimate.plain.tally(kind)) for kind in estimate.shown_kinds},
        "outcomes": [_outcome(estimate, outcome) for outcome in estimate.outcomes],
    }


def _outcome(estimate: Estimate, outcome: ProjectedOutcome) -> dict[str, Any]:
    figures = {}
    for kind in estimate.shown_kinds:
        tally = outcome.tally(kind)
        figures[kind] = {
            "speedup": outcome.speedup(estimate.plain, kind),
            "tokens_per_step": tally.tokens_per_step,
            "nodes_per_step": tally.nodes_per_step,
            **asdict(tally),
        }
    return {"drafter": outcome.drafter, "nodes": outcome.nodes, "kinds": figures}


def _reason(estimate: Estimate) -> str:
    """Return why our drafts do not help, by what the largest tree would bring."""
    most = max(
        (o for o in estimate.outcomes if o.drafter == OWN), key=lambda o: o.tally().tokens_per_step
    )
    tokens = most.tally().tokens_per_step
    if tokens < REPETITIVE:
        return (
            f"for the outputs repeat little of what was written before ({tokens:.2f} tokens per "
            f"step with {_budget(most)})"
        )
    return (
        f"for drafts and passes take the time that they save ({tokens:.2f} tokens per step with "
        f"{_budget(most)}, at {_dearness(most, estimate):.2f} times the time of a plain one)"
    )


def _dearness(outcome: ProjectedOutcome, estimate: Estimate) -> float:
    """Return the time of a step over that of a plain one."""
    tally, plain = outcome.tally(), estimate.plain.tally()
    return (tally.seconds / tally.steps) / (plain.seconds / plain.steps)


def _budget(outcome: ProjectedOutcome) -> str:
    if outcome.nodes == PAYING:
        return f"drafts cut to what pays ({outcome.tally().nodes_per_step:.1f} nodes on average)"
    return f"{outcome.nodes} nodes"


def _listed(estimate: Estimate, kinds: Sequence[str]) -> str:
    return ", ".join(f"{kind} ({estimate.speedup(OWN, kind):.2f})" for kind in kinds)


def _draft_us(estimate: Estimate, drafter: str) -> float:
    """Return the most microseconds of drafting in a step, for one sequence."""
    own = [o.tally() for o in estimate.outcomes if o.drafter == drafter]
    return max(each.draft_s / max(each.steps, 1) for each in own) * 1e6 / estimate.curve.batch


def _table(estimate: Estimate, title: str, figure: Any) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    if len(estimate.shown_kinds) > 1:
        table.add_column(estimate.field, overflow="fold", max_width=16)
    table.add_column("nodes:", no_wrap=True)
    for nodes in estimate.budgets:
        table.add_column(str(nodes), justify="right", no_wrap=True)
    for kind in estimate.shown_kinds:
        for number, drafter in enumerate(estimate.drafters):
            cells = [figure(estimate.of(drafter, nodes), kind) for nodes in estimate.budgets]
            name = [kind if number == 0 else ""] if len(estimate.shown_kinds) > 1 else []
            table.add_row(*name, drafter, *(f"{cell:.2f}" for cell in cells))
        table.add_section()
    return table
