"""Options for building an index and for adding to one."""

import os
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from indexer.build_report import BuildTally
from indexer.engines import Engine, Serial
from indexer.engines.memory import default_limit, describe_size
from indexer.engines.processes import ProcessPool
from indexer.errors import IndexerError, SourceError
from indexer.format.names import MAX_POSITIONS
from indexer.launch import Flag, plugged
from indexer.sources import ChatTemplate, SourceOptions, Turns
from indexer.stages.screening import Screening
from indexer.stages.segments import MAX_SEGMENT_TOKENS, sorting_bytes
from indexer.tokenizer import CoreTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENGINES: Final = ("processes", "ray", "serial")

_PROCESS_BYTES: Final = 512 << 20
"""Of a build's own process and a worker, besides the data that is sorted; an estimate."""

_LEAST_SEGMENT_TOKENS: Final = 1 << 20
"""Smaller segments would save little memory, as a process takes more than sorting a million tokens,
and every look-up searches each segment."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How an index is built; every value has a default that fits most corpora.

    Attributes:
        sources: how sources are found and read; documents that are longer than its limit are
            skipped wherever they come from.
        segment_tokens: a segment with more tokens holds a single document; from 1 to
            `MAX_POSITIONS`, beyond which positions do not fit the format.
        keep_duplicates: index a document as often as it occurs.
        strict: the build fails if more than this share of the records and files could not be read,
            from 0 to 1; None if any share will do. What a rule passes over does not count.
        replace: documents that are added take the place of those of the same name, such as earlier
            versions of a file; without it these stay, and are counted.
        keep_texts: store the texts as well, so that the index can be built for another tokenizer.
        overwrite: replace an index that is at the output path already.
        resume: go on with what an earlier build of the same output has done, if that was killed or
            failed: parts and segments of which nothing has changed are not made again. If this
            build fails, what it has done stays for the next one; and so it does if it is killed.
            Only builds of sources are resumed.
        screen: what must not get into the index, if anything; texts are screened, not tokens.
        engine: where the stages run. Segments are smaller if sorting one would take more than the
            engine's memory; otherwise the engine does not affect how the index is divided.

    Raises:
        IndexerError: `segment_tokens` or `strict` is out of its range.
    """

    flags_title: ClassVar[str] = "Index"

    sources: SourceOptions = SourceOptions()  # noqa: RUF009  (it never changes)
    segment_tokens: Annotated[
        int,
        Flag(
            "Begin a new segment rather than exceed this. Sorting one takes some "
            "ten bytes of memory per token; look-ups take longer with more segments.",
            least=1,
            most=MAX_POSITIONS,
        ),
    ] = MAX_SEGMENT_TOKENS
    keep_duplicates: Annotated[
        bool,
        Flag(
            "Index a text as often as it occurs. Without this, documents whose text "
            "is equal to that of one before are left out and counted."
        ),
    ] = False
    strict: Annotated[
        float | None,
        Flag(
            "End with status 1, and change nothing, if more than this share of records "
            "and files could not be read: 0.01 tolerates one in a hundred, 0 none. Files passed "
            "over by their names, empty texts and duplicates do not count.",
            metavar="SHARE",
            least=0,
            most=1,
        ),
    ] = None
    replace: Annotated[
        bool,
        Flag(
            "Put documents in the place of those that the index holds under the same "
            "names: new versions of files. Without it both are drafted from, and the report "
            "counts them."
        ),
    ] = False
    keep_texts: Annotated[
        bool,
        Flag(
            "Keep the texts in the index, compressed, so that it can be built for "
            "another tokenizer without its sources."
        ),
    ] = False
    overwrite: Annotated[bool, Flag("Replace the index at DIR once the new one is whole.")] = False
    resume: Annotated[
        bool,
        Flag(
            "Go on where an earlier build of DIR with --resume was killed or failed: "
            "what it had read and sorted is taken over if sources, tokenizer and options are the "
            "same. If this build fails, what it has done stays, next to DIR, for another."
        ),
    ] = False
    screen: Screening | None = None
    engine: Engine = Serial()  # noqa: RUF009  (it has no state)

    def __post_init__(self) -> None:
        if not 1 <= self.segment_tokens <= MAX_POSITIONS:
            raise IndexerError(
                f"a segment cannot be limited to {self.segment_tokens} tokens: "
                f"choose from 1 to {MAX_POSITIONS}"
            )
        if self.strict is not None and not 0 <= self.strict <= 1:
            raise IndexerError(
                f"a share of {self.strict} cannot be dropped: choose from 0 to 1, "
                "such as 0.01 for one record in a hundred"
            )

    @property
    def needs_template(self) -> bool:
        """Whether conversations are written by a chat template, if the tokenizer has one."""
        return self.sources.turns == Turns.ALL and self.sources.template is None

    def with_template_of(
        self, tokenizer: "CoreTokenizer | PreTrainedTokenizerBase"
    ) -> "BuildOptions":
        """Return the options with a tokenizer's chat template, where one is needed and there."""
        if not self.needs_template or not tokenizer.chat_template:
            return self
        special = tokenizer.special_tokens_map.items()
        template = ChatTemplate(
            str(tokenizer.get_chat_template()),
            tuple((name, text) for name, text in special if isinstance(text, str)),
        )
        return replace(self, sources=replace(self.sources, template=template))

    def with_licence(self, stated: str, index: Path) -> "BuildOptions":
        """Return the options with the licence that was stated for an index, if none is stated now.

        Args:
            stated: for the index; empty if none was.
            index: its folder, for messages.
        """
        if not stated or self.sources.licence:
            return self
        _log.info("the licence is %s, as was stated for %s", stated, index)
        return replace(self, sources=replace(self.sources, licence=stated))

    def check_dropped(self, tally: BuildTally) -> None:
        """Check that no more than the allowed share could not be read.

        Raises:
            SourceError: more was dropped.
        """
        most = self.strict
        if most is None or tally.dropped_share <= most:
            return
        raise SourceError(
            f"{tally.num_dropped:,} of {tally.num_dropped + tally.num_documents:,} records and "
            f"files ({tally.dropped_share:.1%}) could not be read, more than --strict {most:g} "
            f"allows: {tally.describe_skipped()}"
        )

    def for_blocks(self, num_blocks: int) -> "BuildOptions":
        """Return the options for so many blocks: a single one is read in this process."""
        if num_blocks > 1 or not isinstance(self.engine, ProcessPool):
            return self
        return replace(self, engine=Serial(self.engine.memory_bytes))

    def most_tokens(self, vocabulary_size: int) -> int:
        """Return the most tokens of a segment: halved until sorting one fits into the memory.

        Args:
            vocabulary_size: largest token id plus one.

        Raises:
            IndexerError: there is too little memory for any.
        """
        most, memory_bytes = self.segment_tokens, self.engine.memory_bytes
        if memory_bytes is None:
            return most
        free = memory_bytes - _PROCESS_BYTES
        while sorting_bytes(most, vocabulary_size) > free and most > 1:
            most //= 2
        if most < min(self.segment_tokens, _LEAST_SEGMENT_TOKENS):
            least = _PROCESS_BYTES + sorting_bytes(_LEAST_SEGMENT_TOKENS, vocabulary_size)
            raise IndexerError(
                f"{describe_size(memory_bytes)} of memory is too little for a build: "
                f"allow {describe_size(least)} at least with --memory"
            )
        if most < self.segment_tokens:
            _log.info(
                "segments of at most %s tokens, so that sorting one stays within %s of memory",
                f"{most:,}",
                describe_size(memory_bytes),
            )
        return most


DEFAULTS: Final = BuildOptions()


def engine_of(kind: str, workers: int | None = None, memory_bytes: int | None = None) -> Engine:
    """Return where to run.

    Args:
        kind: one of `ENGINES`.
        workers: processes at once, at most; by default as many as this process has processors.
        memory_bytes: for this process and the workers together; by default half of what is
            available.

    Raises:
        IndexerError: there is no such engine, or it cannot have so few workers.
        MissingPluginError: the engine is a plugin that is not there.
    """
    limit = default_limit() if memory_bytes is None else memory_bytes
    number = len(os.sched_getaffinity(0)) if workers is None else workers
    if kind == "processes":
        return ProcessPool(number, limit)
    if kind == "serial":
        return Serial(limit)
    if kind == "ray":
        cluster: Engine = plugged("indexer.plugins.ray.ray_cluster", "--engine ray").RayCluster(
            number, limit
        )
        return cluster
    raise IndexerError(f"there is no engine {kind!r}: choose from {', '.join(ENGINES)}")
