"""The report of an estimate: a verdict in one sentence, two tables, and all figures as values."""

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
"""Smallest speed-up that counts as a gain: the noise of a machine is a few percent."""

REPETITIVE: Final = 1.15
"""With fewer tokens per step, the verdict blames texts that repeat little, not costly passes."""


FEW_OUTPUTS: Final = 50
"""With fewer outputs, the verdict warns that they are few."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The outcomes of all replays, and the assumptions behind them.

    Attributes:
        plain: plain decoding of the same outputs.
        outcomes: one outcome for every drafter with every budget.
        curve: costs of passes.
        kinds: kinds of traffic; a single one if the log does not distinguish them.
        field: field of the log that names the kind; empty if there is none.
        assumptions: assumptions of the replay, one sentence each.
        num_outputs: number of outputs that were replayed.
        num_repeats: number of repeated answers in the log; each answer is replayed only once.
        fit: how the tokenizer divides the texts.
        crowded: with a roofline, the gain of our drafts if more sequences share a pass.
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
        """Names of the drafters, our own first."""
        return list(dict.fromkeys(outcome.drafter for outcome in self.outcomes))

    @property
    def budgets(self) -> list[Nodes]:
        """Budgets of the replays, in order."""
        return list(dict.fromkeys(outcome.nodes for outcome in self.outcomes))

    @property
    def shown_kinds(self) -> list[str]:
        """The kinds of traffic; if there are several, all of them together come last."""
        return [*self.kinds, ALL] if len(self.kinds) > 1 else list(self.kinds)

    def of(self, drafter: str, nodes: Nodes) -> ProjectedOutcome:
        """Return the outcome of a drafter with a budget."""
        return next(o for o in self.outcomes if (o.drafter, o.nodes) == (drafter, nodes))

    def best(self, drafter: str, kind: str = ALL) -> ProjectedOutcome:
        """Return the fastest outcome of a drafter."""
        return best_of(self.outcomes, self.plain, drafter, kind)

    def speedup(self, drafter: str, kind: str = ALL) -> float:
        """Return the speed-up of a drafter at its best budget."""
        return self.best(drafter, kind).speedup(self.plain, kind)

    def helps(self, kind: str = ALL) -> bool:
        """Return whether our drafts make decoding faster by at least the factor `WORTH_IT`."""
        return self.speedup(OWN, kind) >= WORTH_IT


@dataclass(frozen=True, slots=True)
class Crowded:
    """The gain of our drafts, with as many nodes as pay off, if many sequences share a pass.

    Attributes:
        batch: number of sequences in a pass.
        speedup: speed-up over plain decoding with the same number of sequences.
    """

    batch: int
    speedup: float


def verdict(estimate: Estimate) -> str:
    """Return one sentence: whether our drafts help, how much, and for which traffic they do not."""
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
        told += f"; {estimate.num_outputs} outputs are few: more outputs may change the verdict"
    others = [kind for kind in estimate.kinds if kind not in helped]
    return told + (f"; it won't help with {_listed(estimate, others)}" if others else "")


def _about(estimate: Estimate) -> str:
    return "at most" if estimate.curve.roofline else "about"


def _bounds(estimate: Estimate) -> str:
    """Return the number of sequences that computed costs assume, and what the costs leave out."""
    if not estimate.curve.roofline:
        return ""
    batch, crowded = estimate.curve.batch, estimate.crowded
    told = ", for one sequence at a time" if batch == 1 else f", for {batch} sequences in a pass"
    if crowded is not None:
        told += f" ({crowded.speedup:.1f} times for {crowded.batch} in a pass)"
    return (
        f"{told}, computed for {estimate.curve.roofline} without the engine's own time, not "
        "measured: `--model M` measures your model"
    )


def beside(estimate: Estimate) -> str:
    """Return one line with the best speed-up of each of the other drafters."""
    others = [drafter for drafter in estimate.drafters if drafter != OWN]
    return ", ".join(
        f"{drafter}: {estimate.speedup(drafter):.2f} with {_budget(estimate.best(drafter))}"
        for drafter in others
    )


def tables(estimate: Estimate) -> Iterator[Table]:
    """Yield two tables by kind, drafter and budget: tokens per step, and projected speed-up."""
    yield _table(
        estimate, "tokens per step", lambda outcome, kind: outcome.tally(kind).tokens_per_step
    )
    yield _table(
        estimate,
        "projected speed-up over plain decoding",
        lambda outcome, kind: outcome.speedup(estimate.plain, kind),
    )


def assumptions(estimate: Estimate) -> list[str]:
    """Return the assumptions behind the figures, one sentence each; drafting times come last."""
    batch = estimate.curve.batch
    times = ", ".join(
        f"{drafter} {_draft_us(estimate, drafter):.0f} µs" for drafter in estimate.drafters
    )
    many = f", {batch} times per pass" if batch > 1 else ""
    return [
        f"passes: {estimate.curve.source}",
        *estimate.curve.assumptions,
        *estimate.assumptions,
        f"drafting time (processor time measured here) is included; per step at most {times}{many}",
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
    """Return why our drafts do not help, judged by the budget with the most tokens per step."""
    most = max(
        (o for o in estimate.outcomes if o.drafter == OWN), key=lambda o: o.tally().tokens_per_step
    )
    tokens = most.tally().tokens_per_step
    if tokens < REPETITIVE:
        return (
            f"for the outputs repeat little of the earlier text ({tokens:.2f} tokens per step with "
            f"{_budget(most)})"
        )
    return (
        f"for drafting and larger passes take the time that drafts save ({tokens:.2f} tokens per "
        f"step with {_budget(most)}, at {_dearness(most, estimate):.2f} times the time of a plain "
        "step)"
    )


def _dearness(outcome: ProjectedOutcome, estimate: Estimate) -> float:
    """Return the time of a step divided by the time of a plain step."""
    tally, plain = outcome.tally(), estimate.plain.tally()
    return (tally.seconds / tally.steps) / (plain.seconds / plain.steps)


def _budget(outcome: ProjectedOutcome) -> str:
    if outcome.nodes == PAYING:
        return f"as many nodes as pay off ({outcome.tally().nodes_per_step:.1f} on average)"
    return f"{outcome.nodes} nodes"


def _listed(estimate: Estimate, kinds: Sequence[str]) -> str:
    return ", ".join(f"{kind} ({estimate.speedup(OWN, kind):.2f})" for kind in kinds)


def _draft_us(estimate: Estimate, drafter: str) -> float:
    """Return the drafting time per step and sequence, in microseconds, at the slowest budget."""
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
