"""Slow and obvious twins of the kernels that keep a cursor in a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from retriever.kernels.layout import MAX_MATCH
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


@dataclass(frozen=True)
class TextCursorTwin:
    """A cursor in one text of a store, from `begin` up to its separator before `end`."""

    begin: int
    end: int
    place: int | None
    misses: int
    agreed: int

    def moved(self, store: Sequence[int], new: Sequence[int]) -> "TextCursorTwin":
        """What `move_text_cursors` makes of tokens that a sequence went on with."""
        if self.place is None:
            return self
        agreeing = 0
        if self.misses == 0:
            expected = store[self.place : self.end]
            while new[: agreeing + 1] == expected[: agreeing + 1] and agreeing < len(new):
                agreeing += 1
        missed = len(new) - agreeing
        agreed = self.agreed + agreeing
        if self.misses + missed > LOST:
            return replace(self, place=None, misses=LOST + 1, agreed=agreed)
        return replace(
            self, place=self.place + agreeing, misses=self.misses + missed, agreed=agreed
        )

    def set(self, matches: Sequence[tuple[int, int]]) -> "TextCursorTwin":
        """What `set_text_cursors` makes of places of the whole store, each with its match."""
        within = [(place, match) for place, match in matches if self.begin <= place < self.end]
        longest = max((match for _, match in within), default=0)
        agreed = self.agreed if self.place is not None and self.misses == 0 else 0
        if longest < LONG or min(agreed, MAX_MATCH) >= longest:
            return self
        place = next(place for place, match in within if match == longest)
        return replace(self, place=place, misses=0, agreed=longest)

    def expected(self) -> tuple[int, int] | None:
        """The place that must come next, and the match that speaks for it."""
        if self.place is None or self.misses:
            return None
        return self.place, min(self.agreed, MAX_MATCH)

    def rows(self, store: Sequence[int], query: Sequence[int], depth: int) -> list[tuple[int, Row]]:
        """What `collect_text_cursors` adds for it where no match has found its place."""
        text = store[: self.end]
        if (expected := self.expected()) is not None:
            place, match = expected
            return _rows_at(text, [(place, match, 1.0)], depth)
        if self.place is None:
            return []
        offered: list[tuple[int, int, float]] = []
        for place in range(self.place, min(self.place + REACH, self.end)):
            if sum(bool(_rows_at(text, [each], depth)) for each in offered if each[2] > 1) == MOST:
                break
            match = match_length(store, place - 1, self.begin, query)
            if match > 0 or place in (self.place, self.place + self.misses):
                offered.append((place, max(match, 1), NEAR if match > 0 else BLIND))
        return _rows_at(text, offered, depth)


def _rows_at(
    text: Sequence[int], offered: Sequence[tuple[int, int, float]], depth: int
) -> list[tuple[int, Row]]:
    """Rows of places, each with its match and count; nothing follows a separator."""
    rows = []
    for place, match, count in offered:
        continuation = copy_from(text, place, wrap=False, depth=depth)
        if continuation:
            rows.append((place, Row(continuation, match, count, Source.PREDICTIONS)))
    return rows
