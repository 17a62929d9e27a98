"""The target's own logits, recycled as drafts when the same last tokens come again.

Every pass computes likely next tokens after each token of the tree, on the accepted path and off
it. Token Recycling (Luo et al., 2024, arXiv:2408.08696) keeps the likeliest successors of each
token; here they are kept for the last one, two and three tokens, with their probabilities.

They are taken out of the table, and into it, for later runs and other decoders: `KeptLogits`.
"""

import time
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.following import Verified
from decoder.drafters.kernels.recycled import (
    NUM_ORDERS,
    Table,
    describe_rows,
    enter,
    rank_columns,
    write_rows,
)
from decoder.drafters.kernels.siblings import Hints
from retriever.drafter import NUM_FOUND, Findings, TokenIds
from retriever.errors import InvalidRequestError
from retriever.tree import DraftTree

if TYPE_CHECKING:
    import torch

DEFAULT_CAPACITY: Final = 1 << 18
"""Contexts that a table holds, in 21 MB: those of some 87,000 rows, as each row is kept under three
of them. Fewer forget sooner, more miss the processor's caches more often."""

NUM_LIKELY: Final = NUM_FOUND
"""Tokens that are kept of each row of logits: more would make the table longer to read at every
node."""

_SLICE: Final = 1 << 12
"""Entries that are looked through at once, for which a pass may have to wait: 80 us where all are
new, 8 us where none is."""

_PAUSE_S: Final = 1e-4
"""Between two slices, in seconds: for the decoding loop to get the interpreter."""

_MAY_BE_KEPT: Final = 1
"""Lowest bit of an entry's number: the pass learned it, and of a sequence that is remembered."""

NO_HINTS: Final = Hints(np.zeros(0, np.int32), np.zeros(0, np.float32))


class RecycledLogits:
    """Likely next tokens by context, learned from the target's passes.

    Args:
        capacity: contexts that are kept, a power of two; the oldest are evicted.

    Attributes:
        table: the contexts with their likely tokens.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self.table = Table.of(capacity, NUM_LIKELY)
        self._tenant: str | None = None
        self._now = 0
        self._lock = Lock()  # held while entries are written or taken out; drafts do not need it

    def serve(self, tenant: str) -> None:
        """Note whose sequences are drafted for: those of one tenant, the first one's.

        Raises:
            InvalidRequestError: another tenant's were.
        """
        if self._tenant is None:
            self._tenant = tenant
        if tenant != self._tenant:
            raise InvalidRequestError(
                f"a sequence of tenant {tenant!r} is not drafted for with what the target found "
                f"likely in those of tenant {self._tenant!r}: use recycled logits for each"
            )

    def learn(self, verified: Verified, context: TokenIds, *, keep: bool = True) -> Hints:
        """Keep the likeliest tokens of each row of a pass.

        Args:
            verified: the pass.
            context: int32[NUM_ORDERS], the last tokens before it, the latest first; -1: none.
            keep: whether they may outlive this table, as those of a sequence that is remembered.

        Returns:
            The other likely tokens where the target chose its own.
        """
        logits, choices = verified.logits, verified.choices
        if choices is not None and not isinstance(logits, np.ndarray) and choices.are_of(logits):
            tokens, values = choices.likeliest()
        else:
            tokens, values = likeliest(logits, min(NUM_LIKELY, logits.shape[-1]))
        contexts, log_odds = rows_of(verified.tree, context, values)
        with self._lock:
            self._now += 1
            number = self._now << 1 | (_MAY_BE_KEPT if keep else 0)
            write_rows(self.table, contexts, tokens, log_odds, number)
        end = int(verified.path[-1]) + 1 if len(verified.path) else 0
        others = tokens[end] != verified.next_token
        return Hints(tokens[end][others], log_odds[end][others])

    def take_in(self, findings: Findings) -> None:
        """Enter what was found earlier or elsewhere, as if each context were of a later pass.

        Args:
            findings: of the same model; their tokens are of its vocabulary.
        """
        with self._lock:
            # Their numbers are even: they are kept already.
            first = (self._now + 1) << 1
            enter(self.table, findings.contexts, findings.tokens, findings.log_odds, first)
            self._now += len(findings)

    def learned_since(self, number: int) -> tuple[Findings, int]:
        """Return what passes have learned that may be kept, the oldest first, and a number.

        May run in another thread than the decoding loop's, which waits for a slice at most.

        Args:
            number: of an earlier call, for what was learned since; 0 for everything.
        """
        now, parts, written = self._now << 1, [], []
        for begin in range(0, len(self.table.entries), _SLICE):
            part = slice(begin, begin + _SLICE)
            with self._lock:
                numbers = self.table.entries["written"][part]
                wanted = np.flatnonzero((numbers > number) & (numbers & _MAY_BE_KEPT))
                written.append(numbers[wanted])
                parts.append(
                    Findings(
                        self.table.entries["key"][part][wanted],
                        self.table.tokens[part][wanted],
                        self.table.log_odds[part][wanted],
                    )
                )
            time.sleep(_PAUSE_S)
        order = np.argsort(np.concatenate(written), kind="stable")
        return Findings.joined(parts).part(order), now | _MAY_BE_KEPT


def rows_of(
    tree: DraftTree, context: TokenIds, logits: NDArray[np.float32]
) -> tuple[TokenIds, NDArray[np.float32]]:
    """Return what `write_rows` keeps of a pass over a tree of N nodes.

    Args:
        tree: the tree.
        context: int32[NUM_ORDERS], the last tokens before it, the latest first; -1: none.
        logits: float32[R, K] of the likeliest tokens of each row, which fall.

    Returns:
        int32[1 + N, NUM_ORDERS], the last tokens at the root and at each node, the latest first,
        and float32[R, K], the log-odds of the likeliest tokens.
    """
    contexts = np.empty((len(tree) + 1, NUM_ORDERS), np.int32)
    contexts[0] = context
    log_odds = np.empty(logits.shape, np.float32)
    # Copied: kernels are compiled again for arrays that may not be written to.
    describe_rows(np.array(tree.token_ids), np.array(tree.parents), contexts, logits, log_odds)
    return contexts, log_odds


def likeliest(
    logits: "torch.Tensor | NDArray[np.float32]", count: int
) -> tuple[TokenIds, NDArray[np.float32]]:
    """Return int32[R, count], the likeliest of each row, and float32[R, count], their logits.

    On CPUs `torch.topk` looks at one value after the other: rows of bfloat16 and float32 are
    searched by a kernel instead, five times as fast.

    Args:
        logits: [R, vocabulary].
        count: tokens of each row, at most the vocabulary; the likeliest come first.
    """
    if isinstance(logits, np.ndarray):
        columns = np.empty((len(logits), count), np.int32)
        rank_columns(np.ascontiguousarray(logits).view(np.int32), columns)
        return columns, np.take_along_axis(logits, columns, axis=1)
    import torch  # noqa: PLC0415  (a caller with a tensor has loaded it)

    integers = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(logits.dtype)
    if integers is None or logits.device.type != "cpu":
        values, indices = logits.topk(count, dim=-1)
        return indices.cpu().numpy().astype(np.int32), values.float().cpu().numpy()
    columns = np.empty((len(logits), count), np.int32)
    rank_columns(logits.contiguous().view(integers).numpy(), columns)
    values = logits.gather(1, torch.from_numpy(columns).long())
    return columns, values.float().numpy()
