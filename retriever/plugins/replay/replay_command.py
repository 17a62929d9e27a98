"""The command that replays recorded outputs through a drafter."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console

from indexer.reader import Index
from indexer.sources.record_samples import show_recording
from indexer.sources.recordings import RecordingTally
from retriever.commands.factories import OWN, find_factory, own_drafter, remote_drafter
from retriever.commands.options import progress
from retriever.drafter import DEFAULT, Drafter, OutputConstraint, SequenceOptions, TokenIds
from retriever.errors import InvalidRequestError
from retriever.operations.settings import DraftSettings, RecordSettings, TokenizerSettings
from retriever.plugins.replay.replay import replay, replay_lanes, tables
from retriever.predict.grammar.grammars import CompiledGrammar, grammar_of
from retriever.sessions.options import check_files, indexed_tokenizer, load_phrases
from retriever.traces.trace_spool import trace_spool
from retriever.traces.traces import REPEATED, ChatEncoder, Trace, read_outputs, read_traces


def replay_traces(
    traces: Path,
    chosen: RecordSettings,
    source: DraftSettings,
    texts: TokenizerSettings,
    constraint: OutputConstraint | None,
    warm: Sequence[Path],
    drafter: str,
    budget: int,
    lanes: int | None,
    limit: int | None,
    calibration_after: int | None,
    *,
    as_json: bool,
) -> None:
    """Replay recorded outputs through a drafter; see `foredraft replay --help`."""
    if chosen.dry_run:
        show_recording(traces, chosen.field)
        return
    make_drafter = find_factory(drafter)
    if drafter != OWN and (source.phrases or source.server or constraint):
        raise InvalidRequestError(
            "--phrases, --server and constraints are for our own drafter: leave out --drafter"
        )
    encoder = ChatEncoder(texts.tokenizer, indexed_tokenizer(source.index))
    check_files(source.index, source.phrases)
    found = RecordingTally(field=chosen.field)
    read = read_traces(traces, encoder, limit, found)
    warming = [read_outputs(path, encoder, found) for path in warm]
    with ExitStack() as opened:
        recorded = opened.enter_context(trace_spool())
        for trace in _allowed(progress(read, "tokenising"), constraint, encoder):
            recorded.write(trace)
        outputs = list(chain.from_iterable(warming))
        for line in found.describe():
            print(line, file=sys.stderr)
        if drafter == OWN and not source.server:
            listed = load_phrases(
                source.phrases,
                encoder.encode_output,
                encoder.vocabulary,
                indexes=source.index,
                track=progress,
            )
            make_drafter = partial(
                own_drafter,
                vocabulary=encoder.vocabulary,
                phrases=listed,
                tokenizer=lambda: encoder.tokenizer,
            )
        indexes = [Index.open(path, vocabulary=encoder.vocabulary) for path in source.index]
        if source.server:
            shown = source.shown_credentials()
            remote = remote_drafter(source.server, outputs, encoder.vocabulary, shown)
            opened.callback(remote.shut_down)
            made: Drafter = remote
        else:
            made = make_drafter(indexes, outputs, budget)
        made = made if constraint is None else _Constrained(made, constraint)
        if lanes is None:
            traced = progress(recorded, "replaying", recorded.num_traces)
            report = replay(made, traced, budget, calibration_after)
        else:
            grouped = progress(list(recorded.lanes()), "replaying")
            report = replay_lanes(made, grouped, budget, lanes, calibration_after)
    counted = {
        "repeats": found.skipped[REPEATED],
        "dropped": found.num_dropped,
        "tokenizer": encoder.used_tokenizer,
        **encoder.fit.as_json(),
    }
    if as_json:
        print(json.dumps({**report.as_json(), "counted": counted}))
        return
    Console().print(*tables(report, counted))
    if encoder.fit.caution:
        print(f"these figures say little: {encoder.fit.caution}")


def _allowed(
    traces: Iterable[Trace], constraint: OutputConstraint | None, encoder: ChatEncoder
) -> Iterator[Trace]:
    """Yield traces whose outputs match a constraint, and say how many do not."""
    if constraint is None:
        yield from traces
        return
    grammar, num_others = CompiledGrammar.of(grammar_of(constraint), encoder.tokenizer), 0
    for trace in traces:
        if grammar.is_match(trace.output.tolist()):
            yield trace
        else:
            num_others += 1
    if num_others:
        print(f"left out, because they do not match the constraint: {num_others}", file=sys.stderr)


class _Constrained:
    """A drafter whose sequences all have one constraint."""

    def __init__(self, drafter: Drafter, constraint: OutputConstraint) -> None:
        self._drafter, self._constraint = drafter, constraint
        self.draft, self.close = drafter.draft, drafter.close

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        """Start a sequence; see `Drafter.open`."""
        self._drafter.open(session, prompt, replace(options, constraint=self._constraint))
