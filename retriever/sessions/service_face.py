"""The interface of a drafter for a service: it does steps in parts, and charges memory."""

import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from indexer.reader import Index
from retriever.drafter import NO_TOKENS, DraftRequest
from retriever.errors import RetrieverError, UnknownSessionError, VocabularyMismatchError
from retriever.limits import check_length, checked_fingerprint, shown
from retriever.predict.context import context_bytes
from retriever.predict.draft import Asked, RefusedStepError
from retriever.predict.ledger import Charge
from retriever.predict.pool import Pool
from retriever.sequences import SessionKey
from retriever.sessions.drafter_state import DrafterState
from retriever.sessions.session_table import CheckedRequest, Session
from retriever.tree import DraftTree

_READING_BYTES: Final = 16
"""Memory per token while a prompt is read: 4 bytes in its message, 8 when decoded, 4 in a copy."""

_MOST_NAMED: Final = 4096  # most tenants whose tokenizers are remembered: a megabyte


class ServiceFace:
    """A drafter from the view of a service, which interleaves the steps of its streams.

    A step is `step_each`, or `commit_each` and `draft_each`.

    Args:
        state: state of the drafter, which others may use at the same time.

    Attributes:
        state: state of the drafter; it also has the operations for use within a process.
    """

    def __init__(self, state: DrafterState) -> None:
        self.state = state

    def charge_reading(self, tenant: str, num_tokens: int, num_predicted: int = 0) -> Charge:
        """Charge the memory of a prompt, and of reading it, before the prompt is queued.

        All of it is charged at once. Otherwise prompts that each hold only a part of their memory
        could wait for each other forever.

        Args:
            tenant: tenant of the prompt.
            num_tokens: number of tokens in the prompt, at least approximately.
            num_predicted: number of tokens in predictions, at least approximately.

        Returns:
            The charge, for `prepare`, which takes it over.

        Raises:
            LimitExceededError: there is no room for it, or the prompt is too long.
        """
        check_length(num_tokens, self.state.limits)
        needed = _READING_BYTES * (num_tokens + num_predicted) + context_bytes(num_tokens)
        return self.state.ledger.take(tenant, needed)

    def step_each(self, requests: Sequence[DraftRequest], namespace: str) -> list[DraftTree] | None:
        """Commit new tokens and draft for all requests at once; return the trees in order.

        If a request is refused, or has so many tokens that committing them takes long, nothing is
        done and None is returned. The caller then uses `commit_each`, which refuses requests
        individually. The caller has called `check_batch`.
        """
        state = self.state
        with state.lock, suppress(RetrieverError, RefusedStepError, struct.error, TypeError):
            asked = [state.asked(request, namespace) for request in requests]
            if not any(each.context.is_long(len(request.new_tokens)) for each, request in asked):
                return state.predictor.step_all(asked)
        return None

    def commit_each(
        self, requests: Iterable[DraftRequest], namespace: str
    ) -> list[CheckedRequest | RetrieverError]:
        """Commit new tokens; return a step or the refusal for each request, in order.

        A refused request does not affect others. The caller has called `check_batch`. If committing
        takes long, the session `is_committing` until `commit_long` is called.
        """
        committed: list[CheckedRequest | RetrieverError] = []
        with self.state.lock:
            for request in requests:
                try:
                    step = self._charged(request, namespace)
                except RetrieverError as error:
                    # Its frames hold this list, and so hold sessions that may have ended.
                    committed.append(error.with_traceback(None))
                    continue
                committed.append(step)
                if step.session.databases.context.is_long(len(step.new_tokens)):
                    step.session.is_committing = True
                else:
                    self.state.predictor.commit(step.session.databases, step.new_tokens)
        return committed

    def commit_long(self, step: CheckedRequest) -> None:
        """Commit the tokens of a step without the lock, because this takes long.

        Meanwhile other requests of the session are refused, but the session can end.

        Raises:
            UnknownSessionError: the session has ended meanwhile.
        """
        session, new_tokens, request, _ = step
        try:
            with self.state.lock:
                self.state.predictor.note(session.databases, new_tokens)
            session.databases.append(new_tokens)  # nothing else reads or writes them meanwhile
        finally:
            with self.state.lock:
                session.is_committing = False
                if not session.is_open:
                    session.databases.clear()  # it may have been cleared before all were added
        if not session.is_open:
            raise UnknownSessionError(
                f"session {shown(request.session)} ended while its tokens were being committed"
            )

    def draft_each(self, steps: Sequence[CheckedRequest | None]) -> list[DraftTree]:
        """Draft for committed requests, including those of sessions that have ended since.

        Args:
            steps: committed steps; None for a refused request, whose tree is empty.
        """
        trees = [DraftTree.empty()] * len(steps)
        with self.state.lock:
            # Sessions that another step is writing, without the lock, are omitted.
            asked = {
                at: _drafting(step)
                for at, step in enumerate(steps)
                if step is not None and not step.session.is_committing
            }
            drafted = self.state.predictor.step_all(list(asked.values()))
        for at, tree in zip(asked, drafted, strict=True):
            trees[at] = tree
        return trees

    def discard(self, ended: Iterable[tuple[SessionKey, Session]]) -> int:
        """End the sessions that are still open, without remembering them; return how many."""
        with self.state.lock:
            return self.state.sessions.discard(ended)

    def end_idle(self) -> int:
        """End sessions idle for longer than `idle_session_s`; return how many."""
        with self.state.lock:
            return self.state.sessions.end_idle()

    def remember_open(self) -> int:
        """Remember the current outputs of open sessions, without later tokens; return how many."""
        with self.state.lock:
            remembered = [each for each in self.state.sessions.items() if each[1].remember]
            for key, session in remembered:
                self._remember(key, session)
                session.remember = False
        self.state.flush()
        return len(remembered)

    def load(self, tenant: str) -> Pool:
        """Load a tenant's outputs, unless they are in memory; they stay while the pool is held.

        Raises:
            InvalidRequestError: the tenant's name is invalid.
        """
        return self.state.pool(tenant)

    def is_loaded(self, tenant: str) -> bool:
        """Return whether a tenant's generations are in memory; loading them is slow."""
        return tenant in self.state.pools

    def indexes_of(self, tenant: str) -> tuple[Index, ...]:
        """Return a tenant's indexes in their current snapshots."""
        return self.state.bindings.corpora(tenant).current.indexes

    def check_vocabulary(self, fingerprint: str, tenant: str = "") -> None:
        """Refuse the tokens of another tokenizer.

        If the drafter has no vocabulary, each tenant has the first tokenizer that it names, as long
        as it has open sessions or outputs in memory. So no client can lock out other tenants. A
        state directory and replication allow only one tokenizer: that of the first output stored
        there. It becomes the drafter's tokenizer.

        Raises:
            VocabularyMismatchError: `fingerprint` is neither empty nor the expected one.
            InvalidRequestError: it is not a fingerprint.
        """
        if not fingerprint:
            return
        fingerprint = checked_fingerprint(fingerprint)
        expected = self.state.fingerprint.lower()
        if not expected:
            with self.state.lock:
                expected = self.state.named.get(tenant, "")
                if fingerprint != expected and not self._holds_anything_of(tenant):
                    expected = self.state.named[tenant] = fingerprint
                    if len(self.state.named) > _MOST_NAMED:
                        del self.state.named[next(iter(self.state.named))]
        if fingerprint != expected:
            raise VocabularyMismatchError(
                f"drafts are for the tokenizer with the fingerprint {expected[:12]}\u2026 "
                f"and not for {fingerprint[:12]}\u2026: "
                "use an index built with the model's own tokenizer"
            )

    def _holds_anything_of(self, tenant: str) -> bool:
        pool = self.state.pools.find(tenant)
        has_outputs = pool is not None and pool.generations.num_tokens > 0
        return has_outputs or tenant in self.state.sessions.tenants

    def _charged(self, request: DraftRequest, namespace: str = "") -> CheckedRequest:
        """Check a request and charge the memory for its tokens."""
        step = self.state.checked(request, namespace)
        step.session.databases.context.make_room(len(step.new_tokens))
        return step

    def _remember(self, key: SessionKey, session: Session) -> None:
        """Add a session's output to the generations, if it is to be remembered."""
        if not session.remember:
            return
        context = session.databases.context
        output = context.last(len(context) - session.prompt_length)
        if len(output):
            self.state.name_vocabulary(session.tenant)
        version, pool = session.options.policy_version or 0, session.databases.pool
        self.state.plugins.on_remembered(self.state.pools.remember(pool, output, key.name, version))


def _drafting(step: CheckedRequest) -> Asked:
    """Return the request to draft for a sequence whose tokens are committed."""
    databases, request = step.session.databases, step.request
    drafting = request._replace(new_tokens=NO_TOKENS, length=len(databases.context))
    return databases, drafting
