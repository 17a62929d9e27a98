"""The requests of SGLang for which retrieved and trained drafts are merged: the host's side.

A step has three parts. `begin` takes in what the last one has committed, and asks our drafter;
`asks` says whether SGLang's drafter is to run; `rows` gives the nodes that are to be verified.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decoder.engines.engine_sessions import DrafterSessions
from decoder.engines.experimental_sglang.corpus import (
    EngineRequest,
    FollowedRequest,
    most_nodes,
    tokens_of,
)
from decoder.engines.experimental_sglang.custom_params import CustomParams
from decoder.engines.experimental_sglang.topology import Nodes, filled
from decoder.observation import Statistics
from decoder.speculators.trained_drafts import MergedSequence, TrainedDrafts, trained_tree
from retriever.drafter import TokenIds
from retriever.tree import DraftTree


@dataclass(slots=True)
class MergedRequest:
    """A request that both draft for.

    Attributes:
        followed: keeps our drafter up to date with it.
        merged: learns from it, and has its trees.
    """

    followed: FollowedRequest
    merged: MergedSequence


class MergedRequests:
    """Drafts for the requests of SGLang's steps, on top of its drafter; on the first rank.

    Not safe for use from several threads. Its methods may raise: then `drop` is called, and the
    engine goes on with its own drafts.

    Args:
        sessions: of our drafter.
        reader: of what requests state.
        vocabulary_size: a retrieved tree with a token beyond it is dropped.

    Attributes:
        trained: merges and learns.
        counts: what was accepted since `counted` was called.
    """

    def __init__(
        self, sessions: DrafterSessions, reader: CustomParams, vocabulary_size: int
    ) -> None:
        self.trained = TrainedDrafts()
        self.counts = Statistics()
        self._sessions = sessions
        self._reader = reader
        self._vocabulary_size = vocabulary_size
        self._followed: dict[str, MergedRequest] = {}
        self._off: dict[str, EngineRequest] = {}
        self._rows: list[MergedRequest | None] = []
        self._retrieved: list[DraftTree] = []

    def __len__(self) -> int:
        """Count the requests that are followed."""
        return len(self._followed)

    def commit(self, committed: Mapping[str, Sequence[int]], num_nodes: int) -> None:
        """Take in what a step has committed, by request; learn from it.

        Args:
            committed: the accepted tokens, and the target's own after them.
            num_nodes: of the step's trees.
        """
        for name, tokens in committed.items():
            each = self._followed.get(name)
            if each is not None and len(tokens):
                self._learn(each.merged, np.array(tokens, np.int32), num_nodes)

    def unknown(self, requests: Sequence[EngineRequest]) -> list[int]:
        """End requests that have left; return the rows of those that are not followed yet."""
        here = {request.rid for request in requests}
        for name in [*self._followed, *self._off]:
            if name not in here:
                self.end(name)
        return [row for row, request in enumerate(requests) if not self._is_known(request)]

    def begin(
        self, requests: Sequence[EngineRequest], new: Mapping[int, tuple[int, int]], num_nodes: int
    ) -> None:
        """Draft for all requests of a step.

        Args:
            requests: a row each.
            new: by the rows that `unknown` gave, how many tokens the engine has committed, and the
                last of them.
            num_nodes: most nodes of each tree.
        """
        for row, (length, last) in new.items():
            self._follow(requests[row], length, last)
        self._rows = [self._followed.get(request.rid) for request in requests]
        most = most_nodes(num_nodes + 1, len(requests))
        rows = [row for row, each in enumerate(self._rows) if each is not None]
        asked = [
            (each.followed.follower, each.followed.budget(most))
            for each in self._rows
            if each is not None
        ]
        self._retrieved = [DraftTree.empty()] * len(requests)
        for row, tree in zip(rows, self._sessions.draft(asked), strict=True):
            self._retrieved[row] = self._known(tree)

    def asks(self) -> bool:
        """Return whether to run SGLang's drafter for the step that was begun.

        It is where a request has no drafter but that.
        """
        if None in self._rows:
            self.trained.num_asked += 1
            return True
        return self.trained.asks(self._retrieved)

    def check_last(self, last: Sequence[int]) -> None:
        """Drop the requests whose last tokens are others than the engine's.

        Args:
            last: the token that the drafts of each row follow.
        """
        for row, each in enumerate(self._rows):
            if each is not None and int(each.merged.sequence.tokens[-1]) != last[row]:
                self._drop_row(row)

    def rows(
        self,
        own: Sequence[Nodes] | None,
        stated: Sequence[Sequence[float]] | None,
        num_nodes: int,
        *,
        is_chain: bool,
    ) -> list[Nodes]:
        """Return the nodes to verify, so many for each row.

        Args:
            own: what SGLang's drafter proposes; None where it was not run.
            stated: the probability of each node and all above it; None where it states none, and
                its drafts are chains.
            num_nodes: of each row.
            is_chain: whether chains are verified.
        """
        rows = []
        for row, each in enumerate(self._rows):
            nodes = None if own is None else own[row]
            if each is None:
                chosen = nodes or Nodes.of(DraftTree.empty())
            else:
                trained = self._trained(nodes, None if stated is None else stated[row])
                tree = self.trained.merge(
                    each.merged, self._retrieved[row], trained, num_nodes, is_chain=is_chain
                )
                chosen = Nodes.of(tree)
            rows.append(filled(chosen, num_nodes, is_chain=is_chain))
        return rows

    def counted(self) -> Statistics:
        """Return what was counted since the last call."""
        counts, self.counts = self.counts, Statistics()
        return counts

    def end(self, name: str) -> None:
        """End a request; its output is remembered if it may be."""
        self._off.pop(name, None)
        each = self._followed.pop(name, None)
        if each is not None:
            each.merged.fused.close()
            each.followed.follower.close()

    def end_all(self) -> None:
        """End all requests."""
        for name in [*self._followed, *self._off]:
            self.end(name)

    def drop(self) -> None:
        """Drop all requests after an error of ours: SGLang alone drafts for them to their ends."""
        for name in list(self._followed):
            self._drop(name)
        self._rows, self._retrieved = [], []

    def _drop_row(self, row: int) -> None:
        each, self._rows[row] = self._rows[row], None
        for name in [name for name, other in self._followed.items() if other is each]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        followed = self._followed.pop(name).followed
        if followed.request is not None:
            self._off[name] = followed.request
        self._sessions.abandon([followed.follower])

    def _is_known(self, request: EngineRequest) -> bool:
        each = self._followed.get(request.rid)
        shown = self._off.get(request.rid) if each is None else each.followed.request
        return shown is request

    def _follow(self, request: EngineRequest, length: int, last: int) -> None:
        """Follow a request whose tokens are known; the last one may only be known to the engine."""
        self.end(request.rid)
        fields = self._reader.of(request)
        if not fields.drafts:
            self._off[request.rid] = request
            return
        num_known = len(tokens_of(request))
        if num_known not in {length - 1, length}:  # the engine counts other tokens, as of images
            self._off[request.rid] = request
            return
        followed = FollowedRequest.of(request, self._sessions, fields)
        if num_known == length - 1:
            followed.sequence.extend([last])
        merged = self.trained.follow(followed.sequence)
        self._followed[request.rid] = MergedRequest(followed, merged)

    def _trained(self, own: Nodes | None, stated: Sequence[float] | None) -> DraftTree | None:
        if own is None:
            return None
        if stated is None:
            return self.trained.chain(own.tokens)
        return trained_tree(own.tokens, own.parents, stated)

    def _learn(self, merged: MergedSequence, came: TokenIds, num_nodes: int) -> None:
        if merged.fused.has_drafted:
            tree = merged.verified
            self.counts.record(tree, tree.follow(came[:-1]), len(came))
        self.trained.commit(merged, came, num_nodes)

    def _known(self, tree: DraftTree) -> DraftTree:
        is_known = len(tree) == 0 or int(tree.token_ids.max()) < self._vocabulary_size
        return tree if is_known else DraftTree.empty()
