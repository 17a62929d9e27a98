"""The command that says whether drafts would help, from recorded outputs."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.progress import Progress

from decoder.budget.cost_store import store_at
from decoder.commands.answers import FORESEEN
from decoder.commands.plots import check_plot
from decoder.commands.terminal import print_table
from decoder.model.pretrained import ModelOptions, load_model
from decoder.plugins.contenders.drafting_rules import DraftingRule, drafting_rules
from decoder.plugins.estimate.cost_curve import CostCurve, from_file, measured, roofline
from decoder.plugins.estimate.estimate_plot import draw
from decoder.plugins.estimate.estimate_report import (
    Crowded,
    Estimate,
    as_json,
    assumptions,
    beside,
    tables,
    verdict,
)
from decoder.plugins.estimate.options import (
    DEFAULT_ROOFLINE,
    CostSettings,
    EstimatedDrafts,
    LogSettings,
)
from decoder.plugins.estimate.projection import PAYING, Nodes, ProjectedOutcome, project
from decoder.plugins.estimate.token_log import LoggedRecord, TokenLog, token_log
from indexer.launch import errors_in_one_line
from indexer.sources.record_samples import show_recording
from indexer.sources.recordings import RecordingTally
from retriever.commands.factories import OWN, find_factory
from retriever.sessions.options import check_files, indexed_tokenizer
from retriever.traces.traces import REPEATED, ChatEncoder, stream_traces

_CROWDED: Final = 32
"""Sequences in a pass of a busy server: what a gain for one alone is set against."""

_ASSUMPTIONS: Final = (
    "each output drafts from its own prompt and from the outputs before it in the log",
    "an output's first token comes with the pass over its prompt, and is not counted",
    "drafts from the model's logits (recycling) are left out: a log has none; they would add",
    f"{PAYING}: drafts are cut to what pays by these costs, as `foredraft generate` does",
    "the others are our readings of their rules at their best settings",
)


@errors_in_one_line(*FORESEEN)
def estimate(
    log: Path,
    chosen: LogSettings,
    drafts: EstimatedDrafts,
    costs: CostSettings,
    plot: Path | None,
    *,
    is_json: bool,
) -> None:
    """Say from recorded outputs whether drafts would help; see `foredraft estimate --help`."""
    if chosen.dry_run:
        show_recording(log, chosen.field)
        return
    drafts.check()
    for name in drafts.drafter:
        find_factory(name)
    costs.check()
    if plot is not None:
        check_plot(plot)
    check_files(drafts.index, [])
    encoder = ChatEncoder(chosen.tokenizer or costs.model, indexed_tokenizer(drafts.index))
    curve = _curve(costs, drafts.budgets[-1])
    console = Console(stderr=True)
    found = RecordingTally(field=chosen.field)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        rows = islice(stream_traces(log, encoder, found), chosen.limit)
        tokenising = progress.add_task("tokenising", total=None)
        with token_log(progress.track(rows, task_id=tokenising), chosen.by) as records:
            for line in found.describe():
                progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            rules = drafting_rules(drafts.index, encoder.vocabulary, drafts.drafter)
            budgets: list[Nodes] = [*drafts.budgets, PAYING]
            outcomes = _replayed(records, rules, budgets, curve, progress)
            crowded = _crowded(records, rules, curve, drafts.budgets[-1])
            repeats = found.skipped[REPEATED]
            estimated = _estimate(outcomes, records, curve, drafts, crowded, encoder, repeats)
    if plot is not None:
        draw(estimated, plot)
    _show(estimated, is_json=is_json)


def _curve(costs: CostSettings, max_nodes: int) -> CostCurve:
    """Return what passes cost, up to so many nodes.

    Raises:
        DecoderError: the model or the file cannot be used.
    """
    if costs.costs is not None:
        return from_file(costs.costs).reaching(max_nodes)
    if costs.model is None:
        return roofline(costs.roofline or DEFAULT_ROOFLINE, costs.batch, max_nodes)
    language_model = load_model(ModelOptions(costs.model, costs.device, costs.dtype))
    return measured(language_model, store_at(costs.cost_cache)).reaching(max_nodes)


class _Watched:
    """A log that tells whenever a record has been replayed."""

    def __init__(self, log: TokenLog, seen: Callable[[], object]) -> None:
        self._log = log
        self._seen = seen

    def __iter__(self) -> Iterator[LoggedRecord]:
        for record in self._log:
            yield record
            self._seen()


def _replayed(
    log: TokenLog,
    rules: list[DraftingRule],
    budgets: list[Nodes],
    curve: CostCurve,
    progress: Progress,
) -> list[ProjectedOutcome]:
    """Replay the log with every rule and budget, and show how far that is."""
    task = progress.add_task("replaying", total=log.num_records * (1 + len(rules) * len(budgets)))
    watched = _Watched(log, lambda: progress.advance(task))
    return list(project(watched, rules, budgets, curve))


def _crowded(
    log: TokenLog, rules: list[DraftingRule], curve: CostCurve, max_nodes: int
) -> Crowded | None:
    """Replay our drafts for a busy server, where passes are computed for one sequence alone."""
    if not curve.roofline or curve.batch != 1:
        return None
    own = [rule for rule in rules if rule.name == OWN]
    busy = roofline(curve.roofline, _CROWDED, max_nodes)
    plain, drafted = project(log, own, [PAYING], busy)
    return Crowded(_CROWDED, drafted.speedup(plain))


def _estimate(
    outcomes: list[ProjectedOutcome],
    records: TokenLog,
    curve: CostCurve,
    drafts: EstimatedDrafts,
    crowded: Crowded | None,
    encoder: ChatEncoder,
    num_repeats: int,
) -> Estimate:
    tokenizer, fit = encoder.used_tokenizer, encoder.fit
    short = f"; {records.num_short:,} have less than two: nothing to draft"
    taken = [
        f"{records.num_records:,} outputs of {records.num_tokens:,} tokens"
        + (short if records.num_short else ""),
        *_ASSUMPTIONS,
    ]
    if tokenizer is not None:
        taken.append(f"tokens are those of {tokenizer}: name your model's by --tokenizer")
    if drafts.index:
        taken.append("no index holds the log's own outputs, which would foretell themselves")
    if fit.num_tokens:
        taken.append(
            f"{fit.num_tokens / fit.num_characters:.2f} tokens a character, "
            f"{fit.share_of_parts:.0%} of them parts of one"
        )
    return Estimate(
        outcomes[0],
        outcomes[1:],
        curve,
        records.kinds,
        records.field,
        taken,
        records.num_records,
        num_repeats,
        fit,
        crowded,
    )


def _show(estimate: Estimate, *, is_json: bool) -> None:
    if is_json:
        typer.echo(json.dumps(as_json(estimate), indent=2))
        return
    for table in tables(estimate):
        print_table(table)
    for line in assumptions(estimate):
        typer.echo(f"- {line}")
    typer.echo(f"\nothers at their best: {beside(estimate)}")
    typer.echo(f"foredraft: {verdict(estimate)}")
