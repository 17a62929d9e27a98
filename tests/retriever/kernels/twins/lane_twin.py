"""The slow and obvious twin of running outputs: lists of tokens, searched from the newest place."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from retriever.kernels.chains import FADING, LEAST_FADED, salted_bucket_of
from retriever.kernels.layout import LANE_BLOCK, MAX_MATCH
from tests.retriever.kernels.twins.row_twins import Row


@dataclass
class LaneTwin:
    """One sequence: all of its tokens, and where its lane begins."""

    group: int
    is_shared: bool
    version: int
    tokens: list[int]
    begin: int
    prompt_length: int
    is_over: bool = False


@dataclass
class RunningTwin:
    """All lanes, and every n-gram in the order in which it was noted.

    Attributes:
        orders: of n-grams, longest first.
        max_rows: most rows of each.
        num_buckets: of the compiled ring: which n-grams share a bucket is taken as given.
        noted: lane and position of each n-gram, by order, group (0 for all) and bucket.
    """

    orders: Sequence[int]
    max_rows: Sequence[int]
    num_buckets: int
    lanes: list[LaneTwin] = field(default_factory=list)
    noted: dict[tuple[int, int, int], list[tuple[int, int]]] = field(default_factory=dict)

    def commit(self, number: int, tokens: Sequence[int]) -> None:
        lane = self.lanes[number]
        first = max(lane.prompt_length - 1, 0) if not self._has_begun(number) else len(lane.tokens)
        lane.tokens += tokens
        for position in range(first, len(lane.tokens)):
            self._note(number, lane.group, position)
            held = position + 1 - lane.begin
            if lane.is_shared and held % LANE_BLOCK == 0:
                for earlier in range(position + 1 - LANE_BLOCK, position + 1):
                    if earlier >= lane.prompt_length - 1:
                        self._note(number, 0, earlier)

    def _has_begun(self, number: int) -> bool:
        return len(self.lanes[number].tokens) > self.lanes[number].prompt_length

    def _note(self, number: int, group: int, position: int) -> None:
        tokens = self.lanes[number].tokens
        for order in self.orders:
            if position + 1 >= order:
                bucket = self._bucket(tokens[position + 1 - order : position + 1], group)
                self.noted.setdefault((order, group, bucket), []).append((number, position))

    def _bucket(self, ngram: Sequence[int], group: int) -> int:
        return _salted_bucket_of(tuple(ngram), self.num_buckets, group)

    def rows(self, asking: LaneTwin | None, query: Sequence[int], depth: int) -> list[Row]:
        group = 0 if asking is None else asking.group
        found = self._rows_in(group, asking, query, depth) if group else []
        return found + self._rows_in(0, asking, query, depth)

    def _rows_in(
        self, salt: int, asking: LaneTwin | None, query: Sequence[int], depth: int
    ) -> list[Row]:
        rows, too_long = [], len(query) + 1
        for order, most in zip(self.orders, self.max_rows, strict=True):
            if len(query) < order:
                continue
            wanted = order, salt, self._bucket(query[-order:], salt)
            places = self.noted.get(wanted, [])
            found = 0
            for number, position in reversed(places[-4 * most :]):
                row = self._row(salt, asking, number, position, query, depth)
                if row is not None and order <= row.match < too_long and found < most:
                    rows.append(row)
                    found += 1
            too_long = order
        return rows

    def _row(
        self,
        salt: int,
        asking: LaneTwin | None,
        number: int,
        position: int,
        query: Sequence[int],
        depth: int,
    ) -> Row | None:
        lane = self.lanes[number]
        is_kin = asking is not None and lane.group == asking.group
        if lane.is_over or lane is asking or is_kin != (salt > 0):
            return None
        weight = weight_of(lane.version, None if asking is None else asking.version)
        match = 0
        while (
            match < min(len(query), MAX_MATCH)
            and position - match >= lane.begin
            and lane.tokens[position - match] == query[-1 - match]
        ):
            match += 1
        continuation = tuple(lane.tokens[position + 1 : position + 1 + depth])
        return Row(continuation, match, count=weight) if continuation and weight else None


@lru_cache(maxsize=1 << 16)
def _salted_bucket_of(ngram: tuple[int, ...], num_buckets: int, group: int) -> int:
    array = np.array(ngram, np.int32)
    return int(salted_bucket_of(array, 0, -1, len(ngram), num_buckets, group))


def weight_of(written_by: int, asks: int | None) -> float:
    """What evidence of a version counts for another; of none for one that states none."""
    if asks is None or asks < 0:
        return 1.0
    return max(LEAST_FADED, float(FADING ** min(60, abs(asks - max(written_by, 0)))))
