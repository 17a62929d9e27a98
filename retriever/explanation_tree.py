"""An explanation as a tree for people."""

from collections.abc import Callable
from typing import Final

from rich.markup import escape
from rich.tree import Tree

from retriever.explanation import Explanation, NodeProvenance
from retriever.tree import ROOT, Source

_SHOWN_POSITIONS: Final = 3


def rendered(explanation: Explanation, text_of: Callable[[int], str] | None) -> Tree:
    """Return a tree with a line for each node, and one below it for each document.

    Args:
        explanation: what to show.
        text_of: gives the text of a token; without it ids alone are shown.
    """
    tree = explanation.tree
    root = Tree(f"{len(tree)} nodes")
    branches = {ROOT: root}
    for node, provenance in enumerate(explanation.nodes):
        token = int(tree.token_ids[node])
        shown = escape(repr(text_of(token))) if text_of is not None else f"token {token}"
        probability = float(tree.probabilities[node])
        source = Source(int(tree.sources[node])).name.lower()
        branch = branches[int(tree.parents[node])].add(
            f"[bold]{shown}[/bold] {probability:.3f} {source}{_evidence(provenance)}"
        )
        branches[node] = branch
        for document in provenance.documents:
            licence = f", {document.licence}" if document.licence else ""
            where = f"{document.index}: {document.name}{licence}, token {document.position}"
            branch.add(f"[dim]{escape(where)}[/dim]")
    return root


def _evidence(provenance: NodeProvenance) -> str:
    """Say after how long a match a token was found, how often, and where in the context."""
    if provenance.count == 0:
        return ""
    text = f", {provenance.count} x after a match of {provenance.match_length}"
    places = provenance.context_positions[-_SHOWN_POSITIONS:]
    if places:
        text += f", at {', '.join(map(str, places))}"
    return text
