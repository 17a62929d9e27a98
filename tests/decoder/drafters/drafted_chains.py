"""Drafters that say chains, and the paths of the trees that are made of them."""

from typing import NoReturn

import torch

from retriever.drafter import Drafter
from retriever.errors import InvalidRequestError
from retriever.follower import DraftLimits
from retriever.tree import ROOT, DraftTree, Source
from tests.decoder.decoding import VOCABULARY, ScriptedDrafter

LIMITS = DraftLimits(VOCABULARY)


def saying(*paths: tuple[list[int], float], source: Source = Source.CORPUS) -> Drafter:
    """Return a drafter that always drafts chains, each with the probability of its every node."""
    nodes: list[tuple[int, int, float]] = []
    for tokens, probability in paths:
        parent = ROOT
        for depth, token in enumerate(tokens, start=1):
            known = [at for at, (p, t, _) in enumerate(nodes) if (p, t) == (parent, token)]
            if not known:
                nodes.append((parent, token, probability - 1e-3 * depth))
            parent = known[0] if known else len(nodes) - 1
    tree = DraftTree.checked(
        [token for _, token, _ in nodes],
        [parent for parent, _, _ in nodes],
        [probability for _, _, probability in nodes],
        [source] * len(nodes),
    )
    return ScriptedDrafter(lambda _tokens, budget: tree.prefix(budget))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.token_ids[tree.path_to(node)].tolist()) for node in range(len(tree))]


def logits_for(*rows: dict[int, float]) -> torch.Tensor:
    logits = torch.full((len(rows), VOCABULARY), -9.0)
    for row, odds in enumerate(rows):
        for token, value in odds.items():
            logits[row, token] = value
    return logits


def refusing(_tokens: list[int], _budget: int) -> NoReturn:
    """Refuse to draft, as by the fault of who asks."""
    raise InvalidRequestError("the request is at fault")
