"""A database of another package, in one file: it knows how to count. As a program, it shows that.

Registering is for the whole process, so that tests run it in one of its own.
"""

import json
import sys
from pathlib import Path

import numpy as np

from retriever.drafter import DraftRequest, TokenIds
from retriever.operations.design import colours
from retriever.predict.databases import DatabaseKind, register_database
from retriever.predict.question import Occurrence, Question, write_row
from retriever.predict.weights import from_bytes, prior_weights, to_bytes
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.explaining import explain
from retriever.tree import DraftTree, Source, drafted_sources
from retriever.wire.messages import tree_from_message, tree_to_message

COUNTING = Source.register(len(Source), "COUNTING", "#56b4e9")


class Counting:
    """After two tokens that follow one another come those that follow them."""

    def commit(self, tokens: TokenIds) -> None:
        """Do nothing: the question says all that this database must know."""

    def collect(self, question: Question, row: int) -> int:
        """Write one row where the context counts."""
        before, last = [-1, -1, *question.query.tolist()][-2:]
        if last != before + 1:
            return row
        counted = range(last + 1, last + 1 + question.depth)
        return write_row(question, row, COUNTING, Occurrence(counted, match=2))


register_database(DatabaseKind(COUNTING, trust=1.0, open=lambda _: Counting()))


def sources_of(tree: DraftTree) -> list[str]:
    return [Source(source).label for source in tree.sources.tolist()]


def main(kept: Path) -> None:
    """Print what a drafter makes of it, and of weights that were kept before it was there."""
    drafter = EmbeddedDrafter()
    explanation = explain(drafter, [90, 91], 4)
    tree = drafter.draft_context([90, 91], 4)
    drafter.open("counting", [90, 91])
    drafter.draft([DraftRequest("counting", np.empty(0, np.int32), 2, 4)])
    drafter.close("counting", np.array([92, 93, 7], np.int32))
    weights, prior = from_bytes(kept.read_bytes()), prior_weights()
    databases = [int(source) for source in drafted_sources() if source != COUNTING]
    weights["escape"][0, COUNTING] += 1
    again = from_bytes(to_bytes(weights))
    result = {
        "tokens": tree.token_ids.tolist(),
        "sources": sources_of(tree),
        "explained": explanation.as_json(),
        "received": sources_of(tree_from_message(tree_to_message(tree))),
        "shown": [source.label for source in drafted_sources()],
        "colour": colours()[COUNTING.label],
        "counted": drafter.state.draft_counts.by_source[:, COUNTING].tolist(),
        "known": weights["escape"][0, :COUNTING].ravel().tolist(),
        "network": weights["evidence"].ravel().tolist(),
        "default": (weights["escape"][0, COUNTING] - 1 - prior["escape"][0, databases].mean(axis=0))
        .ravel()
        .tolist(),
        "kept": bool(np.array_equal(again["escape"][0, COUNTING], weights["escape"][0, COUNTING])),
        "by_old": to_bytes(weights).hex(),
    }
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
