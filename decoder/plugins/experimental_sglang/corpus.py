"""A drafter that replaces the corpus of SGLang's NGRAM worker.

SGLang's NGRAM worker takes draft trees as a fixed number of nodes and a mask. Node 0 is the last
committed token. Row i of the mask is 1 for node i and for its ancestors. SGLang derives links only
from the mask. A node's first child is the first later node that sees it. Its next sibling is the
next node with the same parent. Verification follows these links from node 0.

So a padding node sees only itself. It is not a child of any node, and without a parent it has no
siblings. So no link leads to it, whatever its token and the target's choices. Siblings must have
different tokens, as in a `DraftTree`. Sampling adds up the probabilities of the siblings that it
passes, so a token that occurs twice would be sampled too often.

Source: sglang 0.5.23, `reconstructIndicesFromTreeMask`, `VerifyTreeGreedy` and
`TreeSpeculativeSamplingTargetOnly`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from decoder.engines.engine_guard import EngineGuard
from decoder.engines.engine_sequences import EngineRow, EngineSequences, NamedRequest
from decoder.plugins.experimental_sglang.custom_params import CustomParams
from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree

NO_PARENT: Final = -1
"""Parent of node 0, and of padding nodes."""

Nodes = NDArray[np.int64]
"""int64[2, rows, width]: the tokens, and the parents as positions in the row."""


def lay_out(trees: Sequence[DraftTree], last_tokens: Sequence[int], width: int) -> Nodes:
    """Return trees as rows of equal width; node 0 of a row is the last committed token.

    A larger tree is cut. A smaller tree is padded with the last committed token, because the model
    certainly has an embedding for it.

    Args:
        trees: one tree for each row.
        last_tokens: the last committed token of each row.
        width: number of nodes in a row, node 0 included.
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
    """Return int64[rows, width, width]: the nodes that each node sees, itself and its ancestors.

    Args:
        parents: int64[rows, width], the parent of each node: an earlier node or `NO_PARENT`.
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
    """The attributes of SGLang's requests that the corpus reads."""

    @property
    def rid(self) -> str:
        """Name of the request."""

    @property
    def origin_input_ids_unpadded(self) -> Sequence[int]:
        """The prompt."""

    @property
    def output_ids(self) -> Sequence[int]:
        """The output, as far as the scheduler has received it."""


def tokens_of(request: EngineRequest) -> TokenIds:
    """Return int32[n], a request's prompt and its output so far."""
    prompt = np.asarray(request.origin_input_ids_unpadded, np.int32)
    return np.concatenate([prompt, np.asarray(request.output_ids, np.int32)])


_log = logging.getLogger(__name__)

_MAX_NODES: Final = 256  # most nodes of a draft for one sequence
_MAX_STEP_NODES: Final = 1 << 16  # most nodes of all drafts in one step
_NO_CORPORA: Final = (
    "drafts come from foredraft's own indexes: name them in its settings, or start with "
    "--speculative-algorithm NGRAM"
)

Share = Callable[[Nodes], None]
"""Copies the nodes of the first rank to all ranks, in place."""


class DrafterCorpus:
    """A replacement for SGLang's `NgramCorpus` that calls a drafter.

    Each request is a session with a name of our own. One step of the engine is one call of the
    drafter. If the drafter fails, there are no drafts: rows have only node 0 and padding. Methods
    that the worker calls while it decodes never raise. Not thread-safe.

    Source: sglang 0.5.23, `sglang.srt.speculative.cpp_ngram.ngram_corpus`.

    Args:
        sequences: the sequences with their drafter; None if another rank drafts, or no rank does.
        width: number of nodes in a row, the last committed token included.
        vocabulary_size: size of the model's vocabulary. A tree with a token beyond it would crash
            the model, and is dropped. None to check no tree.
        share: copies the nodes to all ranks, which must verify the same nodes.
        reader: reader of the requests' own fields; the default allows no tenants.
        max_step_nodes: most nodes to request in a step for all requests; drafters refuse more.

    Attributes:
        num_foreign: number of dropped trees, which had tokens that the model lacks.
    """

    remaining_token_budget: Final = 0

    def __init__(  # noqa: PLR0913  (the last four are options)
        self,
        sequences: EngineSequences | None,
        width: int,
        vocabulary_size: int | None = None,
        share: Share | None = None,
        reader: CustomParams | None = None,
        *,
        max_step_nodes: int = _MAX_STEP_NODES,
    ) -> None:
        self.num_foreign = 0
        self._sequences = sequences
        self._width = width
        self._vocabulary_size = vocabulary_size
        self._share = share
        self._reader = reader or CustomParams()
        self._max_step_nodes = max_step_nodes
        self._shows = False
        self._shown: dict[str, tuple[EngineRequest, NamedRequest]] = {}
        self._guard = EngineGuard("the engine", _log, self._abandon, logging.ERROR)

    def __len__(self) -> int:
        """Return the number of requests with a session."""
        return 0 if self._sequences is None else len(self._sequences)

    @property
    def num_errors(self) -> int:
        """Number of steps without drafts because of an error in this package."""
        return self._guard.num_failures

    def show(self, requests: Iterable[EngineRequest]) -> None:
        """Take the requests of a step; `batch_get`, called later, gets only their last tokens."""
        if self._sequences is None:
            return
        self._shows = True
        with self._guard:
            for request in requests:
                shown = self._shown.get(request.rid)
                if shown is None or shown[0] is not request:
                    self._end(request.rid)
                    named = NamedRequest(request.rid, request, self._reader.of(request))
                    self._shown[request.rid] = request, named

    def batch_get(
        self,
        req_ids: Sequence[str],
        batch_tokens: Sequence[Sequence[int]],
        total_lens: Sequence[int],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draft for each request.

        Args:
            req_ids: names of n requests.
            batch_tokens: the last tokens of each request, at least one.
            total_lens: number of tokens of each request.

        Returns:
            int64[n * width], the tokens of the rows; int64[n * width * width], their masks.
        """
        trees = [DraftTree.empty()] * len(req_ids)
        if self._sequences is not None:
            with self._guard:
                trees = self._draft(self._sequences, req_ids, batch_tokens, total_lens)
        last_tokens = [tokens[-1] if len(tokens) else 0 for tokens in batch_tokens]
        nodes = lay_out(trees, last_tokens, self._width)
        if self._share is not None:
            self._share(nodes)
        tokens, parents = nodes
        return tokens.reshape(-1), masks_of(parents).reshape(-1)

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Do nothing: the drafter learns from outputs when their sessions end."""

    def synchronize(self) -> None:
        """Do nothing: `batch_put` stores nothing."""

    def erase_match_state(self, req_ids: Sequence[str]) -> None:
        """End the sessions of finished requests; the drafter stores their outputs."""
        with self._guard:
            for name in req_ids:
                self._end(name)

    def reset(self) -> None:
        """End all sessions. The drafter's stored outputs stay: they are not the engine's cache."""
        self.erase_match_state(list(self._shown))
        if self._sequences is not None:
            with self._guard:
                self._sequences.close()

    def list_external_corpora(self) -> dict[str, int]:
        """Return an empty dictionary: there are no corpora of the engine's kind."""
        return {}

    def load_external_corpus_named(
        self, corpus_id: str, _chunks: Iterable[Sequence[int]], /
    ) -> NoReturn:
        """Refuse a corpus.

        Raises:
            ValueError: always; the engine sends the message to its client.
        """
        raise ValueError(f"corpus {corpus_id!r} is not loaded: {_NO_CORPORA}")

    def commit_external_corpus_load(self, corpus_id: str, _loaded_token_count: int, /) -> NoReturn:
        """Refuse a corpus; see `load_external_corpus_named`."""
        self.load_external_corpus_named(corpus_id, ())

    def remove_external_corpus(self, corpus_id: str) -> NoReturn:
        """Refuse, because there is no such corpus.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"there is no corpus {corpus_id!r}: {_NO_CORPORA}")

    def _draft(
        self,
        sequences: EngineSequences,
        names: Sequence[str],
        tails: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> list[DraftTree]:
        most = min(self._width - 1, _MAX_NODES, self._max_step_nodes // max(len(names), 1))
        rows = {
            at: self._row(name, np.array(tails[at], np.int32), lengths[at], most)
            for at, name in enumerate(names)
            if name in self._shown or not self._shows  # the fields of others are unknown
        }
        trees = [DraftTree.empty()] * len(names)
        for at, tree in zip(rows, sequences.step(list(rows.values())), strict=True):
            trees[at] = self._checked(tree)
        return trees

    def _row(self, name: str, tail: TokenIds, length: int, most: int) -> EngineRow:
        first = length - len(tail)
        if name not in self._shown:
            return EngineRow(tail, length, most, NamedRequest(name), first)
        request, named = self._shown[name]
        num_prompt, earlier = len(request.origin_input_ids_unpadded), partial(tokens_of, request)
        return EngineRow(tail, num_prompt, named.fields.most(most), named, first, earlier)

    def _checked(self, tree: DraftTree) -> DraftTree:
        size = self._vocabulary_size
        if size is None or len(tree) == 0 or int(tree.token_ids.max()) < size:
            return tree
        self.num_foreign += 1
        if self.num_foreign == 1:
            _log.warning(
                "a draft has token %d, but the model has %d tokens: such drafts are dropped; draft "
                "from an index that was built with the model's own tokenizer",
                int(tree.token_ids.max()),
                size,
            )
        return DraftTree.empty()

    def _end(self, name: str) -> None:
        shown = self._shown.pop(name, None)
        if self._sequences is not None:
            self._sequences.end(name, None if shown is None else tokens_of(shown[0]))

    def _abandon(self) -> None:
        self._shown.clear()
        if self._sequences is not None:
            self._sequences.abandon()


class RankGroup(Protocol):
    """The attributes of SGLang's groups of ranks that the corpus reads.

    Attributes:
        world_size: number of ranks in the group.
        ranks: global numbers of the ranks.
        cpu_group: process group for tensors on the host.
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
