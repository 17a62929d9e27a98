"""What a corpus loses when it is divided among servers whose trees are merged.

Recordings are replayed on one index of the whole corpus, on each part, and on all parts together,
in one process: only what is merged counts here, not the network.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from indexer.reader import Index
from retriever.client.merging import merge_trees
from retriever.commands.factories import own_drafter
from retriever.drafter import DEFAULT, Drafter, DraftRequest, SequenceOptions, TokenIds
from retriever.plugins.replay.replay import replay
from retriever.traces.traces import ChatEncoder, read_outputs, read_traces
from retriever.tree import DraftTree


class Merged:
    """Drafts from several drafters in this process as one; a `Drafter`."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        """Begin a sequence."""
        for drafter in self._drafters:
            drafter.open(session, prompt, options)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Merge what all drafters give."""
        answers = zip(*(drafter.draft(requests) for drafter in self._drafters), strict=True)
        return [
            merge_trees(trees, request.budget_nodes, request.min_probability)
            for request, trees in zip(requests, answers, strict=True)
        ]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence."""
        for drafter in self._drafters:
            drafter.close(session, new_tokens)


def main(
    traces: Annotated[Path, typer.Argument(help="Recorded outputs, as replay takes them.")],
    *,
    whole: Annotated[Path, typer.Option(help="An index of the whole corpus.")],
    part: Annotated[list[Path], typer.Option(help="An index of a part of it. Repeatable.")],
    warm: Annotated[Path | None, typer.Option(help="Outputs that are recent generations.")] = None,
    budget: Annotated[int, typer.Option(help="Nodes in each tree.")] = 32,
) -> None:
    """Print tokens per step and calibration error of each, as JSON lines."""
    indexes = {path: Index.open(path) for path in [whole, *part]}
    encoder = ChatEncoder(None)
    recorded = list(read_traces(traces, encoder))
    outputs = list(read_outputs(warm, encoder)) if warm is not None else []

    def report(name: str, drafter: Drafter) -> None:
        counted = replay(drafter, recorded, budget, 0)
        tokens = counted.tokens / max(1, counted.steps)
        error = counted.calibration.ece() if counted.calibration is not None else None
        print(json.dumps({"drafter": name, "tokens_per_step": tokens, "ece": error}), flush=True)

    for path, index in indexes.items():
        report(str(path), own_drafter([index], outputs, budget))
    parts = [own_drafter([indexes[path]], outputs, budget) for path in part]
    report("merged", Merged(parts))


if __name__ == "__main__":
    typer.run(main)
