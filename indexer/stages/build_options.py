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
"""Estimated memory of a build's main process and one worker, without the data that is sorted."""

_LEAST_SEGMENT_TOKENS: Final = 1 << 20
"""Fewest tokens of a segment. Smaller segments would save little memory, because a process takes
more than sorting a million tokens does. They would also slow down look-ups, which search each
segment."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How an index is built. The default values fit most corpora.

    Attributes:
        sources: how sources are found and read. Its length limit also applies to texts that the
            caller passes in memory.
        segment_tokens: most tokens of a segment, except for a single longer document. From 1 to
            `MAX_POSITIONS`; larger positions do not fit the format.
        keep_duplicates: whether to index duplicate documents.
        strict: largest share of the records and files that may be unreadable, from 0 to 1, before
            the build fails; None for any share. Files that a rule skips do not count.
        replace: whether an added document replaces indexed documents of the same name, such as
            earlier versions of a file. Otherwise they stay and are counted.
        keep_texts: whether to store the texts as well, so that the index can be rebuilt for another
            tokenizer.
        overwrite: whether to replace an existing index at the output path.
        resume: whether to continue an earlier build of the same output that was killed or failed.
            Unchanged parts and segments are not rebuilt. If this build fails or is killed, its
            results stay for the next one. Only builds from sources can be resumed.
        screen: what to exclude from the index, if anything. Only texts are screened, not tokens.
        engine: where the stages run. Segments are smaller if sorting one would exceed the engine's
            memory; otherwise the engine does not affect how the index is divided.

    Raises:
        IndexerError: `segment_tokens` or `strict` is out of range.
    """

    flags_title: ClassVar[str] = "Index"

    sources: SourceOptions = SourceOptions()  # noqa: RUF009  (it is immutable)
    segment_tokens: Annotated[
        int,
        Flag(
            "Most tokens of a segment. Sorting a segment takes about ten bytes of memory per "
            "token. Look-ups take longer with more segments.",
            least=1,
            most=MAX_POSITIONS,
        ),
    ] = MAX_SEGMENT_TOKENS
    keep_duplicates: Annotated[
        bool,
        Flag(
            "Index duplicates as well. By default, a document with the same text as an earlier "
            "one is left out and counted."
        ),
    ] = False
    strict: Annotated[
        float | None,
        Flag(
            "End with status 1, and change nothing, if more than this share of records "
            "and files could not be read: 0.01 tolerates one in a hundred, 0 none. Files "
            "skipped by name, empty texts and duplicates do not count.",
            metavar="SHARE",
            least=0,
            most=1,
        ),
    ] = None
    replace: Annotated[
        bool,
        Flag(
            "Replace indexed documents of the same names, such as older versions of files. By "
            "default, drafts come from both versions, and the report counts them."
        ),
    ] = False
    keep_texts: Annotated[
        bool,
        Flag(
            "Store the texts in the index, compressed, so that it can be rebuilt for another "
            "tokenizer without its sources."
        ),
    ] = False
    overwrite: Annotated[bool, Flag("Replace the index at DIR once the new one is done.")] = False
    resume: Annotated[
        bool,
        Flag(
            "Continue a build of DIR that was started with --resume and was killed or failed. "
            "What it had read and sorted is reused if sources, tokenizer and options are the "
            "same. If this build fails, its results stay next to DIR for the next one."
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
        """Whether the tokenizer's chat template, if it has one, formats conversations."""
        return self.sources.turns == Turns.ALL and self.sources.template is None

    def with_template_of(
        self, tokenizer: "CoreTokenizer | PreTrainedTokenizerBase"
    ) -> "BuildOptions":
        """Return the options with a tokenizer's chat template, if it is needed and exists."""
        if not self.needs_template or not tokenizer.chat_template:
            return self
        special = tokenizer.special_tokens_map.items()
        template = ChatTemplate(
            str(tokenizer.get_chat_template()),
            tuple((name, text) for name, text in special if isinstance(text, str)),
        )
        return replace(self, sources=replace(self.sources, template=template))

    def with_licence(self, stated: str, index: Path) -> "BuildOptions":
        """Return the options with the index's stated licence, unless they already have a licence.

        Args:
            stated: licence that was stated when the index was built; empty if none was.
            index: folder of the index, for messages.
        """
        if not stated or self.sources.licence:
            return self
        _log.info("the licence is %s, as was stated for %s", stated, index)
        return replace(self, sources=replace(self.sources, licence=stated))

    def check_dropped(self, tally: BuildTally) -> None:
        """Check that the share of unreadable records and files is within the limit.

        Raises:
            SourceError: the share is above the limit.
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
        """Return the options for a number of blocks. A single block is read in this process."""
        if num_blocks > 1 or not isinstance(self.engine, ProcessPool):
            return self
        return replace(self, engine=Serial(self.engine.memory_bytes))

    def most_tokens(self, vocabulary_size: int) -> int:
        """Return the most tokens of a segment, halved until sorting a segment fits into memory.

        Args:
            vocabulary_size: largest token id plus one.

        Raises:
            IndexerError: there is too little memory for any segment.
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
                f"allow at least {describe_size(least)} with --memory"
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
    """Return an engine of a kind.

    Args:
        kind: one of `ENGINES`.
        workers: most concurrent processes. By default, as many as this process has processors.
        memory_bytes: memory for this process and the workers together. By default, half of the
            available memory.

    Raises:
        IndexerError: there is no such engine, or it cannot have so few workers.
        MissingPluginError: the engine is a plugin that is not installed.
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
