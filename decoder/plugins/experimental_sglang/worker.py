"""SGLang's NGRAM worker with our drafter; importing this module loads the engine."""

import os
from contextlib import suppress
from functools import partial
from logging import getLogger
from multiprocessing.util import Finalize
from typing import Any

from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from decoder.engines.engine_drafters import DEADLINE_S, open_drafter, vocabulary_and_encoder
from decoder.engines.engine_options import check_tenants, resolve_settings
from decoder.engines.engine_sequences import EngineSequences, SequenceLimits
from decoder.engines.request_fields import FieldReader
from decoder.plugins.experimental_sglang.corpus import DrafterCorpus, sharing
from decoder.plugins.experimental_sglang.custom_params import CustomParams

_log = getLogger(__name__)


class ForedraftWorker(NGRAMWorker):  # type: ignore[misc]  # sglang is not there to be checked
    """A worker that uses our drafter, and otherwise works as the engine's NGRAM worker.

    SGLang's scheduler creates it. If there are several ranks, only the first drafts, and all ranks
    verify its nodes. Drafts depend on time, and ranks that verified different nodes would diverge.

    Args:
        server_args: arguments of the engine.
        gpu_id: number of the engine's GPU.
        nccl_port: the engine's port for NCCL.
        target_worker: the worker that runs the target model.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        # The last tokens that the engine shows must include all that a step may have committed.
        self.max_trie_depth: int = max(self.max_trie_depth, self.draft_token_num)
        group = get_parallel().tp_group
        vocabulary_size = int(self.model_runner.model_config.vocab_size)
        opened = None
        if group.rank_in_group == 0:
            opened = open_sequences(target_worker.tokenizer)
        self.ngram_corpus = DrafterCorpus(
            None if opened is None else opened[0],
            self.draft_token_num,
            vocabulary_size,
            sharing(group),
            None if opened is None else opened[1],
        )

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        self.ngram_corpus.show(batch.reqs)
        return super()._prepare_draft_tokens(batch)


def open_sequences(tokenizer: Any) -> tuple[EngineSequences, CustomParams] | None:
    """Open the drafter that the environment variables describe; return None if that fails.

    Args:
        tokenizer: the engine's tokenizer, if it has one.
    """
    try:
        settings = resolve_settings({}, os.environ, "environment")
        vocabulary, encode = vocabulary_and_encoder(tokenizer)
        drafter = open_drafter(settings, vocabulary, encode)
        Finalize(None, partial(_shut_down, drafter), exitpriority=10)
        check_tenants(settings.tenants, drafter)
    except Exception as error:  # noqa: BLE001  SGLang must start without us
        _log.error("SGLang runs without drafts: %s", error)
        return None
    deadline_s = None if settings.server else settings.deadline_s or DEADLINE_S
    reader = CustomParams(FieldReader(settings.tenants, None, encode, vocabulary))
    limits = SequenceLimits(deadline_s=deadline_s, min_probability=settings.min_probability)
    return EngineSequences(drafter, limits), reader


def _shut_down(drafter: Any) -> None:
    with suppress(Exception):
        drafter.shut_down()
