"""The command that answers one prompt or a file of them."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from decoder.assembly import DrafterOptions, assemble, draft_model_options, own_rule, pattern_of
from decoder.budget.cost_store import store_at
from decoder.commands.answers import Answerer, Printer
from decoder.commands.generate import AnswerOptions, Interruption
from decoder.commands.options import (
    AsJson,
    AttentionKind,
    CostCache,
    Device,
    DraftModel,
    DraftVocabulary,
    Dtype,
    FrequencyPenalty,
    Limit,
    MaxNewTokens,
    MinP,
    ModelName,
    NoChatTemplate,
    OptionalPromptFile,
    PresencePenalty,
    Recycle,
    Regex,
    RepetitionPenalty,
    Seed,
    System,
    Temperature,
    TopK,
    TopP,
    model_options,
    named_as_options,
)
from decoder.commands.prompts import DEFAULT_CATEGORY, Prompt, checked_text, read_prompts, read_text
from decoder.commands.trace import TraceWriter, check_trace
from decoder.errors import ContradictoryOptionsError, InvalidPromptError, UnknownTokenError
from decoder.loop import DEFAULT_MAX_NEW_TOKENS
from decoder.model.pretrained import (
    Attention,
    LanguageModel,
    Precision,
    PreparedModel,
    prepare_model,
)
from decoder.sampling.constraint import check_regex
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.stopping import StopStrings, check_stop_strings, special_ids
from indexer.launch import INTERRUPTED
from indexer.tokenizer import DEFAULT_MODEL
from retriever.commands.options import CredentialsFile, Indexes, Phrases, Servers, credentials_of


def run_generate(
    *,
    model: ModelName = DEFAULT_MODEL,
    index: Indexes = None,
    server: Servers = None,
    credentials: CredentialsFile = None,
    phrases: Phrases = None,
    draft_model: DraftModel = None,
    draft_vocabulary: DraftVocabulary = None,
    recycle: Recycle = True,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The prompt. Default: standard input, to its end."),
    ] = None,
    prompts: OptionalPromptFile = None,
    limit: Limit = None,
    system: System = None,
    max_new_tokens: MaxNewTokens = DEFAULT_MAX_NEW_TOKENS,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End an answer before this text. Repeatable."),
    ] = None,
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="End an answer behind the --stop text instead.")
    ] = False,
    stop_id: Annotated[
        list[int] | None,
        typer.Option(metavar="ID", help="A token that ends an answer, beside the model's own."),
    ] = None,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    regex: Regex = None,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Keep answers out of later drafts: of the service with --server, of later prompts "
            "with --prompts. Without either, nothing is kept anyway.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a line of JSON for every pass (.gz compresses); `trace` reads it.",
        ),
    ] = None,
    dtype: Dtype = Precision.FLOAT32,
    device: Device = "cpu",
    attention: AttentionKind = Attention.SDPA,
    no_chat_template: NoChatTemplate = False,
    cost_cache: CostCache = None,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt, or each of a file; text goes to standard output, figures to standard error.

    The text of one prompt streams. Those of a file are blocks, or (--json) an object a line, as
    each is done; a prompt that fails is reported, the others go on, and the status is 1.
    """
    modelled = draft_model_options(draft_model, draft_vocabulary)
    drafter_options = DrafterOptions(
        index or (), server or (), phrases or (), modelled, recycle, credentials_of(credentials)
    )
    drafter_options.check()
    with named_as_options():
        settings = SamplingSettings(
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            seed,
        )
    if regex is not None:
        check_regex(regex)
    if trace is not None:
        check_trace(trace)
    stops = StopStrings(stop or ())
    selected = _selected(prompt, prompts, limit)
    prepared = prepare_model(
        model_options(
            model, device, dtype, attention, no_chat_template=no_chat_template, system=system
        )
    )
    drafter_options.check(prepared.vocabulary)
    check_stop_strings(stops, prepared.tokenizer)
    extra_ids = [*_known(stop_id or (), prepared), *special_ids(stops, prepared.tokenizer)]
    _check_prompts(selected, prepared, is_single=prompts is None)
    if forget and not server and prompts is None:
        typer.echo("--forget has no effect here: without --server nothing is kept", err=True)
    options = AnswerOptions(max_new_tokens, stops, include_stop, remember=not forget)
    printer = Printer(as_json=as_json, is_single=prompts is None, num_prompts=len(selected))
    interruption = Interruption()
    with ExitStack() as stack:
        writer = stack.enter_context(TraceWriter(trace, prepared.tokenizer)) if trace else None
        language_model = _stopping_at(extra_ids, prepared.load())
        pattern = pattern_of(language_model, regex)
        drafter = stack.enter_context(drafter_options.connect(language_model))
        decoder = assemble(
            language_model,
            drafter,
            own_rule(language_model, settings, pattern),
            costs=store_at(cost_cache),
        )
        answerer = Answerer(
            decoder,
            language_model,
            options,
            printer,
            writer=writer,
            interruption=interruption,
            pattern=pattern,
        )
        stack.enter_context(interruption.handled())
        answerer.run(selected)
    if answerer.is_interrupted:
        raise typer.Exit(INTERRUPTED)
    if answerer.num_failed:
        raise typer.Exit(1)


def _selected(prompt: str | None, path: Path | None, limit: int | None) -> list[Prompt]:
    """Return the prompts in the order of their file."""
    if path is None:
        if limit is not None:
            raise ContradictoryOptionsError("--limit is for a file of prompts: --prompts")
        text = read_text(sys.stdin.buffer) if prompt is None else prompt
        return [Prompt(DEFAULT_CATEGORY, checked_text(text))]
    if prompt is not None:
        raise ContradictoryOptionsError(
            "--prompt and --prompts exclude each other: put the prompt into the file"
        )
    return sorted(read_prompts(path, limit), key=lambda prompt: prompt.line)


def _check_prompts(prompts: Sequence[Prompt], prepared: PreparedModel, *, is_single: bool) -> None:
    """Refuse what no prompt could be answered with, before the weights are loaded."""
    with suppress(*(() if is_single else (InvalidPromptError,))):
        prepared.check_prompt(prompts[0].text)


def _known(ids: Sequence[int], prepared: PreparedModel) -> Sequence[int]:
    size = prepared.vocabulary.size
    for token in ids:
        if not 0 <= token < size:
            raise UnknownTokenError(
                f"--stop-id {token} is no token: ids of this model are from 0 to {size - 1}"
            )
    return ids


def _stopping_at(ids: Sequence[int], language_model: LanguageModel) -> LanguageModel:
    return replace(language_model, stop_ids=(*language_model.stop_ids, *ids))
