"""Parts that accept rules share: random numbers, sampling of tokens, and sampled draft trees.

The rules of this package let the target choose a token after a node and follow the child with that
token. The output has the target's own choice at every position, so it is the target's output with
any drafts. For draft tokens without a distribution, this is speculative sampling (Leviathan et al.,
2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318) with q = 1: a draft token is accepted
with its probability under the target, and a different sampled token is already distributed as the
residual.
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
        num_prompt_tokens: number of prompt tokens at the start of `tokens`.
        choices: the tokens that the pass itself chose from its logits, if any.
        goes_on: called with each output token as soon as it is chosen; if it returns false, the
            rest of the pass is dropped. `None` if nothing needs to be called.
    """

    sequence: int
    tokens: TokenIds
    num_prompt_tokens: int = 0
    choices: "Choices | None" = None
    goes_on: Callable[[int], bool] | None = None

    @property
    def position(self) -> int:
        """Position of the next token, counted from the start of the prompt."""
        return len(self.tokens)

    @property
    def generated(self) -> TokenIds:
        """Return int32[n], the output so far."""
        return self.tokens[self.num_prompt_tokens :]


Drawing = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Samples tokens within a pass captured in a CUDA graph, before any path is known. It takes logits,
[n, vocabulary] with n at least 2, which it must not overwrite, and a random number for each row,
float64[n]. It returns tokens, int64[n]. The result must depend only on these arguments, and equal
drawings (==) must compute the same. Rules that use the tree or earlier tokens have no drawing."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A rule's request that the pass itself choose a token after each row of a reading.

    Attributes:
        rule: the rule that makes the request.
        drawing: the function that samples the tokens.
        points: float64[rows], the random number of each row.
    """

    rule: object
    drawing: Drawing
    points: NDArray[np.float64]


@runtime_checkable
class ForcingRule(Protocol):
    """A rule that forces the token at some positions, because it allows only one."""

    def forced(self, tenant: str) -> "ForcedDrafts | None":
        """Return the source of an output's forced tokens; `None` if there is none."""
        ...


@runtime_checkable
class SelectingRule(Protocol):
    """A rule that can choose the tokens after all rows at once."""

    @property
    def drawing(self) -> Drawing | None:
        """How tokens are sampled; `None` if a token depends on the path before it."""
        ...

    def selection(self, tree: DraftTree, context: PassContext) -> Selection | None:
        """Return the selection for a pass; `None` if the pass cannot choose tokens itself."""
        ...


class ChoiceTable:
    """A pass's results for all its rows, on the device; one copy to the host fetches all of them.

    Args:
        values: int32[rows, 3 + 2 * k]: for each row, the most probable token after it, whether the
            most probable tokens lead to the row, the token that a rule's selection chose, the k
            likeliest tokens, and the bits of their logits in single precision.
    """

    SELECTED: Final = 2
    """Column of the tokens that selections chose."""

    NUM_CHOICES: Final = 3
    """Number of columns before the likeliest tokens."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    @cached_property
    def values(self) -> NDArray[np.int32]:
        """Return int32[rows, 3 + 2 * k], the table on the host."""
        found: NDArray[np.int32] = self._values.cpu().numpy()
        return found


class Choices:
    """Tokens chosen from a reading's logits within the pass that computed the logits.

    Args:
        table: the results of the pass.
        rows: the reading's rows in the table: after its last token and after each node of its tree.
        logits: [rows, vocabulary], the logits from which the tokens were chosen.
        selection: the selection that the pass made for a rule, if any.
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
        """Return whether the tokens were chosen from exactly these logits."""
        return logits is self._logits

    def greedy(self) -> Acceptance:
        """Return the path along the most probable tokens, and the token after the path."""
        values = self._table.values[self._rows]
        path = np.flatnonzero(values[1:, 1])
        return path, int(values[path[-1] + 1 if len(path) else 0, 0])

    def selected_for(self, rule: object) -> torch.Tensor | None:
        """Return int64[rows], the tokens that the pass chose for a rule, or `None`."""
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
"""Decides the result of a pass: the accepted path of the tree, and the token after the path.

The rule gets a tree of N nodes and the target's logits, [1 + N, vocabulary], after the last token
and after each node. It must not change these or anything else. The path starts with a child of the
root; each further node is a child of the node before. The token must be in the vocabulary. The rule
calls `PassContext.goes_on` with each chosen token and stops if that returns false; `follow` does
so. An error in a rule ends only its own sequence.

The rules in this package preserve the target's distribution. Nothing checks whether your own rule
does; if not, the output is no longer the model's.
"""

_BLOCK = 256
"""Tokens in a block of the two-level sum: about the square root of a usual vocabulary size, so that
the sums over blocks and within one block take equally long."""

_PHILOX_WORDS = 4  # numbers per counter value


def accept_greedy(tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
    """Accept the path along the target's most probable tokens.

    Args:
        tree: the verified tree, N nodes.
        logits: [1 + N, vocabulary], the target's logits after the last token and after each node.
        context: the sequence that the pass continues.
    """
    goes_on = context.goes_on
    if goes_on is None and context.choices is not None and context.choices.are_of(logits):
        return context.choices.greedy()
    if is_waited_for(logits):
        return follow(tree, lambda rows: logits[rows].argmax(dim=-1), goes_on, together=True)
    # A search in bfloat16 takes five times as long as converting and searching.
    return follow(tree, lambda rows: logits[rows].float().argmax(dim=-1), goes_on, together=False)


def is_waited_for(logits: torch.Tensor) -> bool:
    """Return whether the host has to wait for logits, because they are on another device.

    On a CPU only the needed rows are processed; on another device many rows take as long as one.
    """
    return logits.device.type != "cpu"


def uniforms(seed: int, context: PassContext, count: int) -> NDArray[np.float64]:
    """Return float64[count], the random numbers of the next positions after the context.

    A number depends only on seed, sequence and position: it comes from a counter-based generator
    (Philox: Salmon et al., 2011, doi:10.1145/2063384.2063405).
    """
    block, skipped = divmod(context.position, _PHILOX_WORDS)
    source = np.random.Philox(key=np.array([seed, context.sequence], np.uint64), counter=block)
    return np.random.Generator(source).random(skipped + count)[skipped:]


def drawn_numbers(seed: int, context: PassContext, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return float64[shape], the random numbers of a pass, independent of those of positions."""
    counter = np.array([0, context.position, 1, 0], np.uint64)
    source = np.random.Philox(key=np.array([seed, context.sequence], np.uint64), counter=counter)
    return np.random.Generator(source).random(shape)


def draw(probabilities: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Sample a token for each row by inverting its cumulative distribution at a random number.

    Probabilities are summed over blocks and then within one block, in double precision. A
    single-precision sum over a large vocabulary would lose rare tokens, and `torch.multinomial`
    takes as long as a pass of a small model.

    Args:
        probabilities: float[rows, vocabulary], non-negative; rows need not sum to 1.
        points: float64[rows], random numbers in [0, 1).

    Returns:
        int64[rows], the tokens; an arbitrary token if a row's sum is not positive.
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
    """Return int64[rows, 1], the first entry above each point, or the last entry."""
    below_last = torch.nextafter(ends[:, -1:], torch.zeros_like(points))
    found = torch.searchsorted(ends, torch.minimum(points, below_last), right=True)
    return found.clamp(max=ends.shape[-1] - 1)  # for NaN rows no entry is found


CERTAIN: Final = -1
"""Row of a node that was not sampled: the drafter proposed it regardless of samples."""


class SampledTree(DraftTree):
    """A draft tree that records how its nodes were sampled, so that verification can be exact.

    Siblings with the same row were sampled from that distribution one after another, in the order
    of their nodes, without replacement. Whether a node is drafted, and its place, may depend on its
    ancestors and earlier siblings, but never on its own token: a token that is selected by its
    value no longer follows the row's distribution. So probabilities of sampled nodes are estimates
    made before their tokens were known.

    A certain node must not depend on samples among its ancestors' other children. A token that is
    both sampled and certain below the same parent is a single, sampled node.

    Attributes:
        proposals: float32[rows, vocabulary], the distributions sampled from, each with sum 1.
        rows: int32[N], the row of `proposals` from which each node was sampled, or `CERTAIN`.
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
        """Return the tree of the first `num_nodes` nodes, the best tree of that size."""
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
