"""Retrieval on top of SGLang's DFlash drafter; importing this loads the engine.

DFlash drafts a block of tokens in one pass, and its worker drafts and verifies it in one function.
Between the two the tokens stand in a buffer of the worker's: the target's pass reads them from
there, and so does what accepts them. Merged tokens are written into it as soon as the engine makes
something of it: the links of a grammar, which copy it, or else the input of the target's pass.

A block is a chain, and DFlash keeps no probabilities of its tokens. Its verification asks for none:
it compares tokens, or draws from the target's distribution alone. Where a checkpoint brings heads
that draw among candidates (a selector, LiLiCorr), verification must know how each token was drawn,
and such workers are refused. The drafter is run in every step: one pass drafts the whole block.

Source: sglang 0.5.23, `DFlashWorkerV2.forward_batch_generation`, `_accept_block`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from sglang.srt.speculative import dflash_worker_v2

from decoder.engines.contract import check_contract, differences
from decoder.engines.experimental_sglang import TESTED
from decoder.engines.experimental_sglang.merged_steps import (
    MergedSteps,
    Parts,
    named_over,
    parts_for,
)
from decoder.engines.experimental_sglang.topology import Nodes

_HEADS: Final = {"selector": "a candidate selector", "lilicorr": "LiLiCorr"}
"""What draws a block's tokens among candidates, by the worker's attribute."""

_BUFFER: Final = "_draft_block_tokens_buf"
"""The worker's buffer of drafted tokens, the last committed one of each row first."""


class BlockMerging(MergedSteps):
    """Merges what retrieval has into the blocks of an engine's worker.

    Args:
        worker: of the engine.
        parts: see `MergedSteps`.
    """

    def __init__(self, worker: Any, parts: Parts) -> None:
        super().__init__(worker, parts)
        self._batch: Any = None  # whose block is not merged yet
        module: Any = dflash_worker_v2
        module.GrammarTree = self._linking(module.GrammarTree)
        module.DFlashVerifyInput = self._verifying(module.DFlashVerifyInput)

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Merge into the block that the engine drafts and verifies within."""
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def merge(self, block: torch.Tensor) -> None:
        """Put merged tokens in the place of a block's, once a step.

        Args:
            block: integers[rows, 1 + n], the last committed token of each row, and drafted ones.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            return
        num_nodes = block.shape[1] - 1
        if not self.decided(self._begun(batch, block, num_nodes)):
            return
        rows = self.shared(self._rows(block, num_nodes), batch, num_nodes)
        if rows is not None:
            block[:, 1:].copy_(torch.from_numpy(np.stack([row.tokens for row in rows])))

    def _begun(self, batch: Any, block: torch.Tensor, num_nodes: int) -> int:
        """Take in what came and ask our drafter; return whether a block is merged, as 1 or 0."""
        if self.requests is None:
            return 0
        try:
            if block.data_ptr() != getattr(self._worker, _BUFFER).data_ptr():
                raise RuntimeError("SGLang verifies other tokens than those it accepts")  # noqa: TRY301
            self.begin(self.requests, batch, num_nodes)
            self.requests.trained.num_asked += 1
        except Exception:  # noqa: BLE001  (its server would end)
            self.fail()
            return 0
        return 1

    def _rows(self, block: torch.Tensor, num_nodes: int) -> list[Nodes] | None:
        """Return the nodes to verify; None where an error of ours leaves none."""
        if self.requests is None:
            return None
        try:
            tokens = block.tolist()
            self.requests.check_last([row[0] for row in tokens])
            above = np.arange(-1, num_nodes - 1)
            own = [Nodes(np.array(row[1:], np.int64), above) for row in tokens]
            return self.requests.rows(own, None, num_nodes, is_chain=True)
        except Exception:  # noqa: BLE001  (as above)
            self.fail()
            return None

    def _linking(self, base: Any) -> type:
        """Return the engine's class for the links of a grammar, which merges first."""
        merge = self.merge

        class MergedGrammarTree(base):  # type: ignore[misc]  # sglang is not checked
            """Made of a merged block."""

            @classmethod
            def from_linear_chain(cls, verify_ids_2d: torch.Tensor) -> Any:
                merge(verify_ids_2d)
                return super().from_linear_chain(verify_ids_2d)

        return MergedGrammarTree

    def _verifying(self, base: Any) -> type:
        """Return the engine's class for the input of the target's pass, which merges first."""
        merge = self.merge

        class MergedVerifyInput(base):  # type: ignore[misc]  # as above
            """Has a merged block."""

            def __post_init__(self) -> None:
                super().__post_init__()
                merge(self.draft_token.view(-1, int(self.draft_token_num)))

        return MergedVerifyInput


def over(base: type) -> type:
    """Return SGLang's worker for DFlash with retrieval on top.

    Args:
        base: `DFlashWorkerV2`.
    """

    class ForedraftOverWorker(base):  # type: ignore[misc]  # as above
        """Drafts with both; made by SGLang's scheduler.

        Raises:
            ValueError: its checkpoint draws tokens in a way that verification must know.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            check_made(self)
            self.merging = BlockMerging(self, parts_for(self))

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = batch.forward_mode.is_decode() and not batch.is_extend_in_batch
            if not drafts:
                return super().forward_batch_generation(batch, *args, **kwargs)
            with self.merging.step(batch):
                result = super().forward_batch_generation(batch, *args, **kwargs)
            self.merging.note(batch, result)
            return result

        def clear_cache_pool(self) -> None:
            super().clear_cache_pool()
            self.merging.end_all()

    return named_over(ForedraftOverWorker, base)


def check_made(worker: Any) -> None:
    """Refuse a worker that is made otherwise, or whose tokens are accepted by how they were drawn.

    Raises:
        UnsupportedEngineError: it has no such attribute as expected.
        ValueError: its checkpoint brings heads that draw.
    """
    found = differences(worker, attributes=(*_HEADS, _BUFFER), called="DFlashWorkerV2")
    check_contract(("sglang",), TESTED, found)
    for attribute, what in _HEADS.items():
        if getattr(worker, attribute) is not None:
            raise ValueError(
                f"DFlash with {what} goes without retrieval on top: its tokens are accepted by how "
                "they were drawn"
            )
