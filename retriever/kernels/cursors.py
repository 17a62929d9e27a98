"""Cursors: the position from which a sequence copies itself, tracked across edits.

A cursor is the position whose token is expected next. It moves while the text agrees. At an edit (a
token replaced, inserted or omitted) it stays. The copy may then resume at positions shortly after
the cursor where the last token occurs: near the cursor, one equal token is stronger evidence than
elsewhere.

A sequence has one cursor in itself, and one in each text that it is predicted to follow. The latter
start at the beginning of their texts before any token has agreed, as if a long match had set them.

A *trail* also follows what a sequence copies from itself, and records the edits: which tokens of
the source were replaced by which tokens. If the same tokens occur in the source again, we offer the
continuation with the edit repeated wherever it applies. So we can copy repeated text past every
such place, for example text in a JSON string with new escapes, or with a name replaced.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.chains import copy_tokens, match_length
from retriever.kernels.compiling import kernel
from retriever.kernels.layout import MAX_MATCH, Chains, Cursor, Found, TextCursors
from retriever.tree import Source

POSITION, MISSES = 0, 1
"""Fields of a cursor, int64[2]: the expected position (-1 for none), and the number of tokens since
a token last agreed."""

AGREED: Final = 2
"""Further field of a cursor in another text, int64[3]: number of tokens that have agreed, including
the match that set it."""

LONG: Final = 8
"""Shortest match that sets a cursor, in tokens."""

_REACH: Final = 96  # tokens after the cursor in which a copy may resume
_LOST: Final = 64  # tokens without agreement after which the cursor is dropped
_MOST: Final = 4  # most matching places that are offered
_NEAR: Final = 8.0  # count of an occurrence near the cursor
_BLIND: Final = 0.5  # count of a place where no token agrees
_EXPECTED: Final = 1.0
"""Count of a place that a cursor in another text expects; its match is already long. With 8, drafts
were overconfident: predictions that added no tokens cost 1.3% of the tokens per step."""

NOTED, BEGINNINGS = 3, 4
"""Further fields of a trail, int64[5]: the number of edits recorded so far (new ones replace the
oldest), and a bit mask of the first tokens of all edits, by token id modulo 64. Most tokens are not
in the mask and need no comparison."""

OLD, OLD_LENGTH, NEW, NEW_LENGTH, TRUST = 0, 1, 2, 3, 4
"""Fields of an edit, int64[5]: position and number of the edited tokens, position and number of the
tokens that replaced them, and how often the edit was made minus how often it was not."""

TRAIL_SIZE: Final = BEGINNINGS + 1
EDIT_SIZE: Final = TRUST + 1

# Chosen on agent and edit data outside all reported results. Agents, tokens per step at 32 nodes:
# 4.74 (4.50 without trails). With 3 or 6 tokens to resume: 4.70 and 4.72. With row counts of 1 or
# 6: 4.72 and 4.73. With 64 edits, all trusted: 4.69; with 32: 4.74. Edits of 16 tokens: 4.73.
MOST_EDITS: Final = 16
LONGEST_EDIT: Final = 8
"""Most old or new tokens of a recorded edit."""

RESUMED: Final = 4
"""Tokens that must agree after an edit, near the source, for the trail to resume there."""

_LAST_BIT: Final = 63
_LONG_ROW: Final = 0  # row of the chains of order `LONG` in a sequence's store
_TRUSTED: Final = 2  # maximum trust, so that an edit that stops is soon dropped
_EDITED: Final = 2.0  # count of an edited continuation

CONTEXT: Final = int(Source.CONTEXT)
"""Marks rows of the sequence itself."""


@kernel()
def begin_cursor(of: Cursor) -> None:
    """Reset a cursor and a trail to no position."""
    of.cursor[POSITION], of.cursor[MISSES] = -1, 0
    for field in range(of.trail.shape[0]):
        of.trail[field] = -1 if field == POSITION else 0


@kernel()
def move_cursor(cursor: NDArray[np.int64], chains: Chains, begin: int) -> None:
    """Compare tokens appended from `begin` on with the expected ones.

    Args:
        cursor: int64[2], updated.
        chains: chains of the sequence, whose ring never wraps.
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
    """Move a cursor to the longest match of at least `LONG` tokens; ties go to its own position.

    Args:
        cursor: int64[2], updated.
        rows: ROW[max_rows]; the first `num_rows` are the sequence's, in any order. Of equally long
            matches, we take the expected one, otherwise the first.
        num_rows: number of rows.
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
        chains: chains of the sequence.
        query: int32[q], the sequence's last tokens.
        depth: most tokens to copy for each place.
        rows: ROW[max_rows], written from `row` on.
        continuations: int32[max_rows, max_depth], written at the same rows.
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
def move_trail(
    trail: NDArray[np.int64], edits: NDArray[np.int64], chains: Chains, begin: int
) -> None:
    """Compare tokens appended from `begin` on with the source, across edits.

    After tokens that do not agree, the trail resumes in one of three places: after a known edit,
    once the sequence has repeated all of it; wherever the last `LONG` tokens occurred before; or at
    the nearest place after the source where the last `RESUMED` tokens agree. Without a source, only
    the second place is possible.

    Args:
        trail: int64[5], updated.
        edits: int64[MOST_EDITS, 5], updated.
        chains: chains of the sequence, whose ring never wraps.
        begin: position of the first new token.
    """
    tokens = chains.tokens
    for position in range(begin, chains.state[0]):
        source = trail[POSITION]
        if source >= 0 and trail[MISSES] == 0 and tokens[source] == tokens[position]:
            avoided = _edit_at(trail, edits, tokens, source, position)
            if avoided >= 0:
                edits[avoided, TRUST] -= 1
            trail[POSITION] += 1
            trail[AGREED] += 1
        else:
            _search_on(trail, edits, chains, position)


@kernel()
def _search_on(
    trail: NDArray[np.int64], edits: NDArray[np.int64], chains: Chains, position: int
) -> None:
    """Look for a place where a trail resumes after an unexpected token; see `move_trail`."""
    tokens, source, end = chains.tokens, trail[POSITION], position + 1
    if source >= 0:
        trail[MISSES] += 1
        made = _begun_edit(trail, edits, tokens, source, end)
        if made >= 0 and edits[made, NEW_LENGTH] == trail[MISSES]:
            edits[made, TRUST] = min(edits[made, TRUST] + 1, _TRUSTED)
            trail[POSITION], trail[MISSES] = source + edits[made, OLD_LENGTH], 0
            return
    earlier = _earlier(chains, position)
    if earlier >= 0:
        _take(trail, edits, tokens, earlier, end, np.int64(LONG))
        return
    if source >= 0 and trail[MISSES] >= RESUMED:
        for place in range(source + RESUMED, min(source + _REACH, end - trail[MISSES])):
            if _are_equal(tokens, place - RESUMED, end - RESUMED, RESUMED):
                _resume(trail, edits, tokens, place, end, np.int64(RESUMED))
                return
    if trail[MISSES] > _LOST:
        trail[POSITION] = -1


@kernel()
def set_trail(
    trail: NDArray[np.int64],
    edits: NDArray[np.int64],
    chains: Chains,
    rows: NDArray[Any],
    num_rows: int,
) -> None:
    """Move a trail to the longest match of at least `LONG` tokens.

    A trail that still agrees stays, unless the match is longer than the number of its agreed
    tokens, not counting edits.

    Args:
        trail: int64[5], updated.
        edits: int64[MOST_EDITS, 5], updated.
        chains: chains of the sequence.
        rows: ROW[max_rows]; the first `num_rows` are the sequence's, in any order. Of equally long
            matches, we take the first.
        num_rows: number of rows.
    """
    longest, place = np.int64(0), np.int64(-1)
    for index in range(num_rows):
        if rows[index].match > longest:
            longest, place = np.int64(rows[index].match), rows[index].position
    agrees = trail[POSITION] >= 0 and trail[MISSES] == 0
    if longest >= LONG and not (agrees and min(trail[AGREED], MAX_MATCH) >= longest):
        _take(trail, edits, chains.tokens, place, chains.state[0], longest)


@kernel()
def collect_trail(
    trail: NDArray[np.int64],
    edits: NDArray[np.int64],
    chains: Chains,
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write a row for the source's continuation, if a known edit applies to it.

    Args:
        trail: int64[5].
        edits: int64[MOST_EDITS, 5].
        chains: chains of the sequence.
        depth: most tokens to write.
        found: the row and its continuation are written at `row`.
        row: first free row.

    Returns:
        The first free row afterwards.
    """
    if trail[POSITION] < 0 or trail[NOTED] == 0 or row == found.rows.shape[0]:
        return row
    tokens, end, out = chains.tokens, chains.state[0], found.continuations[row]
    place, made, length, is_edited = trail[POSITION], trail[MISSES], 0, False
    edit = -1
    if made > 0:
        edit = _begun_edit(trail, edits, tokens, place, end)
        if edit < 0:
            return row
    while length < depth and (edit >= 0 or place < end):
        if edit < 0:
            edit = _edit_at(trail, edits, tokens, place, end)
        if edit < 0:
            out[length] = tokens[place]
            place += 1
            length += 1
            continue
        for offset in range(made, min(edits[edit, NEW_LENGTH], made + depth - length)):
            out[length] = tokens[edits[edit, NEW] + offset]
            length += 1
        place += edits[edit, OLD_LENGTH]
        edit, made, is_edited = -1, 0, True
    if not is_edited or length == 0:
        return row
    each = found.rows[row]
    each.length, each.match, each.source = length, min(trail[AGREED], MAX_MATCH), CONTEXT
    each.count, each.position, each.similarity = _EDITED, trail[POSITION], 1.0
    return row + 1


@kernel()
def _earlier(chains: Chains, position: int) -> int:
    """Return the place after the newest earlier occurrence of the last tokens, -1 for none.

    The last tokens are the `LONG` tokens that end at `position`.
    """
    distance = chains.links[_LONG_ROW, position]
    first = position - distance - LONG + 1
    if distance == 0 or not _are_equal(chains.tokens, first, position - LONG + 1, LONG):
        return -1
    return position - distance + 1


@kernel()
def _take(
    trail: NDArray[np.int64],
    edits: NDArray[np.int64],
    tokens: NDArray[np.int32],
    place: int,
    end: int,
    match: int,
) -> None:
    """Move the trail to another place; if that is nearby, the tokens in between were edited."""
    source = trail[POSITION]
    if source >= 0 and trail[MISSES] > 0 and source < place <= source + _REACH:
        _resume(trail, edits, tokens, place, end, match)
    else:
        trail[POSITION], trail[MISSES], trail[AGREED] = place, 0, match


@kernel()
def _resume(
    trail: NDArray[np.int64],
    edits: NDArray[np.int64],
    tokens: NDArray[np.int32],
    place: int,
    end: int,
    match: int,
) -> None:
    """Resume at a later place of the source, and record the edit of the tokens before it.

    Args:
        trail: int64[5], the trail after tokens that did not agree; updated.
        edits: int64[MOST_EDITS, 5], updated.
        tokens: int32[capacity], the store of the sequence.
        place: where to resume; it is after the trail.
        end: end of the sequence.
        match: number of tokens that agree before both `place` and `end`.
    """
    source, misses = trail[POSITION], trail[MISSES]
    match = min(match, place - source, misses)
    old_length, new_length = place - match - source, misses - match
    if 0 < old_length <= LONGEST_EDIT and 0 < new_length <= LONGEST_EDIT:
        _note_edit(trail, edits, tokens, source, old_length, end - misses, new_length)
    trail[POSITION], trail[MISSES] = place, 0
    trail[AGREED] += match


@kernel()
def _note_edit(
    trail: NDArray[np.int64],
    edits: NDArray[np.int64],
    tokens: NDArray[np.int32],
    old: int,
    old_length: int,
    new: int,
    new_length: int,
) -> None:
    """Record an edit, or raise its trust if it is known."""
    for index in range(min(trail[NOTED], edits.shape[0])):
        known = edits[index]
        if (
            known[OLD_LENGTH] == old_length
            and known[NEW_LENGTH] == new_length
            and _are_equal(tokens, known[OLD], old, old_length)
            and _are_equal(tokens, known[NEW], new, new_length)
        ):
            known[TRUST] = min(known[TRUST] + 1, _TRUSTED)
            return
    edit = edits[trail[NOTED] % edits.shape[0]]
    edit[OLD], edit[OLD_LENGTH], edit[NEW], edit[NEW_LENGTH] = old, old_length, new, new_length
    edit[TRUST] = 1
    trail[NOTED] += 1
    trail[BEGINNINGS] = 0
    for index in range(min(trail[NOTED], edits.shape[0])):
        trail[BEGINNINGS] |= np.int64(1) << (tokens[edits[index, OLD]] & _LAST_BIT)


@kernel()
def _edit_at(
    trail: NDArray[np.int64],
    edits: NDArray[np.int64],
    tokens: NDArray[np.int32],
    place: int,
    end: int,
) -> int:
    """Return the newest trusted edit of the tokens that start at `place`, or -1.

    The edited tokens must lie before `end`.
    """
    if (trail[BEGINNINGS] >> (tokens[place] & _LAST_BIT)) & 1 == 0:
        return -1
    for back in range(min(trail[NOTED], edits.shape[0])):
        index = (trail[NOTED] - 1 - back) % edits.shape[0]
        edit = edits[index]
        if (
            tokens[edit[OLD]] == tokens[place]
            and edit[TRUST] > 0
            and place + edit[OLD_LENGTH] <= end
            and _are_equal(tokens, edit[OLD], place, edit[OLD_LENGTH])
        ):
            return index
    return -1


@kernel()
def _begun_edit(
    trail: NDArray[np.int64],
    edits: NDArray[np.int64],
    tokens: NDArray[np.int32],
    place: int,
    end: int,
) -> int:
    """Return the newest edit at `place` that the sequence has begun to repeat, or -1.

    The edit's first new tokens equal the tokens before `end` that did not agree.
    """
    misses = trail[MISSES]
    if misses > LONGEST_EDIT:
        return -1
    for back in range(min(trail[NOTED], edits.shape[0])):
        index = (trail[NOTED] - 1 - back) % edits.shape[0]
        edit = edits[index]
        if (
            edit[NEW_LENGTH] >= misses
            and place + edit[OLD_LENGTH] <= end
            and _are_equal(tokens, edit[OLD], place, edit[OLD_LENGTH])
            and _are_equal(tokens, edit[NEW], end - misses, misses)
        ):
            return index
    return -1


@kernel()
def _are_equal(tokens: NDArray[np.int32], first: int, second: int, length: int) -> bool:
    offset = 0
    while offset < length and tokens[first + offset] == tokens[second + offset]:
        offset += 1
    return offset == length


@kernel()
def move_text_cursors(
    texts: TextCursors, tokens: NDArray[np.int32], new_tokens: NDArray[np.int32]
) -> None:
    """Compare new tokens of a sequence with those that its cursors in other texts expect.

    Args:
        texts: texts of the store; cursors are updated.
        tokens: int32[capacity], the store, which never wraps; a separator ends each text.
        new_tokens: int32[n], the tokens appended to the sequence.
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
    """Move each cursor to the longest match in its text of at least `LONG` tokens.

    A cursor that still agrees stays, unless the match is longer than the number of its agreed
    tokens: if many places are equal, a match cannot show which place the sequence follows.

    Args:
        texts: texts of the store; cursors are updated.
        rows: ROW[max_rows]; those from `first` to `end` are of the store, in any order. Of equally
            long matches, we take the first.
        first: first row.
        end: end of the rows, exclusive.
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
    """Write rows for the tokens that cursors in other texts expect next.

    A cursor that agrees expects its position. If that position already has a row, the row gets the
    cursor's match length. Other cursors offer positions where the copy may resume, as in
    `collect_cursor`.

    Args:
        texts: texts of the store.
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
    """Raise the match length of the row at a position to `match`; return whether it exists."""
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
    """Write a row for the text at a place, if there is any; return the first free row."""
    if row == found.rows.shape[0]:
        return row
    length = copy_tokens(tokens, place, total, False, depth, found.continuations[row])
    if length == 0:
        return row
    out = found.rows[row]
    out.length, out.match, out.source, out.position = length, match, source, place
    out.count, out.similarity = count, 1.0
    return row + 1
