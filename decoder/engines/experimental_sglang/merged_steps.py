"""Merged drafts in the steps of SGLang's workers: what is the same for all of its drafters.

On the first rank the last step's tokens are taken in, our drafter is asked, and nodes are chosen;
the others take its decision and its nodes. What a step accepted is copied to the host while the
engine goes on. An error of ours costs our part of the drafts alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel

from decoder.engines.drafting_metrics import DraftingMetrics, process_metrics
from decoder.engines.experimental_sglang.corpus import Share, sharing
from decoder.engines.experimental_sglang.merged_requests import MergedRequests
from decoder.engines.experimental_sglang.topology import Nodes
from decoder.engines.experimental_sglang.worker import open_sessions

_log = getLogger(__name__)

_STEPS_BETWEEN_COUNTS: Final = 40
"""Steps whose counts are added to the metrics together."""

_MOST_NOTES: Final = 64
"""Verifications whose outcome waits to be taken in: while an adaptive engine drafts nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verification accepted, on its way to the host.

    Attributes:
        names: of the requests.
        tokens: of all rows.
        lengths: accepted tokens of each row, the target's own included.
        num_nodes: of a row's tree, without the last committed token.
        copied: says when both are there; None if they are.
    """

    names: Sequence[str]
    tokens: torch.Tensor
    lengths: torch.Tensor
    num_nodes: int
    copied: Any

    @classmethod
    def of(cls, batch: Any, result: Any) -> "Outcome":
        """Begin to copy what a verification returned."""
        tokens, lengths, copied = result.next_token_ids, result.accept_lens, None
        if not tokens.is_cpu:
            tokens = tokens.to("cpu", non_blocking=True)
            lengths = lengths.to("cpu", non_blocking=True)
            copied = torch.get_device_module(result.next_token_ids.device).Event()
            copied.record()
        num_nodes = int(result.speculative_num_draft_tokens) - 1
        return cls([request.rid for request in batch.reqs], tokens, lengths, num_nodes, copied)

    def committed(self) -> dict[str, list[int]]:
        """Return the tokens of each request, once they are there."""
        if self.copied is not None:
            self.copied.synchronize()
        rows = self.tokens.view(len(self.names), self.num_nodes + 1).tolist()
        return {
            name: row[:length]
            for name, row, length in zip(self.names, rows, self.lengths.tolist(), strict=True)
        }


class Parts(NamedTuple):
    """What merged drafts are made with, on one rank.

    Attributes:
        requests: on the first rank; None on others, and where there is no drafter of ours.
        share: the first rank's arrays with all; None for a single rank.
        metrics: what acceptance is counted in; None for nothing.
    """

    requests: MergedRequests | None
    share: Share | None = None
    metrics: DraftingMetrics | None = None


class MergedSteps:
    """The host's and the ranks' side of merged drafts.

    Args:
        worker: of the engine.
        parts: for its rank.

    Attributes:
        requests: of the parts.
        num_errors: steps with the engine's drafts alone because of an error of ours.
    """

    def __init__(self, worker: Any, parts: Parts) -> None:
        self.num_errors = 0
        self._worker = worker
        self.requests, self._share, self._metrics = parts
        self._outcomes: list[Outcome] = []
        self._began_s: float | None = None

    def note(self, batch: Any, result: Any) -> None:
        """Take in what a verification returned, without waiting for it."""
        if self.requests is None or batch.forward_mode.is_idle():
            return
        try:
            if len(self._outcomes) == _MOST_NOTES:
                self._outcomes.clear()
                self.requests.drop()
            self._outcomes.append(Outcome.of(batch, result))
        except Exception:  # noqa: BLE001  (its server would end)
            self.fail()

    def begin(self, requests: MergedRequests, batch: Any, num_nodes: int) -> None:
        """Take in what the last steps accepted, and ask our drafter; may raise."""
        num_tokens = self._commit(requests)
        if self._began_s is not None and num_tokens:
            requests.trained.note_step(time.perf_counter() - self._began_s, num_tokens)
        self._began_s = time.perf_counter()
        self._count(requests)
        requests.begin(batch.reqs, self._new(requests, batch), num_nodes)

    def _count(self, requests: MergedRequests) -> None:
        trained = requests.trained
        num_steps = trained.num_asked + trained.num_skipped
        if self._metrics is not None and num_steps % _STEPS_BETWEEN_COUNTS == 0:
            self._metrics.add(requests.counted())
            self._metrics.count_steps(trained.num_asked, trained.num_skipped)

    def _commit(self, requests: MergedRequests) -> int:
        outcomes, self._outcomes = self._outcomes, []
        num_tokens = 0
        for outcome in outcomes:
            committed = outcome.committed()
            requests.commit(committed, outcome.num_nodes)
            num_tokens += sum(map(len, committed.values()))
        return num_tokens

    def _new(self, requests: MergedRequests, batch: Any) -> dict[int, tuple[int, int]]:
        """Return how many tokens the requests have that are new here, and the last of each."""
        rows = requests.unknown(batch.reqs)
        if not rows:
            return {}
        lengths, last = batch.seq_lens.tolist(), batch.spec_info.bonus_tokens.tolist()
        return {row: (lengths[row] + 1, last[row]) for row in rows}

    def decided(self, decision: int) -> int:
        """Return the first rank's decision."""
        if self._share is None:
            return decision
        shared = np.array([decision], np.int64)
        self._share(shared)
        return int(shared[0])

    def shared(self, rows: list[Nodes] | None, batch: Any, num_nodes: int) -> list[Nodes] | None:
        """Return the first rank's rows."""
        if self._share is None:
            return rows
        num_rows = len(batch.seq_lens)
        shared = np.zeros((2, num_rows, num_nodes + 1), np.int64)
        if rows is not None:
            shared[0, :, 0] = 1
            shared[0, :, 1:] = [row.tokens for row in rows]
            shared[1, :, 1:] = [row.parents for row in rows]
        self._share(shared)
        if num_rows and not shared[0, 0, 0]:
            return None
        return [Nodes(shared[0, row, 1:], shared[1, row, 1:]) for row in range(num_rows)]

    def fail(self) -> None:
        """Note an error of ours, which is being handled: the engine's drafts go on alone."""
        self.num_errors += 1
        if self.num_errors == 1:
            _log.exception("SGLang goes on with the drafts of its own drafter")
        self._outcomes.clear()
        if self.requests is not None:
            self.requests.drop()

    def end_all(self) -> None:
        """End all requests, as the engine has forgotten them."""
        if self.requests is not None:
            self.requests.end_all()


def parts_for(worker: Any) -> Parts:
    """Return what merged drafts are made with, for a worker of SGLang's on its rank."""
    group = get_parallel().tp_group
    vocabulary_size, sessions = int(worker.target_worker.model_runner.model_config.vocab_size), None
    if group.rank_in_group == 0:
        sessions = open_sessions(worker.target_worker.tokenizer)
    requests = None if sessions is None else MergedRequests(*sessions, vocabulary_size)
    is_exposed = requests is not None and worker.server_args.enable_metrics
    return Parts(requests, sharing(group), process_metrics() if is_exposed else None)


def named_over(made: type, base: type) -> type:
    """Return our class of a worker, called after SGLang's that it is made of."""
    made.__name__ = made.__qualname__ = f"ForedraftOver{base.__name__}"
    return made
