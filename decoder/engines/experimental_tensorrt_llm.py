"""Drafts for TensorRT-LLM's PyTorch backend: a drafter that its configuration takes.

Experimental: written and tested against the engine's published interface, never run in
TensorRT-LLM.

    config = UserProvidedDecodingConfig(
        max_draft_len=8, drafter=DraftsForTensorRtLlm(drafter, vocabulary_size, max_draft_len=8)
    )
    llm = LLM(model, speculative_config=config, disable_overlap_scheduler=True)

Before each pass the engine shows the requests that it decodes, by number and with all tokens, and
takes one chain for each. It tells no end: a request that is not shown for a while has ended.
"""

import inspect
from collections.abc import Mapping
from logging import getLogger
from typing import Any, Final, Self

import numpy as np
from tensorrt_llm._torch.speculative.drafter import Drafter as TensorRtDrafter

from decoder.engines.contract import check_contract, differences
from decoder.engines.engine_options import check_version, checked_vocabulary_size
from decoder.engines.named_sequences import DEFAULT_BUDGET_NODES, NamedSequence, NamedSequences
from indexer.reader import Vocabulary
from retriever.drafter import Drafter

TESTED_VERSIONS: Final = ">=1.0,<1.3"
"""Versions whose published interface it was tested against."""

_DISTRIBUTIONS: Final = ("tensorrt-llm", "tensorrt_llm")

DEFAULT_DEADLINE_S: Final = 0.005
"""The engine waits for drafts with its GPU idle: a quarter of what other adapters allow."""

MAX_IDLE_STEPS: Final = 64
"""Steps without a request after which it counts as ended: the engine tells no end, and may pause a
request for some steps. Ending one too soon costs opening its session again."""


_log = getLogger(__name__)


class DraftsForTensorRtLlm(TensorRtDrafter):  # type: ignore[misc]  # the engine is not typed here
    """Proposes the most probable path of each draft, for all requests of a step in one call.

    It never raises: a request without drafts is decoded plainly. With CUDA graphs the engine
    itself pads drafts to `max_draft_len`.

    Args:
        drafter: gives the drafts.
        vocabulary_size: tokens that the model knows; drafts end before any other.
        max_draft_len: most tokens of a chain; the same as in the engine's configuration.
        max_concurrency: with more requests the engine decodes plainly; None for no limit.
        deadline_s: a step asks for as many drafts as fit into so many seconds.
        budget_nodes: most nodes of the tree that a path is chosen from.
        vocabulary: of the model's tokenizer: a drafter for another one is refused.

    Attributes:
        sequences: the requests that are held.

    Raises:
        UnsupportedEngineError: the engine's base class is not the one that this is written for.
        VocabularyMismatchError: the drafter is for another tokenizer.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:  # noqa: D102  (as `__init__` states)
        _check_engine()  # before Python refuses a class that lacks what has become abstract
        made: Self = super().__new__(cls)
        return made

    def __init__(  # noqa: PLR0913  (all but the first two are given by name)
        self,
        drafter: Drafter,
        vocabulary_size: int,
        *,
        max_draft_len: int,
        max_concurrency: int | None = None,
        deadline_s: float | None = DEFAULT_DEADLINE_S,
        budget_nodes: int = DEFAULT_BUDGET_NODES,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        super().__init__(**_taken(max_draft_len, max_concurrency))
        self.max_draft_len = self.max_draft_tokens = max_draft_len  # one of them pads, by version
        self.sequences = NamedSequences(
            drafter,
            vocabulary_size,
            drafter_vocabulary=checked_vocabulary_size(drafter, vocabulary_size, vocabulary),
            deadline_s=deadline_s,
            budget_nodes=budget_nodes,
            max_idle_steps=MAX_IDLE_STEPS,
        )
        self._num_errors = 0

    def prepare_draft_tokens(
        self,
        scheduled_requests: Any,
        resource_manager: Any = None,  # noqa: ARG002  the engine passes it
    ) -> None:
        """Set `py_draft_tokens` of every request that is decoded in this step."""
        requests = [
            each
            for each in scheduled_requests.generation_requests
            if not getattr(each, "is_dummy", False)
        ]
        chains = self._chains(requests)
        for request in requests:
            request.py_draft_tokens = chains.get(request.request_id, [])  # the engine extends it

    def close(self) -> None:
        """End all requests; their outputs are remembered."""
        self.sequences.close()

    def _chains(self, requests: list[Any]) -> Mapping[Any, list[int]]:
        try:
            rows = {each.request_id: self._row(each) for each in requests}
            chains = self.sequences.draft(rows)
            return {name: chain.token_ids.tolist() for name, chain in chains.items()}
        except Exception as error:  # noqa: BLE001  the engine must not end because of a draft
            self._num_errors += 1
            if self._num_errors == 1:
                _log.warning("TensorRT-LLM goes on without drafts for now: %s", error)
            return {}

    def _row(self, request: Any) -> NamedSequence:
        tokens = np.array(request.get_tokens(0), np.int32)
        num_prompt = int(request.py_orig_prompt_len)
        left = num_prompt + int(request.py_max_new_tokens) - len(tokens) - 1
        return NamedSequence(tokens, num_prompt, max(0, min(self._room(), left)))

    def _room(self) -> int:
        """Return how many tokens a chain may have in this step: the engine may lower it."""
        current = getattr(self, "max_total_draft_tokens", None)
        return self.max_draft_len if current is None else min(self.max_draft_len, int(current))


def _check_engine() -> None:
    """Refuse an engine whose base class calls a drafter otherwise; warn of an untested version."""
    check_version(TESTED_VERSIONS, *_DISTRIBUTIONS)
    needed = differences(
        TensorRtDrafter,
        attributes=("prepare_draft_tokens",),
        implemented_by=DraftsForTensorRtLlm,
        called="Drafter",
    )
    made = differences(
        TensorRtDrafter.__init__, passed=0, named=_taken(0, None), called="Drafter.__init__"
    )
    check_contract(_DISTRIBUTIONS, TESTED_VERSIONS, [*needed, *made])


def _taken(max_draft_len: int, max_concurrency: int | None) -> dict[str, Any]:
    """Return the arguments that the constructor of this version takes."""
    known = {
        "max_draft_len": max_draft_len,
        "max_total_draft_tokens": max_draft_len,
        "max_concurrency": max_concurrency,
    }
    names = inspect.signature(TensorRtDrafter.__init__).parameters
    return {name: value for name, value in known.items() if name in names}
