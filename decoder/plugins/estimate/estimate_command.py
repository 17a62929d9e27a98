"""The command that predicts from recorded outputs whether drafts would help."""

import json
from itertools import islice
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.progress import Progress

from decoder.commands.plots import check_plot
from decoder.commands.terminal import print_table
from decoder.errors import FORESEEN
from decoder.model.pretrained import ModelOptions
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
from decoder.plugins.estimate.projection import (
    PAYING,
    Nodes,
    ProjectedOutcome,
    Replay,
    most_nodes,
    plain_outcome,
)
from decoder.plugins.estimate.side_by_side import outcomes_of
from decoder.plugins.estimate.token_log import TokenLog, token_log
from indexer.launch import errors_in_one_line
from indexer.sources.record_samples import show_recording
from indexer.sources.recordings import RecordingTally
from retriever.commands.factories import OWN, find_factory
from retriever.sessions.options import check_files, indexed_tokenizer
from retriever.traces.traces import REPEATED, ChatEncoder, stream_traces

_CROWDED: Final = 32
"""Sequences in a pass of a busy server, whose gain is shown next to the gain for one sequence."""

_ASSUMPTIONS: Final = (
    "each output drafts from its own prompt and from the outputs before it in the log",
    "an output's first token comes from the pass over its prompt, and is not counted",
    "drafts from the model's logits (recycling) are left out: a log has no logits; they would help",
    f"{PAYING}: each draft has as many nodes as pay off at these costs, as in `foredraft generate`",
    "the other drafters are our implementations of their rules, at their best settings",
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
            outcomes, crowded = _replayed(records, rules, curve, drafts, progress)
            repeats = found.skipped[REPEATED]
            estimated = _estimate(outcomes, records, curve, drafts, crowded, encoder, repeats)
    if plot is not None:
        draw(estimated, plot)
    _show(estimated, is_json=is_json)


def _curve(costs: CostSettings, max_nodes: int) -> CostCurve:
    """Return the costs of passes with up to `max_nodes` nodes.

    Raises:
        DecoderError: the model or the file cannot be used.
    """
    if costs.costs is not None:
        return from_file(costs.costs).reaching(max_nodes)
    if costs.model is None:
        return roofline(costs.roofline or DEFAULT_ROOFLINE, costs.batch, max_nodes)
    import torch  # noqa: PLC0415  (with a model alone)

    from decoder.budget.cost_store import store_at  # noqa: PLC0415  (as above)
    from decoder.model.pretrained import load_model  # noqa: PLC0415  (as above)

    with errors_in_one_line(torch.OutOfMemoryError):
        language_model = load_model(ModelOptions(costs.model, costs.device, costs.dtype))
        return measured(language_model, store_at(costs.cost_cache)).reaching(max_nodes)


def _replayed(
    log: TokenLog,
    rules: list[DraftingRule],
    curve: CostCurve,
    drafts: EstimatedDrafts,
    progress: Progress,
) -> tuple[list[ProjectedOutcome], Crowded | None]:
    """Replay the log with every rule and budget.

    If passes are computed for a single sequence, our drafts are also replayed for a busy server.
    """
    budgets: list[Nodes] = [PAYING, *reversed(drafts.budgets)]
    most = most_nodes(budgets, curve)
    replays = [Replay(rule, nodes, curve, most) for rule in rules for nodes in budgets]
    busy = None
    if curve.roofline and curve.batch == 1:
        busy = roofline(curve.roofline, _CROWDED, most)
        replays.append(Replay(rules[0], PAYING, busy, most))
    task = progress.add_task("replaying", total=log.num_records * len(replays))

    def seen(outcome: ProjectedOutcome, num_records: int) -> None:
        progress.advance(task, num_records)
        if (outcome.drafter, outcome.nodes) == (OWN, PAYING):
            so_far = f"replaying: {outcome.tally().tokens_per_step:.2f} tokens per step so far"
            progress.update(task, description=so_far)

    outcomes = outcomes_of(log, replays, seen)
    crowded = None
    if busy is not None:
        speedup = outcomes.pop().speedup(plain_outcome(log, busy))
        crowded = Crowded(_CROWDED, speedup)
    by_budget = {(each.drafter, each.nodes): each for each in outcomes}
    in_order: list[Nodes] = [*drafts.budgets, PAYING]
    shown = [by_budget[rule.name, nodes] for rule in rules for nodes in in_order]
    return [plain_outcome(log, curve), *shown], crowded


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
    short = f"; {records.num_short:,} have fewer than two: nothing to draft"
    taken = [
        f"{records.num_records:,} outputs of {records.num_tokens:,} tokens"
        + (short if records.num_short else ""),
        *_ASSUMPTIONS,
    ]
    if tokenizer is not None:
        taken.append(f"texts use the tokenizer of {tokenizer}: name your model's with --tokenizer")
    if drafts.index:
        taken.append(
            "not checked: no index may hold the log's own outputs, which would predict themselves"
        )
    if fit.num_tokens:
        taken.append(
            f"{fit.num_tokens / fit.num_characters:.2f} tokens per character, "
            f"{fit.share_of_parts:.0%} of them parts of a character"
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
    typer.echo(f"\nother drafters at their best: {beside(estimate)}")
    typer.echo(f"foredraft: {verdict(estimate)}")
