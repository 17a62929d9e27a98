"""Finds the likeliest outcomes of a pass: the accepted path of a tree and the token after it."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.forest import NOWHERE
from decoder.drafters.kernels.recycled import NOT_FOUND, NUM_ORDERS, Table, find, key_of
from retriever.kernels.compiling import kernel
from retriever.tree import ROOT

LOOKED_AT: Final = 2048
"""Number of last tokens of a sequence that are searched for successors. On recorded edits of code,
512 tokens find 1 to 3 percentage points fewer outcomes, 4096 find as many."""

GUESSED: Final = 0.6
"""Weight of a guessed token relative to a node that the drafter proposed. If guesses share all the
probability that the drafter leaves, they are right 0.4 to 0.65 times as often as their probability
says, on edits, agents and chats."""

TRUSTED: Final = 0.5
"""Share of the remaining probability for the target's likely tokens after the same context, if the
table lists them. The rest is for tokens that followed the context in the sequence."""

NUM_FREQUENT: Final = 24
"""Number of the sequence's most frequent tokens, such as line ends, that are guessed after any
node."""

_MOST_SUCCESSORS: Final = 64
"""Most occurrences of a context's last token that are examined, the latest first."""

_LEAST_LEFT: Final = 1e-4
"""Least probability left for tokens that the drafter does not propose: below it, no token is
guessed."""

_HASH: Final = 0x9E3779B1


class Nodes(NamedTuple):
    """The arrays of a draft tree.

    Attributes:
        tokens: int32[N], token id of each node.
        parents: int32[N], each node's parent: `ROOT` or an earlier node.
        probabilities: float32[N], probability of each node.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]


class LikelyOutcomes(NamedTuple):
    """The likeliest outcomes found so far, by descending score, and scratch arrays.

    Attributes:
        nodes: int32[M], the last accepted node of each outcome, or `ROOT`.
        tokens: int32[M], the token after that node.
        scores: float64[M], estimated probability of each outcome.
        places: int32[P], row of each proposed node in the verified tree, where row 0 is the root
            and row n + 1 is node n; `NOWHERE` if the node is not verified.
        left: float64[1 + V], for each row, the probability left for tokens in neither tree.
        depths: int32[1 + V], depth of each row; 0 for the root.
        guessed: int32[G], the tokens guessed after one node.
        shares: float64[G], share of probability of each guessed token.
        frequent: int32[NUM_FREQUENT], the sequence's most frequent tokens.
        counts: int32[NUM_FREQUENT], how often each frequent token occurs; 0 for unused places.
        slots: int32[S, 2], hash table of tokens and their counts; S is a power of two.
        context: int32[NUM_ORDERS], the last tokens at a node, the latest first.
        successors: int32[K, 3], a token that followed the context's last token, how often it did,
            and how often it followed the pair of the last two tokens.
    """

    nodes: NDArray[np.int32]
    tokens: NDArray[np.int32]
    scores: NDArray[np.float64]
    places: NDArray[np.int32]
    left: NDArray[np.float64]
    depths: NDArray[np.int32]
    guessed: NDArray[np.int32]
    shares: NDArray[np.float64]
    frequent: NDArray[np.int32]
    counts: NDArray[np.int32]
    slots: NDArray[np.int32]
    context: NDArray[np.int32]
    successors: NDArray[np.int32]

    @classmethod
    def of(cls, most: int, num_proposed: int, num_verified: int, table: Table) -> "LikelyOutcomes":
        """Allocate arrays for up to `most` outcomes of a pass."""
        num_guessed = _MOST_SUCCESSORS + NUM_FREQUENT + table.tokens.shape[1]
        return cls(
            np.empty(most, np.int32),
            np.empty(most, np.int32),
            np.empty(most),
            np.empty(num_proposed, np.int32),
            np.empty(1 + num_verified),
            np.empty(1 + num_verified, np.int32),
            np.empty(num_guessed, np.int32),
            np.empty(num_guessed),
            np.empty(NUM_FREQUENT, np.int32),
            np.zeros(NUM_FREQUENT, np.int32),
            np.empty((2 * LOOKED_AT, 2), np.int32),
            np.empty(NUM_ORDERS, np.int32),
            np.empty((_MOST_SUCCESSORS, 3), np.int32),
        )


@kernel()
def find_outcomes(
    found: LikelyOutcomes,
    last: NDArray[np.int32],
    table: Table,
    proposed: Nodes,
    verified: Nodes,
    max_tokens: int,
) -> int:
    """Find the likeliest outcomes of verifying a tree; return their number.

    An outcome ends with a token that the verified tree lacks. Nodes that the drafter proposed but
    that are not verified keep their probability. The remaining probability is shared among three
    kinds of tokens. The first are tokens that the target found likely after the same context. The
    second are tokens that followed the context in the sequence (back-off from two tokens to one, as
    in Witten and Bell, doi:10.1109/18.87000). The third are the sequence's most frequent tokens.

    Args:
        found: arrays that are filled with the outcomes.
        last: int32[W], the last committed tokens, W from 1 to `LOOKED_AT`.
        table: the recycled logits.
        proposed: the tree that the drafter proposed, P nodes.
        verified: the tree that the pass verifies, V nodes; any tree.
        max_tokens: most tokens of an outcome.
    """
    _measure(found, verified)
    count = _enter_proposed(found, proposed, verified, max_tokens)
    num_frequent = _count_frequent(found, last)
    for row in range(len(found.left)):
        score = GUESSED * found.left[row]
        if found.left[row] < _LEAST_LEFT or found.depths[row] >= max_tokens:
            continue
        if _is_beaten(found, count, score):
            continue
        _enter_context(found.context, last, row - 1, verified)
        for guess in range(_guess(found, last, table, num_frequent)):
            token, share = found.guessed[guess], found.shares[guess]
            if not _is_beaten(found, count, score * share) and not (
                _is_verified(row, token, verified) or _is_proposed(found, row, token, proposed)
            ):
                count = _keep(found, count, row - 1, token, score * share)
    return count


@kernel()
def _measure(found: LikelyOutcomes, verified: Nodes) -> None:
    """Set each row's depth, and its probability without its children's."""
    found.left[0], found.depths[0] = 1.0, 0
    for node in range(len(verified.parents)):
        above = verified.parents[node] + 1
        found.left[node + 1] = verified.probabilities[node]
        found.left[above] -= verified.probabilities[node]
        found.depths[node + 1] = found.depths[above] + 1


@kernel()
def _enter_proposed(
    found: LikelyOutcomes, proposed: Nodes, verified: Nodes, max_tokens: int
) -> int:
    """Enter proposed nodes that are not verified but whose parent is; return their number."""
    count = 0
    for node in range(len(proposed.tokens)):
        parent, token = proposed.parents[node], proposed.tokens[node]
        above = 0 if parent == ROOT else found.places[parent]
        found.places[node] = NOWHERE
        if above == NOWHERE:
            continue
        found.places[node] = _row_of(node, above, token, verified)
        if found.places[node] == NOWHERE:
            probability = proposed.probabilities[node]
            found.left[above] -= probability
            if found.depths[above] < max_tokens:
                count = _keep(found, count, above - 1, token, probability)
    return count


@kernel()
def _row_of(likely: int, row: int, token: int, verified: Nodes) -> int:
    """Return the row of a row's child with a given token, or `NOWHERE`; try node `likely` first."""
    tokens, parents = verified.tokens, verified.parents
    if likely < len(tokens) and parents[likely] == row - 1 and tokens[likely] == token:
        return likely + 1
    for node in range(row, len(tokens)):
        if parents[node] == row - 1 and tokens[node] == token:
            return node + 1
    return NOWHERE


@kernel()
def _is_verified(row: int, token: int, verified: Nodes) -> bool:
    """Return whether a row has a child with a given token."""
    return _row_of(row, row, token, verified) != NOWHERE


@kernel()
def _is_proposed(found: LikelyOutcomes, row: int, token: int, proposed: Nodes) -> bool:
    """Return whether the drafter proposed a token after a row."""
    for node in range(len(proposed.tokens)):
        if proposed.tokens[node] == token:
            parent = proposed.parents[node]
            if (0 if parent == ROOT else found.places[parent]) == row:
                return True
    return False


@kernel()
def _is_beaten(found: LikelyOutcomes, count: int, score: float) -> bool:
    """Return whether the outcomes are full and a score does not exceed their lowest."""
    return count == len(found.scores) and (count == 0 or score <= found.scores[count - 1])


@kernel()
def _keep(found: LikelyOutcomes, count: int, node: int, token: int, score: float) -> int:
    """Insert an outcome by its score, if there is room; return the number of outcomes."""
    if _is_beaten(found, count, score):
        return count
    at = min(count, len(found.scores) - 1)
    while at > 0 and found.scores[at - 1] < score:
        found.nodes[at], found.tokens[at] = found.nodes[at - 1], found.tokens[at - 1]
        found.scores[at] = found.scores[at - 1]
        at -= 1
    found.nodes[at], found.tokens[at], found.scores[at] = node, token, score
    return min(count + 1, len(found.scores))


@kernel()
def _count_frequent(found: LikelyOutcomes, last: NDArray[np.int32]) -> int:
    """Find the sequence's most frequent tokens; return their number."""
    found.slots[:] = 0
    mask = len(found.slots) - 1
    for token in last:
        slot = (token * _HASH >> 8) & mask
        while found.slots[slot, 1] > 0 and found.slots[slot, 0] != token:
            slot = (slot + 1) & mask
        found.slots[slot, 0] = token
        found.slots[slot, 1] += 1
    size = 0
    for slot in range(len(found.slots)):
        occurrences = found.slots[slot, 1]
        if occurrences == 0 or (size == NUM_FREQUENT and occurrences <= found.counts[size - 1]):
            continue
        at = min(size, NUM_FREQUENT - 1)
        while at > 0 and found.counts[at - 1] < occurrences:
            found.frequent[at], found.counts[at] = found.frequent[at - 1], found.counts[at - 1]
            at -= 1
        found.frequent[at], found.counts[at] = found.slots[slot, 0], occurrences
        size = min(size + 1, NUM_FREQUENT)
    return size


@kernel()
def _enter_context(
    context: NDArray[np.int32],
    last: NDArray[np.int32],
    node: int,
    verified: Nodes,
) -> None:
    """Set the last tokens at a node, the latest first; -1 for missing tokens."""
    taken = len(last)
    context[:] = -1
    for order in range(NUM_ORDERS):
        if node != ROOT:
            context[order], node = verified.tokens[node], verified.parents[node]
        elif taken > 0:
            taken -= 1
            context[order] = last[taken]


@kernel()
def _guess(found: LikelyOutcomes, last: NDArray[np.int32], table: Table, num_frequent: int) -> int:
    """Share probability among tokens that may follow a context; return the number of tokens."""
    count = _recall(found, table)
    rest = 1.0 - TRUSTED if count else 1.0
    num_successors = _list_successors(found, last)
    count, rest = _succeed(found, count, rest, num_successors)
    for at in range(num_frequent):
        count = _share(found, count, found.frequent[at], rest * found.counts[at] / len(last))
    return count


@kernel()
def _recall(found: LikelyOutcomes, table: Table) -> int:
    """Give shares to the target's likely tokens after the longest context in the table."""
    for order in range(NUM_ORDERS, 0, -1):
        if found.context[order - 1] < 0:
            continue
        entry = find(table.entries, key_of(found.context, order))
        if entry != NOT_FOUND:
            count = 0
            for column in range(table.tokens.shape[1]):
                share = TRUSTED / (1.0 + np.exp(-table.log_odds[entry, column]))
                count = _share(found, count, table.tokens[entry, column], share)
            return count
    return 0


@kernel()
def _list_successors(found: LikelyOutcomes, last: NDArray[np.int32]) -> int:
    """Count which tokens followed the context's last token and its last pair; return how many."""
    token, before = found.context[0], found.context[1]
    size = num_occurrences = 0
    for at in range(len(last) - 2, -1, -1):
        if last[at] != token:
            continue
        entry = 0
        while entry < size and found.successors[entry, 0] != last[at + 1]:
            entry += 1
        if entry == size:
            found.successors[entry] = 0
            found.successors[entry, 0] = last[at + 1]
            size += 1
        found.successors[entry, 1] += 1
        found.successors[entry, 2] += at > 0 and last[at - 1] == before
        num_occurrences += 1
        if num_occurrences == len(found.successors):
            break
    return size


@kernel()
def _succeed(
    found: LikelyOutcomes, count: int, rest: float, num_successors: int
) -> tuple[int, float]:
    """Give shares to the listed successors; return the number of tokens and the remaining share."""
    num_after_one = num_after_two = num_distinct = 0
    for entry in range(num_successors):
        num_after_one += found.successors[entry, 1]
        num_after_two += found.successors[entry, 2]
        num_distinct += found.successors[entry, 2] > 0
    if num_after_one == 0:
        return count, rest
    for_two = rest * num_after_two / max(num_after_two + num_distinct, 1)
    for_one = (rest - for_two) * num_after_one / (num_after_one + num_successors)
    for entry in range(num_successors):
        share = for_one * found.successors[entry, 1] / num_after_one
        if num_after_two:
            share += for_two * found.successors[entry, 2] / num_after_two
        count = _share(found, count, found.successors[entry, 0], share)
    return count, rest - for_two - for_one


@kernel()
def _share(found: LikelyOutcomes, count: int, token: int, share: float) -> int:
    """Add to the share of a token; return the number of guessed tokens."""
    for at in range(count):
        if found.guessed[at] == token:
            found.shares[at] += share
            return count
    found.guessed[count], found.shares[count] = token, share
    return count + 1
