"""The parts that acceptance rules share: random numbers, walking down a tree, drawing tokens.

The rules of this package let the target choose a token after a node and follow the child that
carries it. The target's own choice is kept at every position, so the output is the target's,
whatever was drafted. For drafts that are certain of their token (they name it and give no
distribution) this is speculative sampling (Leviathan et al., 2023, arXiv:2211.17192; Chen et al.,
2023, arXiv:2302.01318) with q = 1: a token is kept with its probability under the target, and the
draw that disagrees is already distributed as the residual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.sampling.walk import Acceptance, follow
from retriever.drafter import TokenIds
from retriever.tree import DraftTree

if TYPE_CHECKING:
    from retriever.predict.grammar.forced_drafts import ForcedDrafts


@dataclass(frozen=True, slots=True, eq=False)
class PassContext:
    """The sequence that a pass goes on from.

    Attributes:
        sequence: number of the sequence among those of its decoder.
        tokens: int32[n], the committed tokens, the prompt first. Not to be written to.
        num_prompt_tokens: how many of them are the prompt's.
        choices: what the pass found with its logits, if it did.
        goes_on: is told each token of the output as soon as it is chosen; where it returns false,
            the rest of the pass is not used. `None` where nobody listens.
    """

    sequence: int
    tokens: TokenIds
    num_prompt_tokens: int = 0
    choices: "Choices | None" = None
    goes_on: Callable[[int], bool] | None = None

    @property
    def position(self) -> int:
        """Position of the token after the last committed one, counted from the prompt's first."""
        return len(self.tokens)

    @property
    def generated(self) -> TokenIds:
        """int32[n], the output so far."""
        return self.tokens[self.num_prompt_tokens :]


Drawing = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What a captured pass may draw with, before any path is known; rules that look at the tree or at
earlier tokens have none. Takes logits, [n, vocabulary] with n at least 2, which it does not write
to, and a random number for each row, float64[n]; gives tokens, int64[n]. It must depend on these
alone, and drawings that are equal (==) must compute the same."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What a rule asks a pass to choose after the rows of a reading, before a path is known.

    Attributes:
        rule: that asks.
        drawing: how it chooses.
        points: float64[rows], the random number of each row.
    """

    rule: object
    drawing: Drawing
    points: NDArray[np.float64]


@runtime_checkable
class ForcingRule(Protocol):
    """A rule under which some tokens are the only ones that may come."""

    def forced(self, tenant: str) -> "ForcedDrafts | None":
        """Return what is forced in one output of a tenant; None where that is not known."""
        ...


@runtime_checkable
class SelectingRule(Protocol):
    """A rule that can choose after all rows at once."""

    @property
    def drawing(self) -> Drawing | None:
        """How it does; `None` where choices need the path before them."""
        ...

    def selection(self, tree: DraftTree, context: PassContext) -> Selection | None:
        """Return what a pass is to choose; `None` where that cannot be said before."""
        ...


class ChoiceTable:
    """What a pass computed about its rows, on its device; one download brings all of it.

    Args:
        values: int32[rows, 3 + 2 * k]: the most probable token after each row, whether such tokens
            lead to the row, the token that a rule's selection chose, the k likeliest tokens, and
            the bits of their logits in single precision.
    """

    SELECTED: Final = 2
    """The column of what selections chose."""

    NUM_CHOICES: Final = 3
    """Columns before the likeliest tokens."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    @cached_property
    def values(self) -> NDArray[np.int32]:
        """The same, on the host."""
        found: NDArray[np.int32] = self._values.cpu().numpy()
        return found


class Choices:
    """What the logits of a reading say, found in the pass that made them.

    Args:
        table: of the pass.
        rows: those of the reading: after its last token and after each node of its tree.
        logits: [rows, vocabulary], that it was found of.
        selection: by which the pass chose, if it did.
    """

    def __init__(
        self,
        table: ChoiceTable,
        rows: slice,
        logits: torch.Tensor,
        selection: Selection | None = None,
    ) -> None:
        self._table, self._rows, self._logits = table, rows, logits
        self._selection = selection

    def are_of(self, logits: torch.Tensor) -> bool:
        """Return whether these very logits were chosen from, as no rule has changed them."""
        return logits is self._logits

    def greedy(self) -> Acceptance:
        """Return the path of the most probable tokens, and the one after it."""
        values = self._table.values[self._rows]
        path = np.flatnonzero(values[1:, 1])
        return path, int(values[path[-1] + 1 if len(path) else 0, 0])

    def selected_for(self, rule: object) -> torch.Tensor | None:
        """Return int64[rows], what a rule had the pass choose, `None` if it asked for nothing."""
        if self._selection is None or self._selection.rule is not rule:
            return None
        values = self._table.values[self._rows, self._table.SELECTED]
        return torch.from_numpy(values.astype(np.int64))

    def likeliest(self) -> tuple[TokenIds, NDArray[np.float32]]:
        """Return int32[rows, k], the likeliest tokens, and float32[rows, k], their logits."""
        values = self._table.values[self._rows, self._table.NUM_CHOICES :]
        half = values.shape[1] // 2
        tokens, logits = np.ascontiguousarray(values[:, :half]), values[:, half:]
        return tokens, np.ascontiguousarray(logits).view(np.float32)


AcceptRule = Callable[[DraftTree, torch.Tensor, PassContext], Acceptance]
"""Decides what a pass brings: which path of its tree is accepted, and the token behind it.

It is given a tree of N nodes and the target's logits, [1 + N, vocabulary], after the last token and
after each node; it must not write to them, and may change nothing else. The path goes from a child
of the root downwards, each node a child of the one before, and the token is one of the vocabulary.
The rule tells `PassContext.goes_on` each token as it is chosen and stops where that says no;
`follow` does so. What it raises ends its own sequence.

Rules here keep the target's distribution. One of yours need not: then the output is no longer the
model's, and nothing checks it.
"""

_BLOCK = 256
"""Tokens that are summed together first: about the square root of a usual vocabulary, so that the
sums of blocks and those inside one block take equally long."""

_PHILOX_WORDS = 4  # numbers for each count


def accept_greedy(tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
    """Follow the child that equals the target's most probable token.

    Args:
        tree: what was verified, N nodes.
        logits: [1 + N, vocabulary], the target's, after the last token and after each node.
        context: of the pass.
    """
    goes_on = context.goes_on
    if goes_on is None and context.choices is not None and context.choices.are_of(logits):
        return context.choices.greedy()
    if is_waited_for(logits):
        return follow(tree, lambda rows: logits[rows].argmax(dim=-1), goes_on, together=True)
    # In bfloat16 the search takes five times as long as the conversion and the search.
    return follow(tree, lambda rows: logits[rows].float().argmax(dim=-1), goes_on, together=False)


def is_waited_for(logits: torch.Tensor) -> bool:
    """Return whether the host waits for what it reads: whether it is on another device.

    A CPU is asked for few rows, another device rarely: there, many rows take as long as one.
    """
    return logits.device.type != "cpu"


def uniforms(seed: int, context: PassContext, count: int) -> NDArray[np.float64]:
    """Return float64[count], the random numbers of the position after a context and the next ones.

    A number is a function of seed, sequence and position, by a generator that counts instead of
    keeping state (Philox: Salmon et al., 2011, doi:10.1145/2063384.2063405).
    """
    block, skipped = divmod(context.position, _PHILOX_WORDS)
    source = np.random.Philox(key=np.array([seed, context.sequence], np.uint64), counter=block)
    return np.random.Generator(source).random(skipped + count)[skipped:]


def drawn_numbers(seed: int, context: PassContext, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return float64[shape], random numbers of a pass, apart from those of positions."""
    counter = np.array([0, context.position, 1, 0], np.uint64)
    source = np.random.Philox(key=np.array([seed, context.sequence], np.uint64), counter=counter)
    return np.random.Generator(source).random(shape)


def draw(probabilities: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Choose one token for each row by inverting its distribution function at a point.

    The function is summed in blocks and then inside one block, in double precision: a
    single-precision sum over a large vocabulary would lose the rare tokens, and
    `torch.multinomial` takes as long as a pass of a small model.

    Args:
        probabilities: float[rows, vocabulary], not negative; rows need not sum to one.
        points: float64[rows], random numbers from 0 to below 1.

    Returns:
        int64[rows]; any token where a row has no positive sum.
    """
    rows, size = probabilities.shape
    length = min(size, _BLOCK)
    blocks = torch.nn.functional.pad(probabilities, (0, -size % length)).view(rows, -1, length)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    point = points.to(probabilities.device)[:, None] * ends[:, -1:]
    block = _first_above(ends, point)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, length))[:, 0].double().cumsum(-1)
    point -= torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    return (block * length + _first_above(inside, point))[:, 0]


def _first_above(ends: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return int64[rows, 1], the first entry above a point; rounding never passes the last."""
    below_last = torch.nextafter(ends[:, -1:], torch.zeros_like(points))
    found = torch.searchsorted(ends, torch.minimum(points, below_last), right=True)
    return found.clamp(max=ends.shape[-1] - 1)  # where a row holds no numbers, it is none of them


CERTAIN: Final = -1
"""Row of a node that was not drawn: the drafter would always have named it here."""


class SampledTree(DraftTree):
    """A draft tree that tells how its nodes came about, so that verification can stay exact.

    Siblings of one row were drawn from it one after the other, in the order of their nodes, each
    from what the earlier ones left (without replacement). Whether a node is drafted, and where it
    stands, may depend on its ancestors and its earlier siblings, never on its own token: a token
    that is kept for its value is no longer distributed as the row says. So probabilities of drawn
    nodes are estimates made before their tokens were known.

    A certain node is one that would be here whatever was drawn among its ancestors' other
    children; a token that is both drawn and certain below one parent is one node, a drawn one.

    Attributes:
        proposals: float32[rows, vocabulary], the distributions drawn from, each summing to one.
        rows: int32[N], the row of `proposals` that a node was drawn from, or `CERTAIN`.
    """

    __slots__ = ("proposals", "rows")

    def __init__(  # noqa: PLR0913, PLR0917  (a tree's four arrays, and two)
        self,
        token_ids: NDArray[np.int32],
        parents: NDArray[np.int32],
        probabilities: NDArray[np.float32],
        sources: NDArray[np.uint8],
        proposals: torch.Tensor,
        rows: NDArray[np.int32],
    ) -> None:
        super().__init__(token_ids, parents, probabilities, sources)
        self.proposals = proposals
        self.rows = rows

    def prefix(self, num_nodes: int) -> Self:
        """Return the tree of the first `num_nodes` nodes: the best one of that size."""
        if num_nodes >= len(self):
            return self
        return self.among(np.arange(len(self)) < num_nodes)

    def among(self, kept: NDArray[np.bool_]) -> Self:
        """Return the tree of the kept nodes, bool[N], whose parents are kept, too."""
        tree = DraftTree.among(self, kept)
        return type(self)(
            tree.token_ids,
            tree.parents,
            tree.probabilities,
            tree.sources,
            self.proposals,
            self.rows[kept],
        )
