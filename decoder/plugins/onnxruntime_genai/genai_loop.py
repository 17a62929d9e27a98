"""Drafts for ONNX Runtime GenAI: a loop around its `Engine` that proposes draft tokens.

    loop = DraftingLoop(onnxruntime_genai.Engine(model), drafter, vocabulary_size=49152)
    for token in loop.generate(prompt, max_new_tokens=256):
        ...

In one pass, the engine verifies a chain for each request. At each position it compares the drafted
token with its own choice, greedy or sampled. This only works for models with paged attention,
because their logits have a row for each token.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, Final

import numpy as np
import onnxruntime_genai as og
from numpy.typing import ArrayLike

from decoder.engines.contract import check_contract, differences
from decoder.engines.engine_guard import EngineGuard
from decoder.engines.engine_options import chain_for, check_version, checked_vocabulary_size
from decoder.engines.engine_sequences import (
    EngineRow,
    EngineSequences,
    NamedRequest,
    SequenceLimits,
)
from decoder.engines.late_drafter import without_waiting
from decoder.engines.request_fields import PLAIN, FieldReader, RequestFields
from decoder.observation import Statistics
from indexer.reader import Vocabulary
from retriever.drafter import Drafter
from retriever.predict.phrases import Encode
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree

TESTED_VERSIONS: Final = ">=0.18,<0.19"

_DISTRIBUTIONS: Final = (
    "onnxruntime-genai",
    "onnxruntime-genai-cuda",
    "onnxruntime-genai-directml",
    "onnxruntime-genai-webgpu",
)
_BUDGET_NODES: Final = 64
"""Most nodes of the tree that a path is chosen from: a usual path and its main alternatives."""

_SPARE_EVENTS: Final = 16
"""Room for further events of a pass, such as ends of requests, besides a token per position."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """The result of a pass for one request.

    Attributes:
        request: the request, as `begin` returned it.
        tokens: the generated tokens.
        num_drafted: number of tokens that were proposed for the pass.
        num_accepted: number of these tokens that were accepted.
        finish_reason: why the request ended; None while it runs.
        statistics: counts of all passes of the request.
    """

    request: Any
    tokens: list[int]
    num_drafted: int
    num_accepted: int
    finish_reason: Any
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(slots=True)
class _GenaiSequence:
    """A request that is being decoded.

    Attributes:
        request: the engine's request.
        sequence: prompt and output.
        max_tokens: most tokens of the sequence.
        proposed: tokens that were proposed for the next pass.
        is_refused: whether the engine refuses drafts for the request.
        new: new tokens since the last step.
        fields: the request's own fields for its drafts.
        statistics: counts of the request's passes.
    """

    request: Any
    sequence: TokenSequence
    max_tokens: int
    proposed: DraftTree = field(default_factory=DraftTree.empty)
    is_refused: bool = False
    new: list[int] = field(default_factory=list)
    fields: RequestFields = PLAIN
    statistics: Statistics = field(default_factory=Statistics)


class DraftingLoop:
    """Runs an engine's requests with drafts; each step calls the drafter once for all requests.

    If the drafter fails, there are no drafts, but no request is lost. Like the engine itself, the
    loop must be used from the thread that created the engine.

    Args:
        engine: the engine; all of its requests must start in this loop.
        drafter: the drafter.
        vocabulary_size: number of tokens in the model's vocabulary; a draft ends before a token
            beyond it.
        max_draft_tokens: most tokens of a proposal; by default as many as the engine accepts.
        vocabulary: vocabulary of the model's tokenizer; a drafter for another one is refused.
        tenants: tenants that requests may name; `*` allows any.
        encode: the model's tokenizer, without special tokens, for predictions that are texts.

    Attributes:
        max_draft_tokens: most tokens of a proposal; 0 if the engine verifies no drafts.
        num_passes: number of passes with new tokens, summed over requests.
        num_drafted: number of proposed tokens.
        num_accepted: number of accepted tokens.
        statistics: counts of all requests.

    Raises:
        UnsupportedEngineError: the engine differs from the tested versions.
        VocabularyMismatchError: the drafter is for another tokenizer.
    """

    def __init__(  # noqa: PLR0913  (all but the first three are given by name)
        self,
        engine: og.Engine,
        drafter: Drafter,
        vocabulary_size: int,
        *,
        max_draft_tokens: int | None = None,
        vocabulary: Vocabulary | None = None,
        tenants: Sequence[str] = (),
        encode: Encode | None = None,
    ) -> None:
        check_engine()
        most = int(engine.max_draft_tokens_per_proposal())
        if most == 0:
            _log.warning(
                "this engine cannot verify drafts: export the model with paged attention "
                "(python -m onnxruntime_genai.models.builder --extra_options "
                "use_paged_attention=true)"
            )
        self.max_draft_tokens = most if max_draft_tokens is None else min(most, max_draft_tokens)
        self.num_passes = self.num_drafted = self.num_accepted = 0
        self.statistics = Statistics()
        self._reader = FieldReader(tenants, self.max_draft_tokens or None, encode, vocabulary)
        self._engine = engine
        known = checked_vocabulary_size(drafter, vocabulary_size, vocabulary)
        self._vocabulary_size = vocabulary_size
        self._sequences = EngineSequences(
            without_waiting(drafter), SequenceLimits(vocabulary_size=known)
        )
        self._guard = EngineGuard("the engine", _log, self._sequences.abandon)
        self._running: dict[int, _GenaiSequence] = {}
        batch = int(engine.get_capabilities().configured_max_batch_size)
        self._events = engine.create_event_buffer(batch * (most + 1) + _SPARE_EVENTS)

    @property
    def is_running(self) -> bool:
        """Whether a request is being decoded."""
        return bool(self._running)

    @property
    def num_failures(self) -> int:
        """Number of steps and ends of requests at which the drafter failed."""
        return self._sequences.num_failures + self._guard.num_failures

    def begin(
        self,
        prompt: ArrayLike,
        max_new_tokens: int,
        *,
        drafting: Mapping[str, Any] | None = None,
        **turn_options: Any,
    ) -> Any:
        """Start a request and return it.

        Args:
            prompt: integers[n], tokens of the prompt.
            max_new_tokens: most tokens to generate.
            drafting: the request's own fields for its drafts: `drafts` (whether to draft), `budget`
                (most tokens of a proposal), `remember`, `tenant`, `group`, `policy_version`,
                `oldest_version`, and `predictions`. Predictions are texts, or token ids with the
                `vocabulary` fingerprint of these ids. Fields that cannot be applied are logged.
            turn_options: options of `onnxruntime_genai.TurnOptions`, such as `do_sample=True`,
                `temperature=0.8`, `top_k=40`, `seed=1`.

        Raises:
            AttributeError: there is no such option.
            InvalidRequestError: a field of `drafting` is unknown or has an invalid value, or the
                loop was not given the tenant.
            RuntimeError: the engine refuses the request.
        """
        fields, left_out = self._reader.read({"foredraft": dict(drafting or {})})
        if left_out:
            _log.warning("fields of a request are ignored: %s", left_out)
        tokens = np.asarray(prompt, np.int32)
        options = og.RequestOptions()
        options.set_max_session_tokens(len(tokens) + max_new_tokens)
        request = self._engine.create_request(options=options)
        turn = og.TurnOptions(request)
        turn.set_max_generated_tokens(max_new_tokens)
        for name, value in turn_options.items():
            getattr(turn, f"set_{name}")(value)
        request.begin_turn(tokens, turn)
        sequence = TokenSequence(tokens)
        most = len(tokens) + max_new_tokens
        self._running[id(request)] = _GenaiSequence(request, sequence, most, fields=fields)
        return request

    def step(self) -> list[Progress]:
        """Run the engine once, propose drafts for the next pass, and return the results."""
        finished = self._run()
        moved = {name: each for name, each in self._running.items() if each.new or name in finished}
        progress = [self._told(each, finished.get(name)) for name, each in moved.items()]
        for name in finished:
            self._end(name)
        self._propose({name: each for name, each in moved.items() if name not in finished})
        return progress

    def generate(
        self,
        prompt: ArrayLike,
        max_new_tokens: int,
        *,
        drafting: Mapping[str, Any] | None = None,
        **turn_options: Any,
    ) -> Iterator[int]:
        """Decode one prompt, token by token, along with all other requests; see `begin`."""
        request = self.begin(prompt, max_new_tokens, drafting=drafting, **turn_options)
        try:
            while id(request) in self._running:
                for each in self.step():
                    if each.request is request:
                        yield from each.tokens
        finally:
            if id(request) in self._running:
                self.cancel(request)

    def cancel(self, request: Any) -> None:
        """End a request early; the drafter stores its output."""
        self._end(id(request))

    def close(self) -> None:
        """End all requests."""
        for name in list(self._running):
            self._end(name)

    def _run(self) -> dict[int, Any]:
        """Run the engine once; return the requests that ended, with the reason for each."""
        finished: dict[int, Any] = {}
        flags = og.EngineEventFlags
        for event in self._engine.run(self._events):
            running = self._running.get(id(event.request))
            if running is None:
                continue
            if event.flags & flags.TOKEN:
                running.new.append(int(event.token))
            if event.flags & flags.TURN_FINISHED or event.flags & flags.FAILED:
                finished[id(event.request)] = event.finish_reason
        if not self._engine.has_pending_requests():
            for name in self._running.keys() - finished.keys():
                finished[name] = og.FinishReason.NONE
        return finished

    def _told(self, running: _GenaiSequence, finish_reason: Any) -> Progress:
        """Commit the new tokens of a request, and return the result of the pass."""
        new, running.new = running.new, []
        proposed, running.proposed = running.proposed, DraftTree.empty()
        accepted = _common_length(new, proposed.token_ids.tolist())
        running.sequence.extend(new)
        for statistics in (running.statistics, self.statistics):
            statistics.record(proposed, np.arange(accepted), len(new))
        self.num_passes += 1
        self.num_drafted += len(proposed)
        self.num_accepted += accepted
        return Progress(
            running.request, new, len(proposed), accepted, finish_reason, running.statistics
        )

    def _propose(self, running: dict[int, _GenaiSequence]) -> None:
        trees: list[DraftTree] = []
        with self._guard:
            trees = self._sequences.step([self._row(*each) for each in running.items()])
        for each, tree in zip(running.values(), trees, strict=False):
            chain = chain_for(tree, self._most(each), self._vocabulary_size)
            if len(chain):
                self._set(each, chain)

    def _row(self, name: int, running: _GenaiSequence) -> EngineRow:
        sequence = running.sequence
        return EngineRow(
            sequence.tokens,
            sequence.num_prompt,
            _BUDGET_NODES if self._most(running) else 0,
            NamedRequest(name, running.request, running.fields),
        )

    def _most(self, running: _GenaiSequence) -> int:
        left = running.max_tokens - len(running.sequence) - 1
        room = 0 if running.is_refused else min(self.max_draft_tokens, left)
        return running.fields.most(room)

    def _set(self, running: _GenaiSequence, chain: DraftTree) -> None:
        """Propose a chain; if the engine refuses it, the request gets no more drafts."""
        try:
            running.request.set_draft_tokens(chain.token_ids)
        except (RuntimeError, ValueError) as error:
            running.is_refused = True
            _log.warning("a request continues without drafts: %s", error)
        else:
            running.proposed = chain

    def _end(self, name: int) -> None:
        running = self._running.pop(name, None)
        if running is not None:
            running.request.close()
            with self._guard:
                self._sequences.end(name, running.sequence.tokens)


def check_engine() -> None:
    """Refuse an engine that differs from what this loop needs; warn of an untested version.

    Raises:
        UnsupportedEngineError: the engine differs; the message says how.
    """
    check_version(TESTED_VERSIONS, *_DISTRIBUTIONS)
    found = [
        sentence
        for name, attributes in _NEEDED.items()
        for sentence in differences(getattr(og, name, None), attributes=attributes, called=name)
    ]
    check_contract(_DISTRIBUTIONS, TESTED_VERSIONS, found)


_NEEDED: Final[dict[str, Sequence[str]]] = {
    "Engine": (
        "create_event_buffer",
        "create_request",
        "get_capabilities",
        "has_pending_requests",
        "max_draft_tokens_per_proposal",
        "run",
    ),
    "EngineEventFlags": ("FAILED", "TOKEN", "TURN_FINISHED"),
    "FinishReason": ("NONE",),
    "Request": ("begin_turn", "close", "set_draft_tokens"),
    "RequestOptions": ("set_max_session_tokens",),
    "TurnOptions": ("set_max_generated_tokens",),
}
"""Classes of the engine, with the attributes that the loop uses. Arguments of compiled functions
cannot be checked."""


def _common_length(one: Iterable[int], other: Iterable[int]) -> int:
    """Return the length of the common prefix of two lists."""
    alike = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        alike += 1
    return alike
