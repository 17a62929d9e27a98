"""A drafter in place of the corpus in which SGLang's NGRAM worker looks up its drafts.

SGLang's NGRAM worker takes draft trees as a fixed number of nodes and a mask. Node 0 is the last
committed token. Row i of the mask is 1 for node i and for its ancestors. SGLang derives its links
from the mask alone: a node's first child is the first later node that sees it, its next sibling the
next node with the same parent, and verification goes from node 0 along these links.

So a padding node sees only itself. It is no node's child and, having no parent, no node's sibling:
no link leads to it, with any token and any choice of the target. Siblings must have different
tokens, as those of a `DraftTree` do: sampling adds up the probabilities of the siblings that it
passes, so a token that occurs twice would be drawn too often.

Source: sglang 0.5.23, `reconstructIndicesFromTreeMask`, `VerifyTreeGreedy` and
`TreeSpeculativeSamplingTargetOnly`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Final, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from decoder.engines.engine_sessions import DrafterSessions
from decoder.engines.request_fields import PLAIN, RequestFields
from decoder.plugins.experimental_sglang.custom_params import CustomParams
from retriever.drafter import TokenIds
from retriever.follower import Follower
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, DraftTree

NO_PARENT: Final = -1
"""Parent of node 0, and of padding."""

Nodes = NDArray[np.int64]
"""int64[2, rows, width]: tokens, and parents as positions in the row."""


def lay_out(trees: Sequence[DraftTree], last_tokens: Sequence[int], width: int) -> Nodes:
    """Return trees as rows of equal width, each preceded by its last committed token.

    A larger tree is cut. A smaller one is padded with its last committed token, for which every
    model has an embedding.

    Args:
        trees: one for each row.
        last_tokens: the last committed token of each.
        width: nodes of a row, node 0 included.
    """
    nodes = np.empty((2, len(trees), width), np.int64)
    tokens, parents = nodes
    tokens[:] = np.asarray(last_tokens, np.int64)[:, np.newaxis]
    parents[:] = NO_PARENT
    for row, tree in enumerate(trees):
        kept = tree.prefix(width - 1)
        tokens[row, 1 : 1 + len(kept)] = kept.token_ids
        parents[row, 1 : 1 + len(kept)] = kept.parents - ROOT
    return nodes


def masks_of(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64[rows, width, width]: which nodes each node sees, itself and its ancestors.

    Args:
        parents: int64[rows, width]; of a node, an earlier one or `NO_PARENT`.
    """
    num_rows, width = parents.shape
    masks = np.zeros((num_rows, width, width), np.int64)
    rows, nodes = np.arange(num_rows), np.arange(width)
    for node in np.flatnonzero((parents != NO_PARENT).any(axis=0)).tolist():
        above = masks[rows, parents[:, node]]
        above[rows, parents[:, node]] = 1
        masks[:, node] = above * (parents[:, node, np.newaxis] != NO_PARENT)
    masks[:, nodes, nodes] = 1
    return masks


class EngineRequest(Protocol):
    """The attributes of SGLang's requests that are read."""

    @property
    def rid(self) -> str:
        """Its name."""

    @property
    def origin_input_ids_unpadded(self) -> Sequence[int]:
        """The prompt."""

    @property
    def output_ids(self) -> Sequence[int]:
        """The output, as far as the scheduler knows it."""


@dataclass(slots=True)
class FollowedRequest:
    """A request whose tokens are followed.

    Attributes:
        follower: keeps the drafter up to date with it.
        offset: first tokens of the request that were never shown.
        request: the engine's request, where it was shown.
        fields: what it states for its drafts.
    """

    follower: Follower
    offset: int
    request: EngineRequest | None
    fields: RequestFields = PLAIN

    @classmethod
    def of(
        cls, request: EngineRequest, sessions: DrafterSessions, fields: RequestFields = PLAIN
    ) -> "FollowedRequest":
        """Follow a request that is shown: its prompt, and its output so far."""
        num_prompt = len(request.origin_input_ids_unpadded)
        return cls(sessions.follow(tokens_of(request), num_prompt, fields), 0, request, fields)

    @classmethod
    def of_tail(
        cls,
        tail: Sequence[int],
        length: int,
        sessions: DrafterSessions,
        fields: RequestFields = PLAIN,
    ) -> "FollowedRequest":
        """Follow a request of which only the last tokens and the length are known."""
        tokens = np.array(tail, np.int32)
        follower = sessions.follow(tokens, len(tokens), fields)
        return cls(follower, length - len(tokens), None, fields)

    @property
    def sequence(self) -> TokenSequence:
        """Its tokens."""
        return self.follower.sequence

    def budget(self, most: int) -> int:
        """Return the most nodes to draft, of those that the engine takes."""
        return most if self.fields.budget is None else min(self.fields.budget, most)

    def go_on(self, tail: Sequence[int], length: int) -> bool:
        """Append the new tokens; return whether the sequence is still the same."""
        tokens = np.array(tail, np.int32)
        num_known = len(tokens) - (length - self.offset - len(self.sequence))
        if not 0 <= num_known <= len(tokens) or num_known > len(self.sequence):
            return False
        known = self.sequence.tokens[len(self.sequence) - num_known :]
        if not np.array_equal(known, tokens[:num_known]):
            return False
        self.sequence.extend(tokens[num_known:])
        return True

    def take_rest(self) -> None:
        """Append the output since the last step."""
        if self.request is not None:
            self.sequence.extend(tokens_of(self.request)[len(self.sequence) :])


def tokens_of(request: EngineRequest) -> TokenIds:
    """Return int32[n], a request's prompt and its output so far."""
    prompt = np.asarray(request.origin_input_ids_unpadded, np.int32)
    return np.concatenate([prompt, np.asarray(request.output_ids, np.int32)])


_log = getLogger(__name__)

_MAX_NODES: Final = 256  # no drafter gives more for one sequence,
_MAX_STEP_NODES: Final = 1 << 16  # or in one step
_NO_CORPORA: Final = (
    "drafts come from foredraft's own indexes: name them in its settings, or start with "
    "--speculative-algorithm NGRAM"
)

Share = Callable[[Nodes], None]
"""Makes the first rank's nodes those of all ranks, in place."""


class DrafterCorpus:
    """Replaces SGLang's `NgramCorpus`, and asks a drafter.

    Each request is a session, under a name of our own; one step of the engine is one call of the
    drafter. A drafter that fails costs its drafts: then rows hold node 0 and padding. Nothing that
    the worker calls while it decodes ever raises. Not safe for use from several threads.

    Source: sglang 0.5.23, `sglang.srt.speculative.cpp_ngram.ngram_corpus`.

    Args:
        sessions: of the drafter; None where another rank drafts, or none.
        width: nodes of a row, the last committed token included.
        vocabulary_size: a tree with a token beyond it would crash the model, and is dropped; None
            to check no tree.
        share: for several ranks, which must verify the same nodes.
        reader: of what requests state for their drafts; without tenants if not given.
        max_step_nodes: most nodes of all requests that a step asks for; drafters refuse more.

    Attributes:
        num_errors: steps without drafts because of an error of ours.
        num_foreign: trees with tokens that the model does not have.
    """

    remaining_token_budget: Final = 0

    def __init__(  # noqa: PLR0913  (the last four are options)
        self,
        sessions: DrafterSessions | None,
        width: int,
        vocabulary_size: int | None = None,
        share: Share | None = None,
        reader: CustomParams | None = None,
        *,
        max_step_nodes: int = _MAX_STEP_NODES,
    ) -> None:
        self.num_errors = 0
        self.num_foreign = 0
        self._sessions = sessions
        self._width = width
        self._vocabulary_size = vocabulary_size
        self._share = share
        self._reader = reader or CustomParams()
        self._max_step_nodes = max_step_nodes
        self._off: dict[str, EngineRequest] = {}
        self._shows = False
        self._followed: dict[str, FollowedRequest] = {}

    def __len__(self) -> int:
        """Count the requests that are followed."""
        return len(self._followed)

    def show(self, requests: Iterable[EngineRequest]) -> None:
        """Begin a session for each request that has none; before `batch_get`.

        Its prompt must be known from the start, and `batch_get` is told the last tokens alone.
        """
        if self._sessions is None:
            return
        self._shows = True
        with self._never_failing():
            for request in requests:
                followed = self._followed.get(request.rid)
                shown = self._off.get(request.rid) if followed is None else followed.request
                if shown is not request:
                    self._begin(request, self._sessions)

    def batch_get(
        self,
        req_ids: Sequence[str],
        batch_tokens: Sequence[Sequence[int]],
        total_lens: Sequence[int],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draft for each request.

        Args:
            req_ids: names of requests.
            batch_tokens: the last tokens of each, at least one.
            total_lens: how many tokens each has.

        Returns:
            int64[n * width], the tokens of the rows; int64[n * width * width], their masks.
        """
        trees = [DraftTree.empty()] * len(req_ids)
        if self._sessions is not None:
            with self._never_failing():
                trees = self._draft(self._sessions, req_ids, batch_tokens, total_lens)
        last_tokens = [tokens[-1] if len(tokens) else 0 for tokens in batch_tokens]
        nodes = lay_out(trees, last_tokens, self._width)
        if self._share is not None:
            self._share(nodes)
        tokens, parents = nodes
        return tokens.reshape(-1), masks_of(parents).reshape(-1)

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Do nothing: the drafter learns from outputs when their sessions end."""

    def synchronize(self) -> None:
        """Do nothing: nothing is put in."""

    def erase_match_state(self, req_ids: Sequence[str]) -> None:
        """End the sessions of finished requests; their outputs are remembered."""
        with self._never_failing():
            for name in req_ids:
                self._end(name)

    def reset(self) -> None:
        """End all sessions. What the drafter has learned stays: it is not the engine's cache."""
        self.erase_match_state([*self._followed, *self._off])

    def list_external_corpora(self) -> dict[str, int]:
        """Return nothing: there are none of the engine's kind."""
        return {}

    def load_external_corpus_named(
        self, corpus_id: str, _chunks: Iterable[Sequence[int]], /
    ) -> NoReturn:
        """Refuse a corpus.

        Raises:
            ValueError: always; the engine passes the message on to its client.
        """
        raise ValueError(f"corpus {corpus_id!r} is not loaded: {_NO_CORPORA}")

    def commit_external_corpus_load(self, corpus_id: str, _loaded_token_count: int, /) -> NoReturn:
        """Refuse a corpus; see `load_external_corpus_named`."""
        self.load_external_corpus_named(corpus_id, ())

    def remove_external_corpus(self, corpus_id: str) -> NoReturn:
        """Refuse, as there is no corpus.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"there is no corpus {corpus_id!r}: {_NO_CORPORA}")

    def _draft(
        self,
        sessions: DrafterSessions,
        names: Sequence[str],
        tails: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(names)
        rows = [row for row, name in enumerate(names) if self._is_drafted_for(name)]
        followed = [self._follow(sessions, names[row], tails[row], lengths[row]) for row in rows]
        most = min(self._width - 1, _MAX_NODES, self._max_step_nodes // max(len(names), 1))
        asked = [(each.follower, each.budget(most)) for each in followed]
        for row, tree in zip(rows, sessions.draft(asked), strict=True):
            trees[row] = self._checked(tree)
        return trees

    def _is_drafted_for(self, name: str) -> bool:
        """Return whether a request is; what one that was not shown states is not known."""
        return name not in self._off and (name in self._followed or not self._shows)

    def _begin(self, request: EngineRequest, sessions: DrafterSessions) -> None:
        self._end(request.rid)
        fields = self._reader.of(request)
        if fields.drafts:
            self._followed[request.rid] = FollowedRequest.of(request, sessions, fields)
        else:
            self._off[request.rid] = request

    def _follow(
        self, sessions: DrafterSessions, name: str, tail: Sequence[int], length: int
    ) -> FollowedRequest:
        """Return a request, up to date; a name that was reused is followed from the start."""
        followed = self._followed.get(name)
        if followed is not None and followed.go_on(tail, length):
            return followed
        request = followed.request if followed is not None else None
        fields = followed.fields if followed is not None else PLAIN
        self._end(name)
        followed = FollowedRequest.of(request, sessions, fields) if request is not None else None
        if followed is None or not followed.go_on(tail, length):
            followed = FollowedRequest.of_tail(tail, length, sessions, fields)
        self._followed[name] = followed
        return followed

    def _checked(self, tree: DraftTree) -> DraftTree:
        size = self._vocabulary_size
        if size is None or len(tree) == 0 or int(tree.token_ids.max()) < size:
            return tree
        self.num_foreign += 1
        if self.num_foreign == 1:
            _log.warning(
                "a draft has token %d and the model knows %d: drafts with such tokens are dropped; "
                "draft from an index built with the model's own tokenizer",
                int(tree.token_ids.max()),
                size,
            )
        return DraftTree.empty()

    def _end(self, name: str) -> None:
        self._off.pop(name, None)
        followed = self._followed.pop(name, None)
        if followed is not None:
            followed.take_rest()
            followed.follower.close()

    @contextmanager
    def _never_failing(self) -> Iterator[None]:
        """Drop all sessions after an error of ours, so that the engine goes on."""
        try:
            yield
        except Exception:  # noqa: BLE001  (its server would end)
            self.num_errors += 1
            if self.num_errors == 1:
                _log.exception("the engine goes on without these drafts")
            if self._sessions is not None:
                self._sessions.abandon(each.follower for each in self._followed.values())
            self._followed.clear()


class RankGroup(Protocol):
    """The attributes of SGLang's groups of ranks that are read.

    Attributes:
        world_size: ranks in it.
        ranks: their global numbers.
        cpu_group: the process group for tensors on the host.
    """

    world_size: int
    ranks: list[int]
    cpu_group: ProcessGroup


def sharing(group: RankGroup) -> Share | None:
    """Return a function that copies the first rank's nodes to all; None for a single rank."""
    if group.world_size == 1:
        return None

    def share(nodes: Nodes) -> None:
        torch.distributed.broadcast(
            torch.from_numpy(nodes), src=group.ranks[0], group=group.cpu_group
        )

    return share
