"""Retrieval on top of SGLang's EAGLE, MTP and standalone drafters; this loads the engine.

The engine's worker is subclassed at two places: where it drafts, and behind its verification. A
step goes like this, for the first rank; the others take its decision and its nodes:

1. What the last verification accepted has been copied to the host since, while the engine's drafter
   read it. It is taken in, and our drafter is asked.
2. Where retrieval is sure of all requests, the engine's drafter is not run. It has read what was
   accepted in any case, so that its cache is whole.
3. Else it drafts as it always does, and its tree, with the probabilities of its nodes, is merged
   with the retrieved one.
4. The merged tree takes the place of its own in the engine's verify input: the engine's own kernel
   builds it. With a top-k of 1 the engine verifies chains, and only tokens are replaced.

Nodes are tokens that are proposed, whoever proposes them, and the engine's verification of a tree
reads no probability of a drafter, except in rejection sampling, which is refused. An error of ours
costs our part of the drafts alone.

Source: sglang 0.5.23, `EAGLEWorkerV2.forward_batch_generation`, `EagleDraftWorker.draft`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sglang.srt.runtime_context import get_exec, get_schedule
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input

from decoder.engines.experimental_sglang.merged_steps import (
    MergedSteps,
    Parts,
    named_over,
    parts_for,
)
from decoder.engines.experimental_sglang.topology import DEPTH, Nodes, nodes_of, topology_of

_OWN, _MERGED, _SKIPPED = range(3)
"""What a step is drafted by: the engine's drafter, both, or retrieval alone."""


class NotedScores:
    """The probabilities of the nodes that the engine's drafter chose last.

    The engine computes and drops them. They are copied to a buffer of fixed place, so that a
    captured graph fills it, too.

    Args:
        max_rows: of a step.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffer: torch.Tensor | None = None

    def around(self, organize: Callable[..., Any]) -> Callable[..., Any]:
        """Return the engine's function that chooses nodes, which notes their probabilities."""

        def noting(
            score_list: Any, token_list: Any, parents_list: Any, num_draft_token: int
        ) -> Any:
            chosen = organize(score_list, token_list, parents_list, num_draft_token)
            scores = torch.cat(score_list, dim=1).flatten(1)
            self._note(torch.gather(scores, 1, chosen[1]))
            return chosen

        return noting

    def rows(self, num_rows: int, num_nodes: int) -> list[list[float]] | None:
        """Return float[num_rows][num_nodes], `None` where they were not noted."""
        buffer = self._buffer
        if buffer is None or num_rows > len(buffer) or buffer.shape[1] != num_nodes:
            return None
        rows: list[list[float]] = buffer[:num_rows].tolist()
        return rows

    def _note(self, scores: torch.Tensor) -> None:
        num_rows, num_nodes = scores.shape
        if self._buffer is None:
            shape = max(self._max_rows, num_rows), num_nodes
            self._buffer = torch.zeros(shape, dtype=torch.float32, device=scores.device)
        if num_rows <= len(self._buffer) and num_nodes == self._buffer.shape[1]:
            self._buffer[:num_rows].copy_(scores)


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the engine's drafter returned.

    Attributes:
        verify_input: of its own tree.
        parent_list: of that, as the engine's kernel took it.
        selected: likewise.
    """

    verify_input: Any
    parent_list: torch.Tensor
    selected: torch.Tensor

    def tokens(self, num_nodes: int) -> list[list[int]]:
        """Return the tokens of each row, the last committed one first."""
        rows: list[list[int]] = self.verify_input.draft_token.view(-1, num_nodes + 1).tolist()
        return rows

    def nodes(self, tokens: list[list[int]], topk: int) -> list[Nodes]:
        """Return the nodes of each row."""
        parents, numbers = self.parent_list.tolist(), self.selected.tolist()
        return [nodes_of(row[1:], numbers[at], parents[at], topk) for at, row in enumerate(tokens)]


class Timed:
    """Times what a device, or the host, does between entering and leaving."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[Any] = []
        timer: Any = torch.cuda.Event  # has no types
        if device.type == "cuda":
            self._events = [timer(enable_timing=True) for _ in range(2)]
        self._seconds = 0.0

    def __enter__(self) -> Self:
        self._seconds = -time.perf_counter()
        if self._events:
            self._events[0].record()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Return how long it took; on a device, waits until it is over."""
        if not self._events:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1000


class Merging(MergedSteps):
    """Drafts in the place of an engine's draft worker, which it asks.

    Args:
        worker: of the engine, with its draft worker.
        parts: see `MergedSteps`.
    """

    def __init__(self, worker: Any, parts: Parts) -> None:
        super().__init__(worker, parts)
        self._draft_worker = worker.draft_worker
        self._draft: Callable[..., Any] = self._draft_worker.draft
        self._scores = NotedScores(_max_rows())
        eagle_worker_v2.organize_draft_results = self._scores.around(
            eagle_worker_v2.organize_draft_results
        )
        self._draft_worker.draft = self.draft

    def draft(self, batch: Any, *, with_topology: bool = False) -> Any:
        """Return the engine's verify input, with merged trees."""
        if with_topology or batch.forward_mode.is_idle():
            return self._draft(batch, with_topology=with_topology)
        num_nodes = int(self._draft_worker.speculative_num_draft_tokens) - 1
        decision = self.decided(self._begun(batch, num_nodes))
        if decision == _OWN:
            return self._draft(batch)
        if decision == _SKIPPED:
            return self._without(batch, num_nodes)
        with Timed(batch.seq_lens.device) as timed:
            drafted = Drafted(*self._draft(batch, with_topology=True))
        rows = self.shared(self._rows(drafted, num_nodes), batch, num_nodes)
        if self.requests is not None:  # nodes of the draft are on the host: it is over
            self.requests.trained.note_asked(timed.seconds())
        return self._replaced(batch, drafted, rows)

    @property
    def _is_chain(self) -> bool:
        return int(self._draft_worker.topk) == 1

    def _begun(self, batch: Any, num_nodes: int) -> int:
        """Take in what came and ask our drafter; return what the step is drafted by."""
        requests = self.requests
        if requests is None or num_nodes < 2:  # noqa: PLR2004  (fewer make no tree)
            return _OWN
        try:
            self.begin(requests, batch, num_nodes)
            return _MERGED if requests.asks() else _SKIPPED
        except Exception:  # noqa: BLE001  (as above)
            self.fail()
            return _OWN

    def _rows(self, drafted: "Drafted | None", num_nodes: int) -> list[Nodes] | None:
        """Return the nodes to verify; None where an error of ours leaves none.

        Args:
            drafted: by the engine's drafter; None where it was not run.
            num_nodes: of each row.
        """
        requests = self.requests
        if requests is None:
            return None
        try:
            if drafted is None:
                return requests.rows(None, None, num_nodes, is_chain=self._is_chain)
            tokens = drafted.tokens(num_nodes)
            stated = None if self._is_chain else self._scores.rows(len(tokens), num_nodes)
            if stated is None and not self._is_chain:
                raise RuntimeError("SGLang's drafter left no probabilities of its nodes")  # noqa: TRY301
            requests.check_last([row[0] for row in tokens])
            own = drafted.nodes(tokens, int(self._draft_worker.topk))
            return requests.rows(own, stated, num_nodes, is_chain=self._is_chain)
        except Exception:  # noqa: BLE001  (as above)
            self.fail()
            return None

    def _without(self, batch: Any, num_nodes: int) -> Any:
        """Return a verify input of retrieved trees."""
        rows = self.shared(self._rows(None, num_nodes), batch, num_nodes)
        if rows is not None:
            try:
                return self._built(batch, rows)
            except Exception:  # noqa: BLE001  (as above)
                self.fail()
        return self._draft(batch)

    def _replaced(self, batch: Any, drafted: "Drafted", rows: list[Nodes] | None) -> Any:
        """Return the engine's verify input with other nodes."""
        verify_input = drafted.verify_input
        if rows is None:
            return verify_input
        if self._is_chain:
            tokens = torch.from_numpy(np.stack([row.tokens for row in rows]))
            verify_input.draft_token.view(len(rows), -1)[:, 1:].copy_(tokens)
            return verify_input
        try:
            built = self._built(batch, rows)
        except Exception:  # noqa: BLE001  (as above)
            self.fail()  # the engine may have begun to overwrite what its own tree was built in
            return self._rebuilt(batch, drafted)
        built.kv_loc_plan = verify_input.kv_loc_plan
        built.prepared_out_cache_loc = verify_input.prepared_out_cache_loc
        return built

    def _rebuilt(self, batch: Any, drafted: "Drafted") -> Any:
        """Return the engine's own verify input, built again."""
        old, num_rows = drafted.verify_input, len(drafted.selected)
        tokens = old.draft_token.view(num_rows, -1)[:, 1:].contiguous()
        built = self._built_by_engine(
            batch, (drafted.parent_list, drafted.selected, tokens), old.topk, old.spec_steps
        )
        built.kv_loc_plan = old.kv_loc_plan
        built.prepared_out_cache_loc = old.prepared_out_cache_loc
        return built

    def _built(self, batch: Any, rows: list[Nodes]) -> Any:
        """Return a verify input of any trees, or of chains, that the engine's kernel builds."""
        num_nodes = len(rows[0].tokens)
        topology = topology_of(rows)
        topk, depth = num_nodes, DEPTH
        if self._is_chain:
            topk, depth = 1, num_nodes
            above = np.tile(np.arange(-1, num_nodes), (len(rows), 1))
            topology = topology._replace(parent_list=above[:, :num_nodes], selected=above[:, 1:])
        tensors = [
            torch.from_numpy(np.ascontiguousarray(each)).to(batch.seq_lens.device)
            for each in topology
        ]
        built = self._built_by_engine(batch, tensors, topk, depth)
        built.topk = self._draft_worker.topk
        built.spec_steps = num_nodes  # a path may be as long as the tree
        return built

    def _built_by_engine(
        self, batch: Any, topology: Sequence[torch.Tensor], topk: int, depth: int
    ) -> Any:
        parent_list, selected, tokens = topology
        return build_eagle_verify_input(
            batch,
            batch.spec_info,
            parent_list,
            selected,
            tokens,
            None,
            target_worker=self._worker.target_worker,
            topk=topk,
            num_steps=depth,
            num_draft_tokens=tokens.shape[1] + 1,
            tree_mask_mode=self._draft_worker.tree_mask_mode,
            device=batch.seq_lens.device,
        )


def _max_rows() -> int:
    """Return the most rows of a step, as the engine itself sizes its buffers."""
    graphs = get_exec().graph.cuda_graph_config
    captured = graphs.decode.max_bs if graphs is not None else None
    return max(captured or 0, get_schedule().max_running_requests or 0, 1)


def over(base: type) -> type:
    """Return SGLang's worker for a trained drafter with retrieval on top.

    Args:
        base: `EAGLEWorkerV2`, or a subclass that drafts and verifies as it does.
    """

    class ForedraftOverWorker(base):  # type: ignore[misc]  # sglang is not checked
        """Drafts with both; made by SGLang's scheduler."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.merging = Merging(self, parts_for(self))

        def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().verify(batch, *args, **kwargs)
            self.merging.note(batch, result)
            return result

        def clear_cache_pool(self) -> None:
            super().clear_cache_pool()
            self.merging.end_all()

    return named_over(ForedraftOverWorker, base)
