"""Slow and obvious twins of the kernels that keep a cursor in a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retriever.predict.databases import Databases
from retriever.tree import DraftTree, Source
from tests.retriever.kernels.twins.row_twins import Row, copy_from, match_length

LONG = 8
REACH = 96
LOST = 64
MOST = 4
NEAR = 8.0
BLIND = 0.5


@dataclass(frozen=True)
class CursorTwin:
    """The expected position, None for none, and how many tokens have not agreed since."""

    place: int | None
    misses: int

    def moved(self, tokens: Sequence[int], begin: int) -> "CursorTwin":
        """What `move_cursor` makes of the tokens from `begin` on."""
        if self.place is None:
            return self
        new, agreeing = tokens[begin:], 0
        if self.misses == 0:
            expected = tokens[self.place :]
            while new[: agreeing + 1] == expected[: agreeing + 1] and agreeing < len(new):
                agreeing += 1
        misses = self.misses + len(new) - agreeing
        if misses > LOST:
            return CursorTwin(None, LOST + 1)
        return CursorTwin(self.place + agreeing, misses)

    def set(self, matches: Sequence[tuple[int, int]]) -> "CursorTwin":
        """What `set_cursor` makes of the places that were found, each with its match length."""
        longest = max((match for _, match in matches), default=0)
        if longest < LONG:
            return self
        places = [place for place, match in matches if match == longest]
        if self.misses == 0 and self.place in places:
            return self
        return CursorTwin(places[0], 0)

    def rows(
        self, tokens: Sequence[int], query: Sequence[int], depth: int, room: int
    ) -> list[tuple[int, Row]]:
        """What `collect_cursor` finds: places and what follows there."""
        if self.place is None or self.misses == 0 or depth == 0:
            return []
        blind = (self.place, self.place + self.misses)
        rows: list[tuple[int, Row]] = []
        spoken_for = 0
        for place in range(len(tokens))[self.place : self.place + REACH]:
            match = match_length(tokens, place - 1, 0, query)
            if spoken_for < MOST and (match > 0 or place in blind):
                continuation = copy_from(tokens, place, wrap=True, depth=depth)
                count = NEAR if match > 0 else BLIND
                rows.append((place, Row(continuation, max(match, 1), count, Source.CONTEXT)))
                spoken_for += match > 0
        return rows[:room]


_DRAFT = Databases.draft


def draft_without_cursor(databases: Databases, *args: Any) -> tuple[DraftTree, int]:
    """In place of `Databases.draft`: forgets where the cursor stood, so that it has no effect."""
    databases.context._store.cursor[:] = -1, 0
    return _DRAFT(databases, *args)
