"""A database of your own: texts that outputs often contain word for word, such as licence headers.

`use(texts)` registers it, for this process and before its first drafter is made; the rest is as
ever. Run as a program, it shows a draft: `python examples/known_texts.py`.
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

# Its nodes are marked with a source of its own, which figures and `explain` show.
KNOWN_TEXTS = Source.register(len(Source), "KNOWN_TEXTS", "#56b4e9")

NUM_MATCHED = 2  # tokens that are looked up
MOST_ROWS = 32  # places in one draft: there are 1,024 rows for all databases together


class KnownTexts:
    """Where each pair of tokens is followed by others. All sequences share it: it keeps no state.

    Args:
        texts: token ids of each, inside the vocabulary: what is drafted is not checked again.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._followed: dict[tuple[int, ...], list[Sequence[int]]] = defaultdict(list)
        for text in texts:
            for place in range(NUM_MATCHED, len(text)):
                self._followed[tuple(text[place - NUM_MATCHED : place])].append(text[place:])

    def collect(self, question: Question, row: int) -> int:
        """Write a row of evidence for each place where the last tokens stand."""
        pair = tuple(question.query[-NUM_MATCHED:].tolist())
        for followed in self._followed.get(pair, [])[:MOST_ROWS]:
            row = write_row(question, row, KNOWN_TEXTS, Occurrence(followed, NUM_MATCHED))
        return row

    def commit(self, tokens: TokenIds) -> None:
        """Do nothing: the question has the last tokens."""

    @contextmanager
    def supposing(self, tokens: TokenIds, last: TokenIds) -> Iterator[None]:  # noqa: ARG002
        """Do nothing: the question has the tokens that may come, too."""
        yield


def use(texts: Iterable[Sequence[int]]) -> None:
    """Have all drafters that are made from now on draft from these texts, too."""
    known = KnownTexts(texts)
    # Trusted as much as predictions are: both are named because they are expected.
    register_database(DatabaseKind(KNOWN_TEXTS, trust=3.0, open=lambda _: known))


if __name__ == "__main__":
    use([[11, 12, 13, 14, 15]])
    tree = EmbeddedDrafter().draft_context([7, 11, 12], budget_nodes=3)
    print(tree.token_ids.tolist(), [Source(each).label for each in tree.sources.tolist()])
