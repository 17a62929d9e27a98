"""Sequences of an engine, found by name or tokens, and drafts for them within a deadline."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from decoder.engines.request_fields import PLAIN, RequestFields
from retriever.drafter import Drafter, TokenIds
from retriever.follower import DraftLimits, Follower, Followers
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree

_TAIL: Final = 8
"""Last tokens that a sequence is looked up by, before all of it is compared: few enough to hash at
every step, and enough that sequences of one length seldom share them."""

_Key = tuple[int, bytes] | str


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """A request that the engine names.

    Attributes:
        name: no other request that runs has it.
        state: the engine's own object for it: one request, one object. It tells a request from a
            later one of the same name.
        fields: what the request states.
    """

    name: str
    state: object
    fields: RequestFields = PLAIN


@dataclass(slots=True, eq=False)
class HeldSequence:
    """A sequence of an engine, with a copy of its tokens.

    Attributes:
        follower: keeps the drafter up to date with it.
        slot: where the engine kept it when it was last seen.
        call: the number of the call that it was last seen in.
        seen_s: when that was, in seconds of a clock of the caller's.
        request: whose it is, where the engine names requests.
        sequence: its tokens, which the follower shares.
    """

    follower: Follower
    slot: int = 0
    call: int = 0
    seen_s: float = 0.0
    request: NamedRequest | None = None
    sequence: TokenSequence = field(init=False)

    def __post_init__(self) -> None:
        self.sequence = self.follower.sequence


class SequenceIndex:
    """Finds the sequence that a row of tokens continues.

    Sequences are filed by their names, or where there are none, by their length and last tokens.
    Those found by tokens are compared from the first to the last, so that a row never continues
    another sequence. Comparing reads 4 bytes a token: some microseconds for 32k tokens.
    """

    def __init__(self) -> None:
        self._filed: dict[_Key, list[HeldSequence]] = {}
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[HeldSequence]:
        for filed in self._filed.values():
            yield from filed

    def add(self, held: HeldSequence) -> None:
        """File a sequence."""
        self._filed.setdefault(_filed_under(held), []).append(held)
        self._num_sequences += 1

    def remove(self, held: HeldSequence) -> None:
        """Take a sequence out; it must not have changed since it was filed."""
        key = _filed_under(held)
        filed = [each for each in self._filed[key] if each is not held]
        if filed:
            self._filed[key] = filed
        else:
            del self._filed[key]
        self._num_sequences -= 1

    def extend(self, held: HeldSequence, tokens: TokenIds) -> None:
        """Append int32[m] to a sequence that is filed."""
        if held.request is not None:
            held.sequence.extend(tokens)
            return
        self.remove(held)
        held.sequence.extend(tokens)
        self.add(held)

    def named(self, name: str) -> HeldSequence | None:
        """Return the sequence of a request, `None` if there is none."""
        return next(iter(self._filed.get(name, ())), None)

    def exact(self, tokens: TokenIds, slot: int, call: int) -> HeldSequence | None:
        """Return a sequence that equals int32[n]; where several do, that of the slot.

        Args:
            tokens: all tokens of the sequence.
            slot: where the engine keeps the row.
            call: sequences that were seen in this call belong to other rows.
        """
        found: HeldSequence | None = None
        for each in self._filed.get(_key(tokens), ()):
            if each.call != call and each.sequence.begins(tokens):
                if each.slot == slot:
                    return each
                if found is None:
                    found = each
        return found

    def longest(self, tokens: TokenIds, slot: int, call: int) -> HeldSequence | None:
        """Return the longest sequence that int32[n] begins with; else as `exact`."""
        free = [
            each
            for each in self
            if each.request is None and each.call != call and len(each.sequence) <= len(tokens)
        ]
        free.sort(key=lambda each: (len(each.sequence), each.slot == slot), reverse=True)
        return next((each for each in free if each.sequence.begins(tokens)), None)


def _key(tokens: TokenIds) -> _Key:
    return len(tokens), tokens[-_TAIL:].tobytes()


def _filed_under(held: HeldSequence) -> _Key:
    return _key(held.sequence.tokens) if held.request is None else held.request.name


_INERTIA: Final = 0.9
"""Weight of earlier steps in the mean time of a draft: about the last ten steps count, so that one
pause of the machine does not cut the next steps' drafts for long."""


class DrafterSessions:
    """Asks a drafter for the sequences of an engine's step within a deadline.

    Errors of the drafter never surface: a sequence that it refuses is not drafted for, and a
    failure costs drafts; see `Followers`.

    Args:
        drafter: gives the drafts.
        deadline_s: a step opens as many sessions, and asks for as many drafts, as have lately
            fitted into so many seconds, at least one of each; None where the drafter keeps a
            deadline itself.
        min_probability: of the nodes that are asked for.
        limits: which tokens the model and the drafter know.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        drafter: Drafter,
        deadline_s: float | None = None,
        min_probability: float = 0.0,
        limits: DraftLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._followers = Followers(drafter, limits, raises_refusals=False, clock=clock)
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        self._min_probability = min_probability
        self._clock = clock
        self._turn = 0
        self._draft_s = 0.0

    @property
    def num_failures(self) -> int:
        """Steps, opens and closes that the drafter refused or did not answer."""
        return self._followers.num_failures

    def follow(self, tokens: TokenIds, num_prompt: int, fields: RequestFields = PLAIN) -> Follower:
        """Return a follower of a copy of int32[n], whose first `num_prompt` are the prompt."""
        return self._followers.follow(
            TokenSequence(
                tokens,
                num_prompt,
                remember=fields.remember,
                predictions=fields.predictions,
                kin=fields.kin,
                tenant=fields.tenant,
            )
        )

    def draft(self, asked: Sequence[tuple[Follower, int]]) -> list[DraftTree]:
        """Return a tree for each sequence, in order; empty where the drafter gives none.

        Args:
            asked: sequences, each once, with the most nodes of their trees.
        """
        trees = [DraftTree.empty()] * len(asked)
        places = [at for at, (follower, _) in enumerate(asked) if not follower.is_over()]
        if not places or not self._followers.backoff.is_over():
            return trees
        chosen = [places[at] for at in self._order(len(places))]
        until_s = self._clock() + self._deadline_s
        self._followers.open([asked[at][0] for at in chosen], until_s)
        chosen = [at for at in chosen if asked[at][0].is_open]
        for at, tree in zip(chosen, self._step([asked[at] for at in chosen]), strict=True):
            trees[at] = tree
        return trees

    def abandon(self, followers: Iterable[Follower]) -> None:
        """Drop sessions after an unexpected error; errors of closing them are ignored."""
        self._followers.abandon(followers)

    def _order(self, num_asked: int) -> list[int]:
        """Return which to ask for: as many as the deadline allows, taking turns."""
        order = [(self._turn + at) % num_asked for at in range(num_asked)]
        if self._draft_s > 0 and self._deadline_s < num_asked * self._draft_s:
            order = order[: max(1, int(self._deadline_s / self._draft_s))]
        self._turn = 0 if len(order) == num_asked else self._turn + len(order)
        return order

    def _step(self, asked: Sequence[tuple[Follower, int]]) -> list[DraftTree]:
        """Draft for open sessions, and note how long that takes where it succeeds."""
        failures, start_s = self.num_failures, self._clock()
        trees = self._followers.draft(asked, self._min_probability)
        if asked and self.num_failures == failures:
            draft_s = (self._clock() - start_s) / len(asked)
            self._draft_s += (1 - _INERTIA) * (draft_s - self._draft_s)
        return trees
