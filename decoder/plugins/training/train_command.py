"""The command that trains a speculator."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.assembly import check_drafts
from decoder.commands.answers import FORESEEN
from decoder.commands.options import ModelChoice, PromptSettings
from decoder.commands.terminal import print_table, watching
from decoder.drafters.options import DraftOptions
from decoder.errors import refuse_contradictions
from decoder.model.compatibility import position_limit
from decoder.model.pretrained import LanguageModel, prepare_model
from decoder.observation import Watcher
from decoder.plugins.contenders.standings import in_brackets
from decoder.plugins.training.course import Course, CourseOutcome
from decoder.plugins.training.fused_gain import MAX_PROMPTS, FusedGain, fused_gains
from decoder.plugins.training.judging import RANKS
from decoder.plugins.training.lessons import Lesson, from_outputs, read_lessons
from decoder.plugins.training.options import GainSettings, TaughtTexts, TrainingSettings
from indexer.launch import errors_in_one_line
from indexer.reader import Vocabulary
from indexer.sources.recordings import RecordingTally
from retriever.drafter import TokenIds
from retriever.errors import StateError
from retriever.log.generations_log import GenerationsLog

_MAX_TEXT_TOKENS = 512
"""Most tokens of a prompt, and of an output: more texts train better than longer texts."""

_NO_PROMPTS = (
    "the gain in fused drafts was not measured: the {} held-out outputs were stored without "
    "their prompts; add prompts like yours with --from"
)

_ABOUT_GAINS = (
    "without: retrieval and recycled logits; 90%: bootstrap interval over prompts; draft: "
    "median time, with the head used at every pass"
)

_INTERRUPTED = "interrupted: run the same command to resume"


def _check(compared: GainSettings, vocabulary: Vocabulary | None = None) -> None:
    """Open the indexes once, so that errors in them show before an hour of training.

    Raises:
        ContradictoryOptionsError: there are indexes, but no comparison that would use them.
        IndexerError: an index cannot be opened or was built for another tokenizer.
    """
    useless = compared.index and not compared.gain
    refuse_contradictions((useless, "--index has no effect with --no-gain: leave one out"))
    check_drafts(DraftOptions(index=compared.index), vocabulary)


def _lessons(
    texts: TaughtTexts, language_model: LanguageModel, tally: RecordingTally
) -> list[Lesson]:
    """Read the training examples.

    Raises:
        TeachingTextError: a file cannot be read.
        StateError: the state directory cannot be used.
        VocabularyMismatchError: the state directory holds outputs of another tokenizer.
    """
    most = _most_tokens(language_model)
    found = list(read_lessons(texts.from_, language_model, tally, most))
    if texts.state is not None:
        outputs = _outputs_of(texts.state, texts.tenant, language_model)
        found.extend(from_outputs(outputs, language_model, most))
    return found[: texts.limit]


def _most_tokens(language_model: LanguageModel) -> int:
    """Return the most tokens of a prompt, and of an output, that the model has room for."""
    limit = position_limit(language_model.model.config)
    return _MAX_TEXT_TOKENS if limit is None else min(_MAX_TEXT_TOKENS, limit // 2)


def _outputs_of(state: Path, tenant: str, language_model: LanguageModel) -> list[TokenIds]:
    """Return the outputs of a tenant that a service stored.

    Raises:
        StateError: the directory is missing, in use or damaged.
        VocabularyMismatchError: the directory holds outputs of another tokenizer.
    """
    if not state.is_dir():
        raise StateError(f"there is no state directory {state}: give the --state of a service")
    log = GenerationsLog(state, language_model.vocabulary.fingerprint)
    try:
        return [output.tokens for output in log.load(tenant).outputs]
    finally:
        log.close()


@errors_in_one_line(*FORESEEN)
def teach(
    chosen: ModelChoice,
    texts: TaughtTexts,
    given: TrainingSettings,
    compared: GainSettings,
    *,
    as_json: bool,
) -> None:
    """Train a speculator; see `foredraft train --help`."""
    texts.check()
    _check(compared)
    prepared = prepare_model(chosen.options(PromptSettings(), compared.index))
    _check(compared, prepared.vocabulary)
    language_model = prepared.load()
    tally = RecordingTally(field=texts.field)
    lessons = _lessons(texts, language_model, tally)
    for line in tally.describe():
        typer.echo(line, err=True)
    try:
        with watching() as watcher:
            course = Course(language_model, lessons, given.output, given, watcher)
            outcome = course.run(texts.names())
        if not as_json:
            _print(outcome)
        with watching() as watcher:
            gains = _gains(language_model, outcome, given.output, compared, watcher)
    except KeyboardInterrupt:
        typer.echo(_INTERRUPTED, err=True)
        raise
    if as_json:
        typer.echo(json.dumps(_report(outcome, gains, given.output), indent=2))
    else:
        _print_gains(gains, outcome)
        typer.echo(f"to use it: foredraft generate --speculator {given.output}")


def _gains(
    language_model: LanguageModel,
    outcome: CourseOutcome,
    head: Path,
    compared: GainSettings,
    watcher: Watcher,
) -> list[FusedGain] | None:
    """Return the gains of a head in fused drafts; `None` if they were not requested.

    The list is empty if there are no held-out prompts, as with outputs of a service.
    """
    if not compared.gain:
        return None
    prompts = [each.prompt for each in outcome.judging if not each.is_own]
    chosen = prompts[:: max(1, len(prompts) // MAX_PROMPTS)][:MAX_PROMPTS]
    if not chosen:
        return []
    drafts = DraftOptions(index=compared.index, speculator=head)
    return fused_gains(
        language_model,
        drafts,
        chosen,
        lambda nodes, over, told: watcher(f"drafting {nodes} nodes", over, told),
    )


def _report(outcome: CourseOutcome, gains: list[FusedGain] | None, output: Path) -> dict[str, Any]:
    """Return all figures as plain values; `fused` is `None` if gains were not requested."""
    fused = None if gains is None else [each.report() for each in gains]
    return {"head": str(output), **outcome.report(), "fused": fused}


def _print(outcome: CourseOutcome) -> None:
    for table in _tables(outcome):
        print_table(table)
    typer.echo(
        f"{outcome.num_taught:,} tokens of training text, {outcome.num_own:,} of them written by "
        f"the model; {len(outcome.judging)} held-out prompts"
    )


def _tables(outcome: CourseOutcome) -> Sequence[Table]:
    """Return a table of the shares of held-out tokens that were predicted, by depth."""
    table = Table(title="held-out tokens predicted", box=SIMPLE_HEAD)
    table.add_column("depth")
    for rank in RANKS:
        table.add_column(f"top {rank}", justify="right")
    table.add_column("before training", justify="right")
    for depth, shares in enumerate(outcome.after.shares.tolist()):
        before = " / ".join(f"{share:.2f}" for share in outcome.before.shares[depth].tolist())
        table.add_row(str(depth + 1), *(f"{share:.2f}" for share in shares), before)
    return [table]


def _print_gains(gains: list[FusedGain] | None, outcome: CourseOutcome) -> None:
    """Print the gains of the head in fused drafts, and the cost of its drafts."""
    if gains is None:
        return
    if not gains:
        typer.echo(_NO_PROMPTS.format(len(outcome.judging)))
        return
    table = Table(title="tokens per pass of held-out prompts", box=SIMPLE_HEAD)
    table.add_column("nodes")
    for heading in ("prompts", "without", "with the head", "ratio, 90%", "draft", "of a pass"):
        table.add_column(heading, justify="right")
    for each in gains:
        table.add_row(
            str(each.nodes),
            str(each.num_prompts),
            f"{each.without[0]:.2f}",
            f"{each.with_head[0]:.2f}",
            in_brackets(each.ratio),
            f"{each.draft_ms:.1f} ms",
            f"{each.draft_share:.0%}",
        )
    print_table(table)
    typer.echo(_ABOUT_GAINS)
