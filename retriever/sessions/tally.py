"""What a drafter has done, in numbers that cost a microsecond a step to keep."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.entries import count_outcome
from retriever.tree import MAX_SOURCES, DraftTree
from retriever.v1 import retriever_pb2 as pb

BOUNDS_S: Final = (
    *(float(f"{step}e{power}") for power in range(-5, 0) for step in (1, 1.6, 2.5, 4, 6.3)),
    1.0,
)
"""Upper bounds of the latencies that are counted together, in seconds: from 10 us to 1 s."""

MOST_FAIL_OPENS: Final = 1 << 20
"""As many drafts that a client went without are counted of one message, for each reason."""

_NOTHING: Final = np.zeros(1, np.int32)


class Latencies:
    """How often something took how long.

    Attributes:
        counts: one for each of `BOUNDS_S`, and one for what took longer.
        total_s: all of them together, in seconds.
    """

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count something that took so long each of so many times."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += times
        self.total_s += seconds * times


class Tally:
    """Counts that only rise. Writers hold the drafter's lock; readers need none.

    `failed_open` is for one thread, the one that answers clients, and takes no lock.

    A node counts once it is known what became of it: with the next step of its session, or its
    end. It came true if the tokens committed next are its path, whether or not whoever verified
    the draft had cut it off: so this is what could be accepted at most.

    Attributes:
        by_source: int64[2, MAX_SOURCES], nodes and those that came true.
        steps: how long steps took, waiting for other drafts included.
        drafts: how long a sequence of a step took on average, counted for each.
        num_bare: drafts of bare contexts among them.
        num_outcomes: drafts of which it is known what became of them.
        num_committed: tokens that were committed after those.
        fail_opens: drafts that clients say they went without, by `FailOpenReason`.
    """

    def __init__(self) -> None:
        self.by_source: NDArray[np.int64] = np.zeros((2, MAX_SOURCES), np.int64)
        self.steps = Latencies()
        self.drafts = Latencies()
        self.num_bare = 0
        self.num_outcomes = 0
        self.num_committed = 0
        self.fail_opens = [0] * len(pb.FailOpenReason.values())

    def stepped(self, num_drafts: int, seconds: float) -> None:
        """Count a step of so many sequences that took so long."""
        self.steps.add(seconds)
        if num_drafts:
            self.drafts.add(seconds / num_drafts, num_drafts)

    def drafted_bare(self, seconds: float) -> None:
        """Count a draft of a bare context that took so long."""
        self.num_bare += 1
        self.drafts.add(seconds)

    def committed(self, tree: DraftTree, tokens: TokenIds) -> None:
        """Count what became of a draft, with int32[n], the tokens that came next."""
        count_outcome(tree.token_ids, tree.parents, tree.sources, tokens, self.by_source)
        self.num_outcomes += 1
        self.num_committed += len(tokens)

    def failed_open(self, told: Iterable[pb.FailOpenCount]) -> None:
        """Count what a client says that it went without; it may say anything.

        Of one reason at most `MOST_FAIL_OPENS` count, and reasons that are not known as not stated.
        """
        most = dict.fromkeys(pb.FailOpenReason.values(), MOST_FAIL_OPENS)
        for each in told:
            reason = each.reason if each.reason in most else pb.FAIL_OPEN_REASON_UNSPECIFIED
            counted = min(each.count, most[reason])
            most[reason] -= counted
            self.fail_opens[reason] += counted

    def warm(self) -> None:
        """Compile or load the kernel, without counting anything."""
        tree = DraftTree.empty()
        count_outcome(tree.token_ids, tree.parents, tree.sources, _NOTHING, self.by_source)
