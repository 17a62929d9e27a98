"""How an index is built or added to."""

from dataclasses import dataclass
from typing import Final

from indexer.engines import Engine, Serial
from indexer.errors import IndexerError
from indexer.format import MAX_POSITIONS
from indexer.screening.screen import NO_SCREENING, ScreenOptions
from indexer.segments import MAX_SEGMENT_TOKENS
from indexer.sources import SourceOptions


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How an index is built; every value has a default that fits most corpora.

    Attributes:
        sources: how sources are found and read; documents that are longer than its limit are
            skipped wherever they come from.
        max_segment_tokens: a segment with more tokens holds a single document; from 1 to
            `MAX_POSITIONS`, beyond which positions do not fit the format.
        overwrite: replace an index that is at the output path already.
        deduplicate: leave out documents that are equal to one before.
        keep_texts: store the texts as well, so that the index can be built for another tokenizer.
        screen: what must not get into the index; texts are screened, not tokens.
        engine: where the stages run.

    Raises:
        IndexerError: `max_segment_tokens` is out of its range.
    """

    sources: SourceOptions = SourceOptions()  # noqa: RUF009  (it never changes)
    max_segment_tokens: int = MAX_SEGMENT_TOKENS
    overwrite: bool = False
    deduplicate: bool = True
    keep_texts: bool = False
    screen: ScreenOptions = NO_SCREENING
    engine: Engine = Serial()  # noqa: RUF009  (it has no state)

    def __post_init__(self) -> None:
        if not 1 <= self.max_segment_tokens <= MAX_POSITIONS:
            raise IndexerError(
                f"a segment cannot be limited to {self.max_segment_tokens} tokens: "
                f"choose from 1 to {MAX_POSITIONS}"
            )


DEFAULTS: Final = BuildOptions()
