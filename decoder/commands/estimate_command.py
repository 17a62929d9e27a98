"""The command that says whether drafts would help, from recorded outputs."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.progress import Progress

from decoder.budget.cost_store import store_at
from decoder.commands.answers import FORESEEN
from decoder.commands.options import ModelSettings
from decoder.commands.trace_command import print_table
from decoder.contenders.drafting_rules import OWN, DraftingRule, drafting_rules
from decoder.errors import ContradictoryOptionsError
from decoder.estimate.cost_curve import (
    DEFAULT_ROOFLINE,
    ROOFLINES,
    CostCurve,
    from_file,
    measured,
    roofline,
)
from decoder.estimate.estimate_plot import check_plot, draw
from decoder.estimate.estimate_report import (
    Crowded,
    Estimate,
    as_json,
    assumptions,
    beside,
    tables,
    verdict,
)
from decoder.estimate.projection import PAYING, Nodes, Outcome, project
from decoder.estimate.token_log import KIND_FIELDS, NO_FIELD, Record, TokenLog, token_log
from decoder.model.pretrained import ModelOptions, Precision, load_model
from indexer.flags import AsJson, Metavar, with_flags
from indexer.launch import errors_in_one_line
from indexer.sources.recordings import RecordingTally
from indexer.tokenizer import DEFAULT_MODEL
from retriever.replay.traces import ChatEncoder, stream_traces
from retriever.sessions.options import DEFAULT_LIMITS, check_files, indexed_tokenizer

BUDGETS: Final = (4, 8, 16, 32, 64)

_CROWDED: Final = 32
"""Sequences in a pass of a busy server: what a gain for one alone is set against."""

_ASSUMPTIONS: Final = (
    "each output drafts from its own prompt and from the outputs before it in the log",
    "an output's first token comes with the pass over its prompt, and is not counted",
    "drafts from the model's logits (recycling) are left out: a log has none; they would add",
    f"{PAYING}: drafts are cut to what pays by these costs, as `foredraft generate` does",
    (
        "the others are our readings of their rules at their best settings; SuffixDecoding's own "
        "program drafts quicker after long matches"
    ),
)

_OWN_MODEL: Final = ModelOptions(DEFAULT_MODEL)


class LogSettings(BaseModel):
    """What of the log is replayed."""

    model_config = ConfigDict(title="Log", extra="forbid", frozen=True)

    by: Annotated[
        str | None,
        Metavar("FIELD"),
        Field(
            description="A field of the records that tells kinds of traffic apart, or "
            f"{NO_FIELD}. Default: the first of {', '.join(KIND_FIELDS)} that there is."
        ),
    ] = None
    limit: Annotated[
        int,
        Field(
            ge=1,
            description="Replay only the first so many outputs. The more there are, the more "
            "earlier ones there are to draft from, and the longer it takes.",
        ),
    ] = 200
    tokenizer: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(
            description="The tokenizer of texts: a hub id, a folder or a .gguf file. Default: "
            f"that of --model, or else that of the index, or else {DEFAULT_MODEL}."
        ),
    ] = None


class EstimatedDrafts(BaseModel):
    """What is drafted, and from what."""

    model_config = ConfigDict(title="Drafts", extra="forbid", frozen=True)

    index: Annotated[
        list[Path],
        Metavar("DIR"),
        Field(
            description="An index to draft from, too. It should not hold the log's own outputs: "
            "they would foretell themselves. Repeatable."
        ),
    ] = []
    budget: Annotated[
        list[int],
        Metavar("N"),
        Field(
            description="Most nodes of a draft, from 1 to "
            f"{DEFAULT_LIMITS.max_budget_nodes}. Repeatable. Default: "
            f"{', '.join(map(str, BUDGETS))}."
        ),
    ] = []

    @property
    def budgets(self) -> list[int]:
        """The budgets, rising."""
        return sorted(set(self.budget or BUDGETS))

    def check(self) -> None:
        """Refuse budgets that no drafter takes.

        Raises:
            ContradictoryOptionsError: one is out of its range.
        """
        most = DEFAULT_LIMITS.max_budget_nodes
        if not 1 <= self.budgets[0] <= self.budgets[-1] <= most:
            raise ContradictoryOptionsError(f"--budget is from 1 to {most} nodes")


class CostSettings(BaseModel):
    """What passes of the model cost: one of --model, --costs and --roofline."""

    model_config = ConfigDict(title="Costs of passes", extra="forbid", frozen=True)

    model: Annotated[
        str | None,
        Metavar("MODEL"),
        Field(
            description="Measure the passes of this model on this machine: a hub id, a folder or "
            "a .gguf file."
        ),
    ] = None
    dtype: Annotated[Precision, Field(description="With --model: what the model computes in.")] = (
        _OWN_MODEL.precision
    )
    device: Annotated[str, Metavar("DEVICE"), Field(description="With --model: where it runs.")] = (
        _OWN_MODEL.device
    )
    cost_cache: Annotated[
        str | None,
        Metavar("DIR"),
        Field(description="With --model: where costs are kept, none to measure always."),
    ] = None
    costs: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(
            description="Read them: a report of `bench --json`, or JSON with `widths` (nodes and "
            "one more) and `seconds`."
        ),
    ] = None
    roofline: Annotated[
        str | None,
        Metavar("NAME"),
        Field(
            description="Compute them from data sheets, for a model in bfloat16 on a device: "
            f"{', '.join(ROOFLINES)}. Default: {DEFAULT_ROOFLINE}."
        ),
    ] = None
    batch: Annotated[
        int, Field(ge=1, description="With --roofline: sequences that share a pass.")
    ] = 1

    def check(self) -> None:
        """Refuse options that contradict one another.

        Raises:
            ContradictoryOptionsError: there is more than one source of costs, or a batch for
                costs that have their own, or no such roofline.
        """
        named = {"--model": self.model, "--costs": self.costs, "--roofline": self.roofline}
        given = [option for option, value in named.items() if value is not None]
        if len(given) > 1:
            raise ContradictoryOptionsError(
                f"{' and '.join(given)} exclude each other: costs come from one place"
            )
        if self.batch != 1 and (self.model or self.costs):
            raise ContradictoryOptionsError(
                f"--batch is for --roofline: costs of {given[0]} hold for the batch that they "
                "were measured with"
            )
        if self.roofline is not None and self.roofline not in ROOFLINES:
            raise ContradictoryOptionsError(
                f"--roofline {self.roofline}: there are {', '.join(ROOFLINES)}; for others, "
                "measure with --model or give --costs"
            )

    def curve(self, max_nodes: int) -> CostCurve:
        """Return what passes cost, up to so many nodes.

        Raises:
            DecoderError: the model or the file cannot be used.
        """
        if self.costs is not None:
            return from_file(self.costs).reaching(max_nodes)
        if self.model is None:
            return roofline(self.roofline or DEFAULT_ROOFLINE, self.batch, max_nodes)
        chosen = ModelSettings(model=self.model, dtype=self.dtype, device=self.device)
        language_model = load_model(
            ModelOptions(self.model, chosen.device, chosen.dtype, chosen.attention)
        )
        return measured(language_model, store_at(self.cost_cache)).reaching(max_nodes)


@errors_in_one_line(*FORESEEN)
@with_flags
def run_estimate(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="Recorded traffic, of which each turn of the assistant is an output: .jsonl (.gz "
            "too), .json, .csv or .parquet with `messages`, `conversations`, `prompt` and "
            "`output`, `request` and `response` and the like; or `prompt_ids` and `output_ids`.",
        ),
    ],
    *,
    chosen: LogSettings,
    drafts: EstimatedDrafts,
    costs: CostSettings,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, too (.png or .svg).", rich_help_panel="Output"),
    ] = None,
    as_json_: AsJson = False,
) -> None:
    """Say from recorded prompts and outputs whether drafts would help, and how much.

    The log is replayed without a model: a draft changes no output, so the
    tokens that each pass would have brought are known. Each record drafts
    from its own prompt and from the outputs before it, as in service. Prompt
    lookup and SuffixDecoding are replayed next to it.

    Time follows from what a pass costs by the nodes that it verifies, and from
    how long drafting takes here. Measure passes with --model where you would
    run it. By default they are those of an 8B model on one H100, computed from
    its data sheet.

    What of the log cannot be read is skipped, and standard error says how much,
    where and why. The last line is the answer. The status is 0 whatever it is.
    """
    drafts.check()
    costs.check()
    if plot is not None:
        check_plot(plot)
    check_files(drafts.index, [])
    encoder = ChatEncoder(chosen.tokenizer or costs.model, indexed_tokenizer(drafts.index))
    curve = costs.curve(drafts.budgets[-1])
    console = Console(stderr=True)
    found = RecordingTally()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        rows = islice(stream_traces(log, encoder, found), chosen.limit)
        tokenising = progress.add_task("tokenising", total=None)
        with token_log(progress.track(rows, task_id=tokenising), chosen.by) as records:
            for line in found.describe():
                progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            rules = drafting_rules(drafts.index, encoder.vocabulary)
            budgets: list[Nodes] = [*drafts.budgets, PAYING]
            outcomes = _replayed(records, rules, budgets, curve, progress)
            crowded = _crowded(records, rules, curve, drafts.budgets[-1])
            estimate = _estimate(outcomes, records, curve, drafts, crowded, encoder.used_tokenizer)
    if plot is not None:
        draw(estimate, plot)
    _show(estimate, is_json=as_json_)


class _Watched:
    """A log that tells whenever a record has been replayed."""

    def __init__(self, log: TokenLog, seen: Callable[[], object]) -> None:
        self._log = log
        self._seen = seen

    def __iter__(self) -> Iterator[Record]:
        for record in self._log:
            yield record
            self._seen()


def _replayed(
    log: TokenLog,
    rules: list[DraftingRule],
    budgets: list[Nodes],
    curve: CostCurve,
    progress: Progress,
) -> list[Outcome]:
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
    outcomes: list[Outcome],
    records: TokenLog,
    curve: CostCurve,
    drafts: EstimatedDrafts,
    crowded: Crowded | None,
    tokenizer: str | None,
) -> Estimate:
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
    return Estimate(outcomes[0], outcomes[1:], curve, records.kinds, records.field, taken, crowded)


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
