"""The command that measures contenders side by side."""

import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.assembly import check_drafts, grammar_for
from decoder.budget.cost_store import store_at
from decoder.commands.answers import FORESEEN
from decoder.commands.generate import Interruption
from decoder.commands.options import ModelSettings
from decoder.commands.plots import check_plot
from decoder.commands.prompts import Prompt, read_prompts
from decoder.commands.terminal import print_table, watching
from decoder.drafters.options import MAX_NODES, UNDRAWN, DraftOptions
from decoder.errors import InvalidSettingsError, refuse_contradictions
from decoder.model.pretrained import prepare_model
from decoder.plugins.bench.bench import Benchmark, BenchOptions
from decoder.plugins.bench.bench_report import conclusions_of, draw, notes_of, table_of, tables_of
from decoder.plugins.bench.exactness import wrong_outputs
from decoder.plugins.bench.options import (
    AskedTurns,
    ContestOptions,
    MeasuredOutput,
    MeasuredPrompts,
)
from decoder.plugins.contenders.contender import PLAIN, UNDRAFTED
from decoder.plugins.contenders.registry import (
    ASKING_SERVERS,
    DEFAULT,
    ContenderEntry,
    Contest,
    Setting,
    chosen,
    known_entries,
    parallel_default,
)
from indexer.launch import errors_in_one_line
from indexer.sources.recordings import RecordingTally
from retriever.predict.grammar.grammars import grammar_of


class ContestSettings(ContestOptions):
    """The contest options, with the names and settings that follow from them."""

    def names(self, drafts: DraftOptions) -> list[str]:
        """Return the contenders, which always include one to compare the others with.

        Args:
            drafts: the sources of drafts.
        """
        default = parallel_default(drafts) if self.parallel else DEFAULT
        given = [*(self.contender or default), *([self.over] if self.over else [])]
        names = list(dict.fromkeys(given))
        if not {PLAIN, UNDRAFTED} & set(names):
            names.insert(0, PLAIN)
        if any(self.temperature) and UNDRAFTED not in names:
            names.insert(0, UNDRAFTED)
        return names

    @property
    def widths(self) -> list[int]:
        """Numbers of prompts at a time."""
        return list(dict.fromkeys(self.parallel)) or [1]

    @property
    def settings(self) -> list[Setting]:
        """All combinations of settings; seeds only matter with sampling."""
        return list(dict.fromkeys(self._combined()))

    def _combined(self) -> Iterator[Setting]:
        for nodes, temperature, seed in product(
            self.nodes or [0], self.temperature or [0.0], self.seed or [0]
        ):
            yield Setting(nodes or None, temperature, seed if temperature else 0)

    def check(self, drafts: DraftOptions, repeat: int) -> None:
        """Refuse options that cannot be measured, before a model is loaded.

        Args:
            drafts: the sources of drafts.
            repeat: rounds of each setting.

        Raises:
            InvalidSettingsError: a contender is unknown, or a value is out of its range.
            ContradictoryOptionsError: options exclude each other. For example, a contender has
                nothing to draft with or would see answers to the measured prompts, or there are
                seeds without sampling.
            PlotError: a plot cannot be drawn.
        """
        entries = chosen(self.names(drafts))
        self._refuse_contradictions(drafts, repeat, entries)
        for entry in entries:
            entry.check(drafts)
        if any(width < 1 for width in self.parallel):
            raise InvalidSettingsError("--parallel must be 1 or more")
        if not all(0 <= nodes <= MAX_NODES for nodes in self.nodes):
            raise InvalidSettingsError(f"--nodes must be 0 to {MAX_NODES}")
        for setting in self.settings:
            setting.sampling()
        if self.plot is not None:
            check_plot(self.plot)

    def check_count(self, prompts: Sequence[Prompt]) -> None:
        """Refuse fewer prompts than are decoded at a time.

        Raises:
            ContradictoryOptionsError: there are too few; the message says how many.
        """
        most = max(self.parallel, default=0)
        refuse_contradictions(
            (
                len(prompts) < most,
                (
                    f"--parallel {most} needs as many prompts, but there are {len(prompts)}: give "
                    "more, or fewer in parallel"
                ),
            )
        )

    def _refuse_contradictions(
        self, drafts: DraftOptions, repeat: int, entries: Sequence[ContenderEntry]
    ) -> None:
        """Refuse options that exclude each other and runs that would draft from one another."""
        rounds = len(self.settings) * repeat * len(self.widths)
        asking = [each.name for each in entries if each.name in ASKING_SERVERS]
        alone = [each.name for each in entries if not each.takes_many]
        is_sampled = any(self.temperature)
        refuse_contradictions(
            (
                (drafts.state is not None or drafts.server) and rounds > 1,
                (
                    "--state and --server store answers, and the next round would draft from them: "
                    "measure one setting and width without --repeat, or leave them out"
                ),
            ),
            (
                drafts.server and len(asking) > 1,
                (
                    f"--server would show the answers of {' to '.join(asking[:2])}: measure each "
                    "alone, with a freshly started service"
                ),
            ),
            (
                drafts.online is not None,
                "--online would change the speculator while it is measured: leave it out",
            ),
            (
                self.parallel and alone,
                (
                    f"--contender {''.join(alone[:1])} decodes one prompt at a time: leave it out "
                    "with --parallel"
                ),
            ),
            (
                self.parallel and self.turns is AskedTurns.BOTH,
                (
                    "--turns both and --parallel exclude each other: a second turn waits for the "
                    "answer to the first"
                ),
            ),
            (
                self.seed and not is_sampled,
                "--seed has no effect at temperature 0: give a --temperature, or leave it out",
            ),
            (drafts.draft_sampling and not is_sampled, UNDRAWN),
        )


def list_contenders() -> None:
    """Print all contenders."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("contender", "what it is", "paper", "needs"):
        table.add_column(heading)
    known, missing = known_entries()
    for entry in known.values():
        needs = " or ".join("--" + each.replace("_", "-") for each in entry.needs)
        table.add_row(entry.name, entry.summary, entry.paper, needs)
    print_table(table)
    for reason in missing:
        typer.echo(reason, err=True)


@errors_in_one_line(*FORESEEN)
def measure(
    given: MeasuredPrompts,
    options: ContestOptions,
    chosen: ModelSettings,
    drafts: DraftOptions,
    output: MeasuredOutput,
    *,
    as_json: bool,
) -> None:
    """Measure contenders side by side; see `foredraft bench --help`."""
    contest = ContestSettings.model_validate(dict(options))
    constraint = output.constraint()
    chosen.check_device()
    check_drafts(drafts)
    contest.check(drafts, output.repeat)
    found = RecordingTally(field=given.field)
    selected = read_prompts(given.prompts, given.limit, given.per_category, found)
    others = [] if given.warm is None else read_prompts(given.warm, skipped=found)
    for line in found.describe():
        typer.echo(line, err=True)
    contest.check_count(selected)
    bench_options = BenchOptions(
        output.max_new_tokens,
        output.repeat,
        others,
        given.warm_limit,
        contest.turns is AskedTurns.BOTH,
        contest.settings,
        contest.widths,
        is_judged=bool(contest.parallel),
    )
    prepared = prepare_model(chosen.options(given, drafts.index))
    check_drafts(drafts, prepared.vocabulary)
    language_model = prepared.load()
    costs = store_at(chosen.cost_cache)
    pattern = grammar_for(language_model, None if constraint is None else grammar_of(constraint))
    field = Contest(
        language_model, contest.names(drafts), drafts, output.max_new_tokens, costs, pattern
    )
    interruption = Interruption()
    with interruption.handled(), watching() as watcher:
        benchmark = Benchmark(language_model, field.opened, selected, bench_options, watcher)
        is_interrupted = not _measured(benchmark)
    report = benchmark.report()
    report["drafter"] = drafts.describe()
    _print(report, contest, as_json=as_json)
    if contest.plot is not None:
        draw(report, contest.plot)
    if is_interrupted:
        raise typer.Exit(interruption.status)
    if wrong_outputs(report):
        raise typer.Exit(1)


def _measured(benchmark: Benchmark) -> bool:
    """Run a benchmark; return whether it was completed.

    Raises:
        KeyboardInterrupt: nothing was measured.
    """
    try:
        benchmark.run()
    except KeyboardInterrupt:
        if not benchmark.has_measured:
            raise
        return False
    return True


def _print(report: dict[str, Any], contest: ContestSettings, *, as_json: bool) -> None:
    """Print a report as JSON, or as tables with notes."""
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    elif _is_default(contest):
        print_table(table_of(report))
    else:
        if contest.parallel:
            typer.echo("\n".join(conclusions_of(report)))
        for table in tables_of(report, contest.over):
            print_table(table)
        typer.echo("\n".join(notes_of(report)))


def _is_default(contest: ContestSettings) -> bool:
    """Return whether the report shows only our own decoder's figures."""
    given = (contest.contender, contest.nodes, contest.temperature, contest.over, contest.parallel)
    return not any(given)
