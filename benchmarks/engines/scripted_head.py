"""A trained drafter of known quality: it knows what comes, and is right as often as it is told.

It answers as a head does: at each node it ranks tokens and states a probability for each. On the
recorded path the first token is right with a mean probability that is given, each lower rank with
half of what is left, and what it states is that probability or a sharper one. Off that path it
ranks tokens that mean nothing as surely. All that it does is a function of the seed, the sequence
and the path, so that ways of drafting meet the same drafter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from retriever.tree import ROOT

_SPREAD: Final = 3.0
"""Sum of the parameters of the beta distribution of how sure it is: from nearly never to nearly
always, as heads are at names and behind them."""

_SHARPER: Final = 2.0
"""Power to which an overconfident drafter takes its probabilities, before they sum to one again."""

_Proposed = tuple[list[int], list[int], list[float]]
"""Tokens, their parents as earlier places or `ROOT`, and the probabilities of the paths to them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine's drafter is set up.

    Attributes:
        nodes: of a verified tree, the last committed token included.
        steps: its depth; in each step the best nodes of the last one are read.
        width: nodes that are read in a step, and tokens that are taken behind each; 1 for a chain,
            without stated probabilities.
    """

    nodes: int
    steps: int
    width: int


@dataclass(frozen=True, slots=True)
class ScriptedHead:
    """A trained drafter that is right at a stated rate.

    Attributes:
        top1: how often its first token is right, behind a path that is.
        is_overconfident: whether it states sharper probabilities than come true.
        num_tokens: size of the vocabulary.
        seed: of all that it draws.
    """

    top1: float
    is_overconfident: bool = False
    num_tokens: int = 49_152
    seed: int = 0

    def ranked(
        self, number: int, place: int, path: tuple[int, ...], came: Sequence[int], width: int
    ) -> tuple[list[int], list[float]]:
        """Return its likeliest tokens behind a path, and what it states of each.

        Args:
            number: of the sequence.
            place: of the last committed token in it.
            path: drafted tokens behind that.
            came: what the target goes on to write behind the last committed token.
            width: how many tokens.
        """
        is_right = path == tuple(came[: len(path)])
        drawn = Random(hash((self.seed, number, place + len(path), () if is_right else path)))  # noqa: S311
        sure = drawn.betavariate(_SPREAD * self.top1, _SPREAD * (1 - self.top1))
        shares = [sure] + [(1 - sure) / 2**rank for rank in range(1, width)]
        tokens: list[int] = []
        while len(tokens) < width:
            token = drawn.randrange(self.num_tokens)
            if token not in tokens and token not in came[len(path) : len(path) + 1]:
                tokens.append(token)
        if is_right and len(path) < len(came):
            at, drop = 0, drawn.random()
            while at < width and drop >= shares[at]:
                drop -= shares[at]
                at += 1
            if at < width:
                tokens[at] = came[len(path)]
        return tokens, self._stated(shares)

    def _stated(self, shares: list[float]) -> list[float]:
        if not self.is_overconfident:
            return shares
        left = max(0.0, 1.0 - sum(shares))
        sharper = [share**_SHARPER for share in shares]
        total = sum(sharper) + left**_SHARPER
        return [share / total for share in sharper]

    def chain(self, number: int, place: int, came: Sequence[int], length: int) -> list[int]:
        """Return its chain: at each place its first token, with no probability."""
        path: tuple[int, ...] = ()
        for _ in range(length):
            path += (self.ranked(number, place, path, came, 1)[0][0],)
        return list(path)

    def tree(self, number: int, place: int, came: Sequence[int], shape: Shape) -> _Proposed:
        """Return its tree as EAGLE-2 grows it (arXiv:2406.16858).

        Args:
            number: of the sequence.
            place: of the last committed token in it.
            came: what the target goes on to write behind that.
            shape: of the tree: its nodes are the likeliest of all.
        """
        width = shape.width
        all_nodes: list[tuple[float, int, tuple[int, ...]]] = []
        read: list[tuple[float, int, tuple[int, ...]]] = [(1.0, ROOT, ())]
        for _ in range(shape.steps):
            new = []
            for above, parent, path in read:
                tokens, stated = self.ranked(number, place, path, came, width)
                for token, share in zip(tokens, stated, strict=True):
                    new.append((above * share, parent, (*path, token)))
            first = len(all_nodes)
            all_nodes += new
            best = sorted(range(len(new)), key=lambda each: -new[each][0])[:width]
            read = [(new[each][0], first + each, new[each][2]) for each in best]
        kept = sorted(
            sorted(range(len(all_nodes)), key=lambda each: -all_nodes[each][0])[: shape.nodes - 1]
        )
        places = {node: at for at, node in enumerate(kept)} | {ROOT: ROOT}
        chosen = [all_nodes[node] for node in kept]
        return (
            [path[-1] for _, _, path in chosen],
            [places[parent] for _, parent, _ in chosen],
            [score for score, _, _ in chosen],
        )
