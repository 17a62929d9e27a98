"""Slow and obvious twins of the kernels that keep a cursor in a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from retriever.drafter import DraftRequest
from retriever.kernels.cursors import begin_cursor
from retriever.kernels.layout import MAX_MATCH
from retriever.predict.databases import Databases
from retriever.predict.draft import Predictor
from retriever.tree import DraftTree, Source
from tests.retriever.kernels.twins.row_twins import Row, bucket_of, copy_from, match_length

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


def _step_without_cursor(
    predictor: Predictor, databases: Databases, request: DraftRequest
) -> DraftTree:
    """In place of `Predictor.step`: forgets where cursors stood, so that they have no effect."""
    predictor.commit(databases, request.new_tokens)
    begin_cursor(databases.context.cursor)
    return predictor.draft(databases, request.budget_nodes, request.min_probability)


def without_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all drafts be those of sequences without a cursor."""
    monkeypatch.setattr(Predictor, "step", _step_without_cursor)


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


MOST_EDITS = 16
LONGEST_EDIT = 8
RESUMED = 4
TRUSTED = 2
EDITED = 2.0

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Edit:
    """Tokens of a source, what took their place, and how far that is expected to happen again."""

    old: Tokens
    new: Tokens
    trust: int = 1


@dataclass(frozen=True)
class TrailTwin:
    """Where the source goes on, how much has disagreed and agreed, and edits, the oldest first.

    The store of the sequence has so many buckets.
    """

    num_buckets: int
    place: int | None = None
    misses: int = 0
    agreed: int = 0
    edits: tuple[Edit, ...] = ()

    def moved(self, tokens: Sequence[int], begin: int) -> "TrailTwin":
        """What `move_trail` makes of the tokens from `begin` on."""
        trail = self
        for end in range(begin + 1, len(tokens) + 1):
            trail = trail.after(tokens[:end])
        return trail

    def after(self, tokens: Sequence[int]) -> "TrailTwin":
        """The trail after the last of these tokens."""
        earlier = self._earlier(tokens)
        if self.place is None:
            return self if earlier is None else self.taken(tokens, earlier, LONG)
        if self.misses == 0 and tokens[self.place] == tokens[-1]:
            avoided = self._edit_of(tokens[self.place : -1])
            edits = self.with_trust(avoided, -1) if avoided else self.edits
            return replace(self, place=self.place + 1, agreed=self.agreed + 1, edits=edits)
        trail = replace(self, misses=self.misses + 1)
        made = trail.begun(tokens)
        if made is not None and len(made.new) == trail.misses:
            edits = trail.with_trust(made, 1)
            return replace(trail, place=self.place + len(made.old), misses=0, edits=edits)
        if earlier is not None:
            return trail.taken(tokens, earlier, LONG)
        first = len(tokens) - trail.misses
        for place in range(self.place + RESUMED, min(self.place + REACH, first)):
            same = tokens[place - RESUMED : place] == tokens[-RESUMED:]
            if same and trail.misses >= RESUMED:
                return trail.resumed(tokens, place, RESUMED)
        return trail if trail.misses <= LOST else replace(trail, place=None)

    def set(self, tokens: Sequence[int], matches: Sequence[tuple[int, int]]) -> "TrailTwin":
        """What `set_trail` makes of the places that were found, each with its match length."""
        longest = max((match for _, match in matches), default=0)
        agreed = self.agreed if self.place is not None and self.misses == 0 else 0
        if longest < LONG or min(agreed, MAX_MATCH) >= longest:
            return self
        place = next(place for place, match in matches if match == longest)
        return self.taken(tokens, place, longest)

    def row(self, tokens: Sequence[int], depth: int) -> Row | None:
        """What `collect_trail` offers."""
        if self.place is None or depth == 0:
            return None
        written, source, is_edited = list[int](), list(tokens[self.place :]), False
        if self.misses:
            begun = self.begun(tokens)
            if begun is None:
                return None
            written, source, is_edited = [*begun.new[self.misses :]], source[len(begun.old) :], True
        while source and len(written) < depth:
            edit = self._edit_of(source)
            written += edit.new if edit else source[:1]
            source = source[len(edit.old) if edit else 1 :]
            is_edited |= edit is not None
        if not is_edited or not written:
            return None
        return Row(tuple(written[:depth]), min(self.agreed, MAX_MATCH), EDITED, Source.CONTEXT)

    def _earlier(self, tokens: Sequence[int]) -> int | None:
        """Where the newest tokens that share a bucket with the last ones end, if they are these."""
        last = list(tokens[-LONG:])
        if len(last) < LONG:
            return None
        wanted = bucket_of(last, self.num_buckets)
        for end in range(len(tokens) - 1, LONG - 1, -1):
            if bucket_of(tokens[end - LONG : end], self.num_buckets) == wanted:
                return end if list(tokens[end - LONG : end]) == last else None
        return None

    def taken(self, tokens: Sequence[int], place: int, match: int) -> "TrailTwin":
        if self.place is not None and self.misses and self.place < place <= self.place + REACH:
            return self.resumed(tokens, place, match)
        return replace(self, place=place, misses=0, agreed=match)

    def resumed(self, tokens: Sequence[int], place: int, match: int) -> "TrailTwin":
        assert self.place is not None
        match = min(match, place - self.place, self.misses)
        old = tuple(tokens[self.place : place - match])
        new = tuple(tokens[len(tokens) - self.misses : len(tokens) - match])
        trail = replace(self, place=place, misses=0, agreed=self.agreed + match)
        if not (0 < len(old) <= LONGEST_EDIT and 0 < len(new) <= LONGEST_EDIT):
            return trail
        known = next((each for each in self.edits if (each.old, each.new) == (old, new)), None)
        edits = self.with_trust(known, 1) if known else (*self.edits, Edit(old, new))
        return replace(trail, edits=edits[-MOST_EDITS:])

    def with_trust(self, changed: Edit, by: int) -> tuple[Edit, ...]:
        trust = min(changed.trust + by, TRUSTED)
        return tuple(replace(e, trust=trust) if e is changed else e for e in self.edits)

    def _edit_of(self, source: Sequence[int]) -> Edit | None:
        """The newest trusted edit of the tokens that a source goes on with."""
        fitting = [e for e in self.edits if e.trust > 0 and _begins(source, e.old)]
        return fitting[-1] if fitting else None

    def begun(self, tokens: Sequence[int]) -> Edit | None:
        """The newest edit that fits the source and begins as what did not agree."""
        assert self.place is not None
        new = tuple(tokens[len(tokens) - self.misses :])
        source = tokens[self.place :]
        fitting = [e for e in self.edits if _begins(source, e.old) and _begins(e.new, new)]
        return fitting[-1] if fitting else None


def _begins(tokens: Sequence[int], with_: Sequence[int]) -> bool:
    return tuple(tokens[: len(with_)]) == tuple(with_)
