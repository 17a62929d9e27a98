"""The target's own logits, recycled as drafts when the same last tokens occur again.

Every pass computes likely next tokens after each token of the tree, on the accepted path and off
it. Token Recycling (Luo et al., 2024, arXiv:2408.08696) keeps the likeliest successors of each
token; here they are kept for the last one, two and three tokens, with their probabilities.

`KeptLogits` saves and loads the table for later runs and other decoders.
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
"""Contexts that a table holds, in 21 MB: those of about 87,000 rows, because each row is stored
under three contexts. With fewer, the table forgets sooner; with more, it misses the processor's
caches more often."""

NUM_LIKELY: Final = NUM_FOUND
"""Tokens stored for each row of logits: more would make the table slower to read at every node."""

_SLICE: Final = 1 << 12
"""Entries scanned under the lock at once; a pass may have to wait for them: 80 us if all are new, 8
us if none is."""

_PAUSE_S: Final = 1e-4
"""Pause between two slices, in seconds, so that the decoding loop gets the interpreter."""

_MAY_BE_KEPT: Final = 1
"""Lowest bit of an entry's number: it was learned from a pass of a sequence that is remembered."""

NO_HINTS: Final = Hints(np.zeros(0, np.int32), np.zeros(0, np.float32))


class RecycledLogits:
    """Likely next tokens by context, learned from the target's passes.

    Args:
        capacity: most contexts, a power of two; the oldest are evicted.

    Attributes:
        table: the contexts with their likely tokens.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self.table = Table.of(capacity, NUM_LIKELY)
        self._tenant: str | None = None
        self._now = 0
        self._lock = Lock()  # held while entries are written or copied; drafts do not need it

    def serve(self, tenant: str) -> None:
        """Check that sequences are of one tenant: the first one.

        Raises:
            InvalidRequestError: earlier sequences were of another tenant.
        """
        if self._tenant is None:
            self._tenant = tenant
        if tenant != self._tenant:
            raise InvalidRequestError(
                f"a sequence of tenant {tenant!r} is not drafted for with what the target found "
                f"likely in those of tenant {self._tenant!r}: use recycled logits for each"
            )

    def learn(self, verified: Verified, context: TokenIds, *, keep: bool = True) -> Hints:
        """Store the likeliest tokens of each row of a pass.

        Args:
            verified: the pass.
            context: int32[NUM_ORDERS], the last tokens before it, the latest first; -1 for none.
            keep: whether they may outlive this table, which they may if the sequence is remembered.

        Returns:
            The other likely tokens at the position of the target's choice.
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
        """Enter findings from earlier or from elsewhere, each context as if from one more pass.

        Args:
            findings: findings of the same model, with tokens of its vocabulary.
        """
        with self._lock:
            # Their numbers are even, because they are already saved.
            first = (self._now + 1) << 1
            enter(self.table, findings.contexts, findings.tokens, findings.log_odds, first)
            self._now += len(findings)

    def learned_since(self, number: int) -> tuple[Findings, int]:
        """Return the findings of passes that may be kept, the oldest first, and a number.

        May run outside the decoding loop's thread, which then waits for at most one slice.

        Args:
            number: number from an earlier call, for the findings since then; 0 for all.
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
    """Return the arguments of `write_rows` for a pass over a tree of N nodes.

    Args:
        tree: the tree.
        context: int32[NUM_ORDERS], the last tokens before it, the latest first; -1 for none.
        logits: float32[R, K], those of the likeliest tokens of each row, descending.

    Returns:
        int32[1 + N, NUM_ORDERS], the last tokens at the root and at each node, the latest first,
        and float32[R, K], the log-odds of the likeliest tokens.
    """
    contexts = np.empty((len(tree) + 1, NUM_ORDERS), np.int32)
    contexts[0] = context
    log_odds = np.empty(logits.shape, np.float32)
    # Copied, because kernels would be compiled again for read-only arrays.
    describe_rows(np.array(tree.token_ids), np.array(tree.parents), contexts, logits, log_odds)
    return contexts, log_odds


def likeliest(
    logits: "torch.Tensor | NDArray[np.float32]", count: int
) -> tuple[TokenIds, NDArray[np.float32]]:
    """Return int32[R, count], the likeliest of each row, and float32[R, count], their logits.

    On CPUs `torch.topk` looks at one value after another, so a kernel searches rows of bfloat16 and
    float32 instead, five times as fast.

    Args:
        logits: [R, vocabulary].
        count: number of tokens per row, at most the vocabulary; the likeliest come first.
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
