"""Sessions for engines that name their requests and take a draft for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Final

from decoder.engines.engine_options import chain_for
from decoder.engines.engine_sessions import DrafterSessions
from decoder.engines.request_fields import PLAIN, RequestFields
from retriever.drafter import Drafter, TokenIds
from retriever.follower import DraftLimits, Follower
from retriever.tree import DraftTree

_BUDGET_NODES: Final = 64
"""Most nodes of the tree that a path is taken from: a usual path and its main alternatives."""

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedSequence:
    """A request's tokens before a step.

    Attributes:
        tokens: int32[n], all of them; copied.
        num_prompt: how many of them are the prompt.
        max_tokens: most tokens of its draft.
        fields: what the request states of its drafts; those of its first step count.
    """

    tokens: TokenIds
    num_prompt: int
    max_tokens: int
    fields: RequestFields = PLAIN

    @property
    def most_drafted(self) -> int:
        """Most tokens of its draft, by the engine's room and the request's own budget."""
        if not self.fields.drafts:
            return 0
        return min(
            self.max_tokens, self.max_tokens if self.fields.budget is None else self.fields.budget
        )


class NamedSequences:
    """Keeps a drafter up to date with the requests of an engine; its failures never surface.

    Only the new tokens of a request reach the drafter. A request whose tokens do not continue
    those shown before, as after a rewind, gets a new session. Not safe for use from several
    threads.

    Args:
        drafter: gives the drafts, in one call for all requests of a step.
        model_vocabulary: drafts end before a token that is not below it.
        drafter_vocabulary: a token beyond it ends the drafts for its request; None where the
            drafter takes all tokens.
    """

    def __init__(
        self, drafter: Drafter, model_vocabulary: int, *, drafter_vocabulary: int | None = None
    ) -> None:
        limits = DraftLimits(drafter_vocabulary=drafter_vocabulary)
        self._sessions = DrafterSessions(drafter, limits=limits)
        self._model_vocabulary = model_vocabulary
        self._held: dict[int, Follower] = {}
        self._num_errors = 0

    def __len__(self) -> int:
        """Count the requests that are held."""
        return len(self._held)

    @property
    def num_failures(self) -> int:
        """Steps and ends that the drafter refused or did not answer."""
        return self._sessions.num_failures + self._num_errors

    def draft(self, running: Mapping[int, NamedSequence]) -> dict[int, DraftTree]:
        """Return the most probable path of each request's draft, a chain; empty for none.

        Args:
            running: the requests of a step, by numbers of the engine's.
        """
        try:
            return self._drafts(running)
        except Exception as error:  # noqa: BLE001  the engine must not end because of a draft
            self._fail(error)
            return dict.fromkeys(running, DraftTree.empty())

    def _drafts(self, running: Mapping[int, NamedSequence]) -> dict[int, DraftTree]:
        followed = {
            name: self._follow(name, each) for name, each in running.items() if each.fields.drafts
        }
        asked = [name for name in followed if running[name].most_drafted > 0]
        trees = self._sessions.draft([(followed[name], _BUDGET_NODES) for name in asked])
        chains = dict.fromkeys(running, DraftTree.empty())
        for name, tree in zip(asked, trees, strict=True):
            most = running[name].most_drafted
            chains[name] = chain_for(tree, most, self._model_vocabulary)
        return chains

    def end(self, name: int, tokens: TokenIds | None = None) -> None:
        """End a request; its output is remembered.

        Args:
            name: of the request; an unknown one is ignored.
            tokens: int32[n], all of its tokens, where more were generated than were shown.
        """
        held = self._held.pop(name, None)
        if held is None:
            return
        if tokens is not None and held.sequence.begins(tokens):
            held.sequence.extend(tokens[len(held.sequence) :])
        try:
            held.close()
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)

    def _follow(self, name: int, row: NamedSequence) -> Follower:
        held = self._held.get(name)
        if held is not None and not held.sequence.begins(row.tokens):
            self.end(name)
            held = None
        if held is None:
            held = self._sessions.follow(row.tokens, row.num_prompt, row.fields)
            self._held[name] = held
        else:
            held.sequence.extend(row.tokens[len(held.sequence) :])
        return held

    def _fail(self, error: Exception) -> None:
        """Drop all sessions, as their state is unknown; log the first time."""
        self._num_errors += 1
        if self._num_errors == 1:
            _log.warning("the engine goes on without drafts for now: %s", error)
        self._sessions.abandon(self._held.values())
        self._held.clear()
