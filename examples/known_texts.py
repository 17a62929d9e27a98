"""A custom database: texts that outputs often repeat word for word, such as licence headers.

`use(texts)` registers the database for this process. Call it before the first drafter is created;
nothing else changes. Run this file to see a draft: `python examples/known_texts.py`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from foredraft import (
    DatabaseKind,
    EmbeddedDrafter,
    Occurrence,
    Question,
    Source,
    TokenIds,
    register_database,
    write_row,
)

# Nodes from this database carry their own source, which statistics and `explain` show.
KNOWN_TEXTS = Source.register(len(Source), "KNOWN_TEXTS", "#56b4e9")

NUM_MATCHED = 2  # number of last tokens that are looked up
MOST_ROWS = 32  # most matches in one draft; all databases together have 1,024 rows


class KnownTexts:
    """Finds where a text contains the last two tokens. It has no state, so sequences share it.

    Args:
        texts: token ids of each text. They must be inside the vocabulary, because drafts are not
            checked again.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._followed: dict[tuple[int, ...], list[Sequence[int]]] = defaultdict(list)
        for text in texts:
            for place in range(NUM_MATCHED, len(text)):
                self._followed[tuple(text[place - NUM_MATCHED : place])].append(text[place:])

    def collect(self, question: Question, row: int) -> int:
        """Write one row of evidence for each place in the texts where the last tokens occur."""
        pair = tuple(question.query[-NUM_MATCHED:].tolist())
        for followed in self._followed.get(pair, [])[:MOST_ROWS]:
            row = write_row(question, row, KNOWN_TEXTS, Occurrence(followed, NUM_MATCHED))
        return row

    def commit(self, tokens: TokenIds) -> None:
        """Do nothing, because the question contains the last tokens."""

    @contextmanager
    def supposing(self, tokens: TokenIds, last: TokenIds) -> Iterator[None]:  # noqa: ARG002
        """Do nothing, because the question also contains the supposed tokens."""
        yield


def use(texts: Iterable[Sequence[int]]) -> None:
    """Let all drafters created from now on draft from these texts as well."""
    known = KnownTexts(texts)
    # As trusted as predictions, because the user expects the output to contain both.
    register_database(DatabaseKind(KNOWN_TEXTS, trust=3.0, open=lambda _: known))


if __name__ == "__main__":
    use([[11, 12, 13, 14, 15]])
    tree = EmbeddedDrafter().draft_context([7, 11, 12], budget_nodes=3)
    print(tree.token_ids.tolist(), [Source(each).label for each in tree.sources.tolist()])
