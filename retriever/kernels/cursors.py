"""Cursors: the position from which a sequence copies itself, kept across edits.

A cursor is the position whose token is expected next. It moves while the text agrees. At an edit (a
token replaced, inserted or left out) it stays, and positions shortly after it where the last token
occurs are candidates for resuming the copy: near the cursor one equal token is stronger evidence
than elsewhere.

A sequence has one cursor in itself, and one in each text that it is predicted to follow. The latter
begin at the start of their texts, before a token has agreed, as if a long match had set them there.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.chains import copy_tokens, match_length
from retriever.kernels.compiling import kernel
from retriever.kernels.layout import MAX_MATCH, Chains, Found, TextCursors
from retriever.tree import Source

POSITION, MISSES = 0, 1
"""Fields of a cursor, int64[2]: the expected position (-1 for none), and the number of tokens since
the last agreement."""

AGREED: Final = 2
"""Further field of a cursor in another text, int64[3]: tokens that have agreed up to the last one,
counted from the match that set it."""

LONG: Final = 8
"""Length of a match that sets a cursor, in tokens."""

_REACH: Final = 96  # tokens after the cursor in which a copy may resume
_LOST: Final = 64  # tokens without agreement after which the cursor is given up
_MOST: Final = 4  # places that are offered
_NEAR: Final = 8.0  # occurrences that one near the cursor counts for
_BLIND: Final = 0.5  # and those for which no token speaks
_EXPECTED: Final = 1.0
"""Occurrences that a place counts for which a cursor in another text expects: its match is long.
With 8, drafts were too sure: predictions cost 1.3% of the tokens a step where they added none."""

CONTEXT: Final = int(Source.CONTEXT)
"""Marks rows of the sequence itself."""


@kernel()
def move_cursor(cursor: NDArray[np.int64], chains: Chains, begin: int) -> None:
    """Compare tokens appended from `begin` on with the expected ones.

    Args:
        cursor: int64[2], updated.
        chains: of the sequence, which never wraps.
        begin: position of the first new token.
    """
    tokens = chains.tokens
    for position in range(begin, chains.state[0]):
        if cursor[POSITION] < 0:
            return
        if cursor[MISSES] == 0 and tokens[cursor[POSITION]] == tokens[position]:
            cursor[POSITION] += 1
        else:
            cursor[MISSES] += 1
        if cursor[MISSES] > _LOST:
            cursor[POSITION] = -1


@kernel()
def set_cursor(cursor: NDArray[np.int64], rows: NDArray[Any], num_rows: int) -> None:
    """Move a cursor to the longest match, if that is long; among equals it prefers its position.

    Args:
        cursor: int64[2], updated.
        rows: ROW[max_rows], of which the first `num_rows` are the sequence's, in any order; of
            equally long matches the first is taken.
        num_rows: how many.
    """
    longest, place = 0, -1
    for index in range(num_rows):
        row = rows[index]
        expected = cursor[MISSES] == 0 and row.position == cursor[POSITION]
        if row.match > longest or (row.match == longest and expected):
            longest, place = row.match, row.position
    if longest >= LONG:
        cursor[POSITION], cursor[MISSES] = place, 0


@kernel()
def collect_cursor(
    cursor: NDArray[np.int64],
    chains: Chains,
    query: NDArray[np.int32],
    depth: int,
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    row: int,
) -> int:
    """Write rows for positions near the cursor where the copy may resume.

    Args:
        cursor: int64[2].
        chains: of the sequence.
        query: int32[q], its last tokens.
        depth: most tokens to copy for each place.
        rows: ROW[max_rows], written from `row` on.
        continuations: int32[max_rows, max_depth], written too.
        row: first free row.

    Returns:
        The first free row afterwards.
    """
    if cursor[POSITION] < 0 or cursor[MISSES] == 0:
        return row
    tokens = chains.tokens
    total, base, found = chains.state[0], cursor[POSITION], 0
    for place in range(base, min(base + _REACH, total)):
        blind = place == base or place == base + cursor[MISSES]
        if found == _MOST or row == rows.shape[0]:
            break
        match = match_length(tokens, place - 1, 0, query)
        if match == 0 and not blind:
            continue
        length = copy_tokens(tokens, place, total, True, depth, continuations[row])
        if length > 0:
            out = rows[row]
            out.length, out.match, out.source = length, max(match, 1), CONTEXT
            out.count = _NEAR if match > 0 else _BLIND
            out.position = place
            out.similarity = 1.0
            found += 1 if match > 0 else 0
            row += 1
    return row


@kernel()
def move_text_cursors(
    texts: TextCursors, tokens: NDArray[np.int32], new_tokens: NDArray[np.int32]
) -> None:
    """Compare tokens of a sequence with those expected by its cursors in other texts.

    Args:
        texts: of the store; cursors are updated.
        tokens: int32[capacity], the store, which never wraps; a separator ends each text.
        new_tokens: int32[n], appended to the sequence.
    """
    for text in range(texts.cursors.shape[0]):
        cursor = texts.cursors[text]
        for token in new_tokens:
            if cursor[POSITION] < 0:
                break
            if cursor[MISSES] == 0 and tokens[cursor[POSITION]] == token:
                cursor[POSITION] += 1
                cursor[AGREED] += 1
            else:
                cursor[MISSES] += 1
            if cursor[MISSES] > _LOST:
                cursor[POSITION] = -1


@kernel()
def set_text_cursors(texts: TextCursors, rows: NDArray[Any], first: int, end: int) -> None:
    """Move each cursor to the longest match in its text, if that is long.

    One that still agrees stays unless the match is longer than what has agreed: among many equal
    places, matches cannot tell its own.

    Args:
        texts: of the store; cursors are updated.
        rows: ROW[max_rows], of which those from `first` to `end` are of the store, in any order; of
            equally long matches the first is taken.
        first: first row.
        end: after the last one.
    """
    for text in range(texts.cursors.shape[0]):
        cursor = texts.cursors[text]
        longest, place = 0, -1
        for index in range(first, end):
            row = rows[index]
            is_within = texts.starts[text] <= row.position < texts.starts[text + 1]
            if is_within and row.match > longest:
                longest, place = row.match, row.position
        agrees = cursor[POSITION] >= 0 and cursor[MISSES] == 0
        if longest >= LONG and not (agrees and min(cursor[AGREED], MAX_MATCH) >= longest):
            cursor[POSITION], cursor[MISSES], cursor[AGREED] = place, 0, longest


@kernel()
def collect_text_cursors(
    texts: TextCursors,
    tokens: NDArray[np.int32],
    source: int,
    query: NDArray[np.int32],
    depth: int,
    found: Found,
    first: int,
    row: int,
) -> int:
    """Write rows for what cursors in other texts expect next.

    One that agrees expects its position; a row of that position is made to stand for it. Of others,
    positions are offered where the copy may resume, as `collect_cursor` does.

    Args:
        texts: of the store.
        tokens: int32[capacity], the store.
        source: database that the rows are marked with.
        query: int32[q], the last tokens of the sequence.
        depth: most tokens to copy for each place.
        found: rows and continuations are written from `row` on.
        first: first row of the store.
        row: first free row.

    Returns:
        The first free row afterwards.
    """
    end = row
    for text in range(texts.cursors.shape[0]):
        cursor = texts.cursors[text]
        base, begin, total = cursor[POSITION], texts.starts[text], texts.starts[text + 1]
        if base < 0:
            continue
        if cursor[MISSES] == 0:
            match = min(cursor[AGREED], MAX_MATCH)
            if not _mark_expected(found.rows, first, end, base, match):
                row = _offer(tokens, base, total, match, _EXPECTED, source, depth, found, row)
            continue
        num_offered = 0
        for place in range(base, min(base + _REACH, total)):
            blind = place == base or place == base + cursor[MISSES]
            if num_offered == _MOST:
                break
            match = match_length(tokens, place - 1, begin, query)
            if match == 0 and not blind:
                continue
            before = row
            count = _NEAR if match > 0 else _BLIND
            row = _offer(tokens, place, total, max(match, 1), count, source, depth, found, row)
            num_offered += 1 if match > 0 and row > before else 0
    return row


@kernel()
def _mark_expected(rows: NDArray[Any], first: int, end: int, position: int, match: int) -> bool:
    """Have the row of a position stand for a cursor there; return whether there is one."""
    for index in range(first, end):
        row = rows[index]
        if row.position == position:
            row.match = max(row.match, match)
            return True
    return False


@kernel()
def _offer(
    tokens: NDArray[np.int32],
    place: int,
    total: int,
    match: int,
    count: float,
    source: int,
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write a row for what stands at a place, if anything does; return the first free row."""
    if row == found.rows.shape[0]:
        return row
    length = copy_tokens(tokens, place, total, False, depth, found.continuations[row])
    if length == 0:
        return row
    out = found.rows[row]
    out.length, out.match, out.source, out.position = length, match, source, place
    out.count, out.similarity = count, 1.0
    return row + 1
