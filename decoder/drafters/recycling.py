"""Recycles the target's own logits as drafts when the same last tokens occur again.

Every pass computes likely next tokens after each node of the tree, whether the node is accepted or
not. Token Recycling (Luo et al., 2024, arXiv:2408.08696) stores the likeliest successors of each
token. This table stores them for the last one, two and three tokens, with their probabilities.

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
"""Number of contexts in a table, which take 21 MB. They come from about 87,000 rows of logits,
because each row is stored under three contexts. A smaller table forgets sooner; a larger one misses
the processor's caches more often."""

NUM_LIKELY: Final = NUM_FOUND
"""Tokens stored for each row of logits: with more, reading the table would be slower."""

_SLICE: Final = 1 << 12
"""Number of entries scanned while the lock is held. A pass may wait for the scan, which takes 80 us
if all entries are new and 8 us if none is."""

_PAUSE_S: Final = 1e-4
"""Seconds of pause between two slices, so that the decoding loop gets the interpreter."""

_MAY_BE_KEPT: Final = 1
"""Lowest bit of an entry's write number: set if the entry comes from a sequence that is
remembered."""

NO_HINTS: Final = Hints(np.zeros(0, np.int32), np.zeros(0, np.float32))


class RecycledLogits:
    """Likely next tokens by context, taken from the target's passes.

    Args:
        capacity: most contexts, a power of two; the oldest contexts are evicted.

    Attributes:
        table: the contexts with their likely tokens.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self.table = Table.of(capacity, NUM_LIKELY)
        self._tenant: str | None = None
        self._now = 0
        self._lock = Lock()  # held while entries are written or copied; drafting does not need it

    def serve(self, tenant: str) -> None:
        """Check that a sequence is of the same tenant as the first sequence.

        Raises:
            InvalidRequestError: earlier sequences were of another tenant.
        """
        if self._tenant is None:
            self._tenant = tenant
        if tenant != self._tenant:
            raise InvalidRequestError(
                f"a sequence of tenant {tenant!r} must not be drafted from tokens that were "
                f"likely for tenant {self._tenant!r}: use separate recycled logits for each tenant"
            )

    def learn(self, verified: Verified, context: TokenIds, *, keep: bool = True) -> Hints:
        """Store the likeliest tokens of each row of logits of a pass.

        Args:
            verified: the pass over the draft.
            context: int32[NUM_ORDERS], the last tokens before the tree, the latest first; -1 for
                none.
            keep: whether these tokens may be saved, that is, whether the sequence is remembered.

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
        """Enter table entries from earlier runs or other decoders, each as if from one more pass.

        Args:
            findings: contexts with their likely tokens, from the same model and vocabulary.
        """
        with self._lock:
            # Even write numbers, because these entries are already saved.
            first = (self._now + 1) << 1
            enter(self.table, findings.contexts, findings.tokens, findings.log_odds, first)
            self._now += len(findings)

    def learned_since(self, number: int) -> tuple[Findings, int]:
        """Return new entries that may be saved, the oldest first, and a number for the next call.

        This may run in another thread than the decoding loop, which waits for at most one slice.

        Args:
            number: number from an earlier call, to get only entries since then; 0 for all entries.
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
        tree: the verified tree.
        context: int32[NUM_ORDERS], the last tokens before the tree, the latest first; -1 for none.
        logits: float32[R, K], logits of the likeliest tokens of each row, in descending order.

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
    """Return int32[R, count], each row's likeliest tokens, and float32[R, count], their logits.

    On CPUs `torch.topk` looks at one value after another. So a kernel searches bfloat16 and float32
    rows instead, which is five times as fast.

    Args:
        logits: [R, vocabulary], logits of R rows, in any float dtype.
        count: number of tokens per row, at most the vocabulary size; the likeliest come first.
    """
    if isinstance(logits, np.ndarray):
        columns = np.empty((len(logits), count), np.int32)
        rank_columns(np.ascontiguousarray(logits).view(np.int32), columns)
        return columns, np.take_along_axis(logits, columns, axis=1)
    import torch  # noqa: PLC0415  (the caller of a tensor has loaded it)

    integers = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(logits.dtype)
    if integers is None or logits.device.type != "cpu":
        values, indices = logits.topk(count, dim=-1)
        return indices.cpu().numpy().astype(np.int32), values.float().cpu().numpy()
    columns = np.empty((len(logits), count), np.int32)
    rank_columns(logits.contiguous().view(integers).numpy(), columns)
    values = logits.gather(1, torch.from_numpy(columns).long())
    return columns, values.float().numpy()
