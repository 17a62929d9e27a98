"""The evidence at a node: all candidates for the next token, with features of each.

Four kinds of evidence are added up in one pass. The rows that agree with the path give weights.
The phrase tables, the live table and the chains of the sequence give counts for contexts of up to
three tokens. We interpolate these counts from the shortest context to the longest. Each estimate
backs off to the previous one with a fixed strength (Dirichlet smoothing; MacKay and Peto 1995).
Since this is linear, each count is added once, multiplied by its coefficient.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.candidates import UNKNOWN, add_rows
from retriever.kernels.compiling import kernel, prefetch
from retriever.kernels.layout import Chains, Evidence, Tables, Traits, Work
from retriever.kernels.succession import add_followers, add_live, add_successors, set_states

_UNKNOWN_SHARE: Final = 1e-5  # share of a token that is not in the tables
_SECOND, _THIRD, _FOURTH = np.int64(2), np.int64(3), np.int64(4)  # levels of the tables
_NEVER: Final = float(1 << 20)  # distance of a token that is not in the sequence


@kernel()
def plant(rows: NDArray[Any], num_rows: int, sequence: Chains, nodes: NDArray[Any]) -> None:
    """Make candidate 0 the root, with all rows; it stands for the last tokens of a sequence."""
    root, tokens, end = nodes[0], sequence.tokens, sequence.state[0]
    root.token = tokens[end - 1]
    root.before = tokens[end - 2] if end > 1 else -1
    root.earlier = tokens[end - 3] if end > 2 else -1  # noqa: PLR2004
    root.depth, root.place, root.parent = 0, -1, 0
    root.pair, root.triple = UNKNOWN, UNKNOWN
    root.end_child = 0
    root.probability = 1.0
    root.first_row = 0 if num_rows > 0 else -1
    for index in range(num_rows):
        rows[index].next = index + 1 if index + 1 < num_rows else -1


@kernel()
def gather(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    tables: Tables,
    live: NDArray[np.int64],
    context: Chains,
    escape: float,
    work: Work,
    num_slots: int,
    current: int,
    num_nodes: int,
) -> int:
    """Add the candidates for a node's next token, with their evidence; return the node count.

    Inner functions take single arrays: passing whole tuples costs more than their work.

    Args:
        rows: ROW[max_rows], weighed evidence; the node's rows are divided among its children.
        continuations: int32[max_rows, max_depth].
        tables: phrase tables; tokens beyond the vocabulary are omitted.
        live: int64[sets, WAYS], live table of generations.
        context: chains of the sequence.
        escape: weight of tokens that no row predicts.
        work: scratch; the node's traits are written, as are its children and their evidence from
            index `num_nodes` on.
        num_slots: size of the table of siblings, a power of two: `slots_for` the rows.
        current: the node.
        num_nodes: number of candidates so far.
    """
    nodes, evidence, slots, tail = work.nodes, work.evidence, work.slots[:num_slots], work.tail
    values, shares = tables.values, tables.shares
    node = nodes[current]
    traits = work.traits[node.place + 1]
    node.first_child = num_nodes
    tail[0], tail[1], tail[2] = node.earlier, node.before, node.token
    end, total, similar = add_rows(
        rows, continuations, nodes, evidence, slots, current, num_nodes, traits
    )
    set_states(tables.starts1, tables.starts2, tables.tokens2, tables.tokens3, nodes, current)
    left: Any = np.float32(1.0)
    end, left = add_successors(
        tables.starts3, tables.tokens4, tables.counts3, tables.counts4, values, _FOURTH,
        np.int64(node.triple), left, shares.shape[0], nodes, evidence, slots, current, end, traits,
    )  # fmt: skip
    end, left = add_successors(
        tables.starts2, tables.tokens3, tables.counts2, tables.counts3, values, _THIRD,
        np.int64(node.pair), left, shares.shape[0], nodes, evidence, slots, current, end, traits,
    )  # fmt: skip
    is_known = 0 <= node.token < tables.counts1.shape[0]
    known = np.int64(node.token) if is_known else np.int64(-1)
    end, corpus_left = add_successors(
        tables.starts1, tables.tokens2, tables.counts1, tables.counts2, values, _SECOND, known,
        left, shares.shape[0], nodes, evidence, slots, current, end, traits,
    )  # fmt: skip
    for child in range(num_nodes, end):  # these are most candidates; `_estimate` reads their shares
        prefetch(shares, nodes[child].token)
        prefetch(context.last, nodes[child].token & (context.last.shape[0] - 1))  # for `_date`
    left = np.float32(1.0)
    # Usually `last` shows that the token has not occurred in the sequence.
    occurs = context.last[node.token & (context.last.shape[0] - 1)] >= 0
    for order in (2, 1):
        end, left = add_followers(
            context.tokens, context.heads, context.links, context.state[0], occurs, order, left,
            nodes, evidence, slots, tail, work.followers, current, end, traits,
        )  # fmt: skip
    for order in (3, 2):
        end, left = add_live(live, order, left, nodes, evidence, slots, tail, current, end, traits)
    node.end_child = end
    traits[Traits.ROWS] = total + escape
    _estimate(shares, escape, corpus_left, left, total, similar, nodes, evidence, num_nodes, end)
    _date(
        context.tokens, context.last, context.state[0] + node.depth, nodes, evidence, num_nodes, end
    )
    for child in range(num_nodes, end):
        slots[nodes[child].slot] = -1
    return end


@kernel()
def _estimate(
    shares: NDArray[np.float32],
    escape: float,
    corpus_left: np.float32,
    left: np.float32,
    total: float,
    similar: float,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    first: int,
    end: int,
) -> None:
    """Turn a node's sums into probabilities."""
    scale = np.float32(1.0 / (total + escape))
    similar_scale = np.float32(1.0 / similar) if similar > 0 else np.float32(0.0)
    for child in range(first, end):
        token = nodes[child].token
        unigram = shares[token] if token < shares.shape[0] else np.float32(_UNKNOWN_SHARE)
        corpus = evidence[child, Evidence.CORPUS] + corpus_left * unigram
        recent = evidence[child, Evidence.LIVE] + left * corpus
        weight = evidence[child, Evidence.ROWS] + np.float32(escape) * recent
        evidence[child, Evidence.UNIGRAM] = unigram
        evidence[child, Evidence.CORPUS] = corpus
        evidence[child, Evidence.LIVE] = recent
        evidence[child, Evidence.ROWS] = scale * weight
        evidence[child, Evidence.SIMILAR] *= similar_scale


@kernel()
def _date(
    tokens: NDArray[np.int32],
    last: NDArray[np.int32],
    now: int,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    first: int,
    end: int,
) -> None:
    """Write how many tokens ago each candidate occurred in the sequence."""
    mask = last.shape[0] - 1
    for child in range(first, end):
        position = last[nodes[child].token & mask]
        # Branchless, because a branch here would be unpredictable.
        has_occurred = (position >= 0) & (tokens[max(position, 0)] == nodes[child].token)
        distance = np.float32(now - position) if has_occurred else np.float32(_NEVER)
        evidence[child, Evidence.RECENCY] = distance
