"""The command that answers one prompt or a file of prompts."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import typer

from decoder.assembly import Extent, assemble, check_drafts, connect_drafter, grammar_for, own_rule
from decoder.budget.cost_store import store_at
from decoder.commands.answers import FORESEEN, Answerer, PassWriter, Printer
from decoder.commands.generate import AnswerOptions, Interruption
from decoder.commands.options import AnsweredPrompts, Colouring, ModelSettings, ShownSettings
from decoder.commands.plain_comparison import PlainAnswers
from decoder.commands.prompts import (
    DEFAULT_CATEGORY,
    Prompt,
    checked_text,
    read_predictions,
    read_prompts,
    read_text,
)
from decoder.commands.terminal import Palette
from decoder.drafters.options import DraftOptions
from decoder.errors import (
    InvalidPromptError,
    UnknownTokenError,
    refuse_contradictions,
)
from decoder.model.pretrained import LanguageModel, PreparedModel, prepare_model
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.stopping import StopStrings, check_stop_strings, special_ids
from indexer.launch import errors_in_one_line, plugged
from indexer.sources.recordings import RecordingTally
from retriever.drafter import SequenceOptions
from retriever.predict.grammar.grammars import grammar_of


@errors_in_one_line(*FORESEEN)
def answer_prompts(
    chosen: ModelSettings,
    drafts: DraftOptions,
    given: AnsweredPrompts,
    output: ShownSettings,
    sampling: SamplingSettings,
    *,
    as_json: bool,
) -> None:
    """Answer a prompt or a file of prompts; see `foredraft generate --help`."""
    _refuse_contradictions(given, output, as_json=as_json)
    palette = Palette() if not as_json and output.colour.applies_to(sys.stdout) else None
    check_drafts(drafts)
    settings = drafts.sampling(sampling)
    grammar = _grammar(output)
    traces = _traces(output)
    stops = StopStrings(output.stop)
    selected = _selected(given)
    prepared = prepare_model(chosen.options(given, drafts.index))
    check_drafts(drafts, prepared.vocabulary)
    check_stop_strings(stops, prepared.tokenizer)
    extra_ids = [*_known(output.stop_id, prepared), *special_ids(stops, prepared.tokenizer)]
    _check_prompts(selected, prepared, is_single=given.prompts is None)
    if given.forget and not drafts.server and given.prompts is None:
        typer.echo("--forget has no effect here: without --server nothing is stored", err=True)
    encode = partial(prepared.tokenizer.encode, add_special_tokens=False)
    options = AnswerOptions(
        output.max_new_tokens,
        stops,
        output.include_stop,
        drafting=SequenceOptions(
            remember=not given.forget,
            predictions=tuple(read_predictions(given.prediction, encode)),
            group=given.group,
        ),
    )
    printer = Printer(
        as_json=as_json,
        is_single=given.prompts is None,
        num_prompts=len(selected),
        palette=palette,
        indexes=drafts.index,
    )
    interruption = Interruption()
    with ExitStack() as stack:
        stack.enter_context(interruption.handled())
        writer: PassWriter | None = None
        if traces is not None:
            writer = stack.enter_context(
                traces.written_passes(output.trace, output.html, prepared.tokenizer, drafts.index)
            )
        language_model = _stopping_at(extra_ids, prepared.load())
        pattern = grammar_for(language_model, grammar)
        drafter = stack.enter_context(connect_drafter(drafts, language_model, settings))
        decoder = assemble(
            language_model,
            drafter,
            own_rule(language_model, settings, pattern),
            costs=store_at(chosen.cost_cache),
            num_ahead=drafts.draft_ahead,
            prepared=None if given.prepare is None else Extent(given.prepare, given.parallel),
        )
        answerer = Answerer(
            decoder,
            language_model,
            options,
            printer,
            writer=writer,
            interruption=interruption,
            pattern=pattern,
            comparison=PlainAnswers(decoder, language_model, options) if output.compare else None,
            parallel=given.parallel,
        )
        answerer.run(selected)
    if answerer.is_interrupted:
        raise typer.Exit(interruption.status)
    if answerer.num_failed:
        raise typer.Exit(1)


def _traces(output: ShownSettings) -> Any:
    """Return the plugin that writes traces and pages; `None` if neither is requested."""
    if output.trace is None and output.html is None:
        return None
    asked = "--html" if output.trace is None else "--trace"
    traces = plugged("decoder.plugins.trace.viewer.trace_page", asked)
    traces.check_written(output.trace, output.html)
    return traces


def _refuse_contradictions(given: AnsweredPrompts, output: ShownSettings, *, as_json: bool) -> None:
    """Refuse options that exclude each other.

    Raises:
        ContradictoryOptionsError: two given options exclude each other.
    """
    is_one, is_parallel = given.prompts is None, given.parallel > 1
    alone = {"--compare": output.compare, "--trace": output.trace, "--html": output.html}
    refuse_contradictions(
        (
            as_json and output.colour is Colouring.ALWAYS,
            "--colour always and --json exclude each other",
        ),
        (is_one and given.limit is not None, "--limit is for a file of prompts: --prompts"),
        (
            not is_one and given.prompt is not None,
            "--prompt and --prompts exclude each other: put the prompt into the file",
        ),
        (is_one and is_parallel, "--parallel is for a file of prompts: --prompts"),
        *(
            (
                is_parallel and is_given,
                f"{flag} and --parallel exclude each other: {flag} is for one answer at a time",
            )
            for flag, is_given in alone.items()
        ),
    )


def _grammar(output: ShownSettings) -> str | None:
    """Return the grammar that answers have to match; `None` if there is none.

    Raises:
        InvalidConstraintError: a schema cannot be read, or several options are given.
    """
    constraint = output.constraint()
    return None if constraint is None else grammar_of(constraint)


def _selected(given: AnsweredPrompts) -> list[Prompt]:
    """Return the prompts in the order of the file."""
    if given.prompts is None:
        text = read_text(sys.stdin.buffer) if given.prompt is None else given.prompt
        return [Prompt(DEFAULT_CATEGORY, checked_text(text))]
    found = RecordingTally(field=given.field)
    selected = read_prompts(given.prompts, given.limit, skipped=found)
    for line in found.describe():
        typer.echo(line, err=True)
    return sorted(selected, key=lambda prompt: prompt.line)


def _check_prompts(prompts: Sequence[Prompt], prepared: PreparedModel, *, is_single: bool) -> None:
    """Before the weights load, refuse options with which no prompt can be answered."""
    with suppress(*(() if is_single else (InvalidPromptError,))):
        prepared.check_prompt(prompts[0].text)


def _known(ids: Sequence[int], prepared: PreparedModel) -> Sequence[int]:
    size = prepared.vocabulary.size
    for token in ids:
        if not 0 <= token < size:
            raise UnknownTokenError(
                f"--stop-id {token} is not a token: this model's ids are from 0 to {size - 1}"
            )
    return ids


def _stopping_at(ids: Sequence[int], language_model: LanguageModel) -> LanguageModel:
    return replace(language_model, stop_ids=(*language_model.stop_ids, *ids))
