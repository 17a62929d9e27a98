"""The command that replays recorded outputs through a drafter."""

import json
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from indexer.flags import AsJson, with_flags
from indexer.reader import Index
from indexer.sources.recordings import RecordingTally
from retriever.commands.factories import OWN, find_factory, own_drafter, remote_drafter
from retriever.commands.options import clear_errors, progress
from retriever.errors import InvalidRequestError
from retriever.operations.settings import DraftSettings, TokenizerSettings
from retriever.replay.replay import replay, replay_lanes, tables
from retriever.replay.trace_spool import trace_spool
from retriever.replay.traces import ChatEncoder, read_outputs, read_traces
from retriever.sessions.options import (
    DEFAULT_LIMITS,
    check_files,
    indexed_tokenizer,
    load_phrases,
)


@clear_errors()
@with_flags
def replay_traces(
    traces: Annotated[
        Path,
        typer.Argument(
            metavar="TRACES",
            help="Conversations, of which each turn of the assistant is replayed: .jsonl (.gz "
            "too), .json, .csv or .parquet with `messages`, `conversations`, `prompt` and "
            "`output`, `request` and `response` and the like; or `prompt_ids` and `output_ids`.",
        ),
    ],
    *,
    source: DraftSettings,
    texts: TokenizerSettings,
    warm: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Outputs that count as recent generations: files as TRACES. Repeatable.",
            rich_help_panel="Drafts",
        ),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Whose rule drafts: our own, or a name that --drafters knows.",
            rich_help_panel="Drafts",
        ),
    ] = OWN,
    drafters: Annotated[
        str,
        typer.Option(
            metavar="MODULE",
            help="Module with a mapping DRAFTERS of names to factories.",
            rich_help_panel="Drafts",
        ),
    ] = "decoder.contenders.drafting_rules",
    budget: Annotated[
        int,
        typer.Option(
            min=0,
            max=DEFAULT_LIMITS.max_budget_nodes,
            help=f"Nodes in each draft tree, at most {DEFAULT_LIMITS.max_budget_nodes}.",
            rich_help_panel="Drafts",
        ),
    ] = 32,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Replay the traces of a group together, so many at once, step by step: records "
            "that state the same `group`; of these, those that state the same `lane` follow one "
            "another. Our own drafter drafts for each from the others. Without it, traces follow "
            "one another as they are read.",
            rich_help_panel="Drafts",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Replay only the first traces.", rich_help_panel="Report"),
    ] = None,
    calibration: Annotated[
        bool,
        typer.Option(
            help="Report too how often nodes of each probability were accepted.",
            rich_help_panel="Report",
        ),
    ] = False,
    calibration_after: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --calibration: leave out the first so many traces.",
            rich_help_panel="Report",
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Replay recorded outputs and report how many tokens each decoding step would have committed.

    No model is run: a draft changes no output, so what would have been accepted is known. Our own
    drafter also drafts from what a record says that its output was expected to contain: a
    `prediction`, as a text or as OpenAI's API takes it, or a list of `predictions`. What of
    TRACES cannot be read is skipped, and standard error says how much, where and why.
    """
    make_drafter = find_factory(drafter, drafters)
    if drafter != OWN and (source.phrases or source.server):
        raise InvalidRequestError(
            "--phrases and --server are for our own drafter: leave out --drafter"
        )
    encoder = ChatEncoder(texts.tokenizer, indexed_tokenizer(source.index))
    check_files(source.index, source.phrases)
    found = RecordingTally()
    read = read_traces(traces, encoder, limit, found)
    warming = [read_outputs(path, encoder, found) for path in warm or []]
    with trace_spool() as recorded:
        for trace in progress(read, "tokenising"):
            recorded.write(trace)
        outputs = list(chain.from_iterable(warming))
        for line in found.describe():
            print(line, file=sys.stderr)
        if source.server:
            make_drafter = partial(
                remote_drafter,
                source.server,
                vocabulary=encoder.vocabulary,
                credentials=source.shown_credentials(),
            )
        elif drafter == OWN:
            listed = load_phrases(
                source.phrases,
                encoder.encode_output,
                encoder.vocabulary,
                indexes=source.index,
                track=progress,
            )
            make_drafter = partial(own_drafter, vocabulary=encoder.vocabulary, phrases=listed)
        indexes = [Index.open(path, vocabulary=encoder.vocabulary) for path in source.index]
        made = make_drafter(indexes, outputs, budget)
        after = calibration_after if calibration else None
        if lanes is None:
            traced = progress(recorded, "replaying", recorded.num_traces)
            report = replay(made, traced, budget, after)
        else:
            grouped = progress(list(recorded.lanes()), "replaying")
            report = replay_lanes(made, grouped, budget, lanes, after)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        Console().print(*tables(report))
