"""Parts shared by acceptance rules: random numbers, walking down a tree, drawing tokens.

The rules of this package let the target choose a token after a node and follow the child with that
token. The target's own choice is kept at every position, so the output is the target's, regardless
of the drafts. For drafts that are certain of their token (they name it and give no distribution)
this is speculative sampling (Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023,
arXiv:2302.01318) with q = 1: a token is kept with its probability under the target, and a draw that
disagrees is already distributed as the residual.
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
    """The sequence that a pass continues.

    Attributes:
        sequence: number of the sequence in its decoder.
        tokens: int32[n], the committed tokens, prompt included; read-only.
        num_prompt_tokens: how many of them are the prompt.
        choices: the choices that the pass computed with its logits, if any.
        goes_on: called with each token of the output as soon as it is chosen; if it returns false,
            the rest of the pass is not used. `None` if there is no listener.
    """

    sequence: int
    tokens: TokenIds
    num_prompt_tokens: int = 0
    choices: "Choices | None" = None
    goes_on: Callable[[int], bool] | None = None

    @property
    def position(self) -> int:
        """Position of the token after the last committed one, counted from the prompt's start."""
        return len(self.tokens)

    @property
    def generated(self) -> TokenIds:
        """int32[n], the output so far."""
        return self.tokens[self.num_prompt_tokens :]


Drawing = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""How a captured pass draws tokens before any path is known; rules that use the tree or earlier
tokens have no drawing. It takes logits, [n, vocabulary] with n at least 2, which it must not write
to, and a random number for each row, float64[n], and returns tokens, int64[n]. The result must
depend only on these, and equal drawings (==) must compute the same."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A rule's request to a pass to choose tokens after a reading's rows, before a path is known.

    Attributes:
        rule: the requesting rule.
        drawing: how tokens are chosen.
        points: float64[rows], the random number of each row.
    """

    rule: object
    drawing: Drawing
    points: NDArray[np.float64]


@runtime_checkable
class ForcingRule(Protocol):
    """A rule that allows only one possible token at some positions."""

    def forced(self, tenant: str) -> "ForcedDrafts | None":
        """Return the forced tokens in one output of a tenant; `None` if unknown."""
        ...


@runtime_checkable
class SelectingRule(Protocol):
    """A rule that can choose after all rows at once."""

    @property
    def drawing(self) -> Drawing | None:
        """How tokens are drawn; `None` if choices depend on the path before them."""
        ...

    def selection(self, tree: DraftTree, context: PassContext) -> Selection | None:
        """Return the selection for a pass; `None` if it cannot be stated in advance."""
        ...


class ChoiceTable:
    """A pass's results about its rows, on its device; one download fetches all of them.

    Args:
        values: int32[rows, 3 + 2 * k]: the most probable token after each row, whether such tokens
            lead to the row, the token that a rule's selection chose, the k likeliest tokens, and
            the bits of their logits in single precision.
    """

    SELECTED: Final = 2
    """Column of the tokens chosen by selections."""

    NUM_CHOICES: Final = 3
    """Number of columns before the likeliest tokens."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    @cached_property
    def values(self) -> NDArray[np.int32]:
        """The values, on the host."""
        found: NDArray[np.int32] = self._values.cpu().numpy()
        return found


class Choices:
    """Choices from a reading's logits, computed in the pass that made the logits.

    Args:
        table: table of the pass.
        rows: rows of the reading: after its last token and after each node of its tree.
        logits: [rows, vocabulary], the logits of these choices.
        selection: the selection with which the pass chose, if any.
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
        """Return whether the choices are of exactly these logits, which no rule has changed."""
        return logits is self._logits

    def greedy(self) -> Acceptance:
        """Return the path of the most probable tokens and the token after it."""
        values = self._table.values[self._rows]
        path = np.flatnonzero(values[1:, 1])
        return path, int(values[path[-1] + 1 if len(path) else 0, 0])

    def selected_for(self, rule: object) -> torch.Tensor | None:
        """Return int64[rows], the pass's choices for a rule; `None` if it requested none."""
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
"""Decides the result of a pass: which path of its tree is accepted, and the token after it.

It gets a tree of N nodes and the target's logits, [1 + N, vocabulary], after the last token and
after each node. It must not write to them or change anything else. The path goes from a child of
the root down, each node a child of the one before, and the token is in the vocabulary. The rule
calls `PassContext.goes_on` with each token as it is chosen and stops if that returns false;
`follow` does so. An error that it raises ends only its own sequence.

The rules here preserve the target's distribution. Your own rule need not: then the output is no
longer the model's, and nothing checks that.
"""

_BLOCK = 256
"""Tokens in a block of the two-level sum: about the square root of a usual vocabulary, so that the
sums of blocks and those within one block take equally long."""

_PHILOX_WORDS = 4  # numbers per counter value


def accept_greedy(tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
    """Follow the child that equals the target's most probable token.

    Args:
        tree: the verified tree, N nodes.
        logits: [1 + N, vocabulary], the target's logits after the last token and after each node.
        context: context of the pass.
    """
    goes_on = context.goes_on
    if goes_on is None and context.choices is not None and context.choices.are_of(logits):
        return context.choices.greedy()
    if is_waited_for(logits):
        return follow(tree, lambda rows: logits[rows].argmax(dim=-1), goes_on, together=True)
    # In bfloat16 the search takes five times as long as the conversion and the search.
    return follow(tree, lambda rows: logits[rows].float().argmax(dim=-1), goes_on, together=False)


def is_waited_for(logits: torch.Tensor) -> bool:
    """Return whether the host has to wait for logits: whether they are on another device.

    On a CPU only the needed rows are computed; on another device many rows take as long as one.
    """
    return logits.device.type != "cpu"


def uniforms(seed: int, context: PassContext, count: int) -> NDArray[np.float64]:
    """Return float64[count], random numbers of the positions from the context's end on.

    A number is a function of seed, sequence and position, from a counter-based generator (Philox:
    Salmon et al., 2011, doi:10.1145/2063384.2063405).
    """
    block, skipped = divmod(context.position, _PHILOX_WORDS)
    source = np.random.Philox(key=np.array([seed, context.sequence], np.uint64), counter=block)
    return np.random.Generator(source).random(skipped + count)[skipped:]


def drawn_numbers(seed: int, context: PassContext, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return float64[shape], random numbers of a pass, independent of those of positions."""
    counter = np.array([0, context.position, 1, 0], np.uint64)
    source = np.random.Philox(key=np.array([seed, context.sequence], np.uint64), counter=counter)
    return np.random.Generator(source).random(shape)


def draw(probabilities: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Choose one token per row by inverting its cumulative distribution at a point.

    Probabilities are summed over blocks and then within one block, in double precision: a
    single-precision sum over a large vocabulary would lose rare tokens, and `torch.multinomial`
    takes as long as a pass of a small model.

    Args:
        probabilities: float[rows, vocabulary], non-negative; rows need not sum to 1.
        points: float64[rows], random numbers in [0, 1).

    Returns:
        int64[rows]; an arbitrary token if a row has no positive sum.
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
    """Return int64[rows, 1], the first entry above a point, at most the last despite rounding."""
    below_last = torch.nextafter(ends[:, -1:], torch.zeros_like(points))
    found = torch.searchsorted(ends, torch.minimum(points, below_last), right=True)
    return found.clamp(max=ends.shape[-1] - 1)  # for NaN rows no entry is found


CERTAIN: Final = -1
"""Row of a node that was not drawn: the drafter would have named it here in any case."""


class SampledTree(DraftTree):
    """A draft tree that records how its nodes were drawn, so that verification can be exact.

    Siblings with the same row were drawn from it one after another, in the order of their nodes,
    without replacement. Whether a node is drafted, and its place, may depend on its ancestors and
    earlier siblings, but never on its own token: a token that is kept because of its value no
    longer follows the row's distribution. So probabilities of drawn nodes are estimates made before
    their tokens were known.

    A certain node would be here regardless of the draws among its ancestors' other children. A
    token that is both drawn and certain below the same parent is a single, drawn node.

    Attributes:
        proposals: float32[rows, vocabulary], the distributions drawn from, each summing to 1.
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
        """Return the tree of the kept nodes, bool[N]; their parents must also be kept."""
        tree = DraftTree.among(self, kept)
        return type(self)(
            tree.token_ids,
            tree.parents,
            tree.probabilities,
            tree.sources,
            self.proposals,
            self.rows[kept],
        )
