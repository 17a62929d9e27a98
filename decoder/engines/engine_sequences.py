"""Sends an engine's sequences to a drafter, and drafts for the sequences of a step.

In every step an engine passes rows: the tokens of the running sequences. If the engine names a
row's request, that name identifies the row's sequence, which ends with the request. Otherwise the
engine does not report when a sequence begins, ends, is aborted or waits for memory. Then a row
continues the sequence whose tokens are a prefix of the row.
"""

import math
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from decoder.engines.request_fields import PLAIN, RequestFields
from retriever.drafter import Drafter, TokenIds
from retriever.follower import DraftLimits, Follower, Followers
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True)
class NamedRequest:
    """A request that the engine names.

    Attributes:
        name: name that is unique among the running requests.
        state: the engine's own object for the request. It tells a request from a later request with
            the same name.
        fields: the request's fields for the drafter. For a request without drafts, nothing is
            stored.
    """

    name: str | int
    state: object = None
    fields: RequestFields = PLAIN


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One running sequence, as an engine passes it in a step.

    Attributes:
        tokens: int32[n], the sequence; if `first` is not 0, only its last tokens. This is a view
            that the engine may overwrite later.
        num_prompt: number of prompt tokens, if the sequence begins with this row. A row without a
            request continues the sequence of exactly these tokens.
        budget_nodes: most nodes of the row's draft; with 0 the drafter only gets the tokens.
        request: the row's request, if the engine names requests.
        first: number of the sequence's tokens before `tokens`; 0 without a request.
        earlier: function that returns those tokens, int32[first] or more, if they can be known.
    """

    tokens: TokenIds
    num_prompt: int
    budget_nodes: int
    request: NamedRequest | None = None
    first: int = 0
    earlier: Callable[[], TokenIds] | None = None

    @property
    def fields(self) -> RequestFields:
        """The fields of the row's request."""
        return PLAIN if self.request is None else self.request.fields

    def known(self) -> tuple[TokenIds, int]:
        """Return int32[m], the sequence's known tokens, and how many tokens before are unknown."""
        earlier = self.earlier() if self.first and self.earlier is not None else self.tokens[:0]
        if len(earlier) < self.first:
            return self.tokens, self.first
        return np.concatenate([earlier[: self.first], self.tokens]), 0


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits on the tracked sequences and on the time for drafts.

    Attributes:
        max_sequences: most sequences at a time; beyond it, the least recently seen sequence is
            ended.
        max_tokens: most tokens of all sequences together, 4 to 8 bytes each in addition to the
            drafter's own memory.
        idle_steps: an unnamed sequence counts as ended after this many steps in a row without it.
            Engines may pass only a part of their sequences in each step.
        idle_s: an unnamed sequence counts as ended after this many seconds without it.
        vocabulary_size: size of the drafter's vocabulary; a token beyond it ends drafting for its
            sequence. `None` if the drafter accepts all tokens.
        deadline_s: seconds per step for opening sessions and drafting. A step opens and drafts for
            as many sequences as recently fit into this time, but at least one of each. `None` if
            the drafter keeps a deadline itself.
        min_probability: least probability of a drafted node.
    """

    max_sequences: int = 2048
    max_tokens: int = 1 << 24
    idle_steps: int = 8
    idle_s: float = 10.0
    vocabulary_size: int | None = None
    deadline_s: float | None = None
    min_probability: float = 0.0


_TAIL: Final = 8
"""Number of last tokens in the key of a sequence, before all tokens are compared: few enough to
hash in every step, and enough that sequences of equal length rarely have the same last tokens."""

_INERTIA: Final = 0.9
"""Weight of earlier steps in the mean time of a draft: about the last ten steps count, so one
machine pause does not reduce the drafts of later steps for long."""

_Key = tuple[int, bytes] | str | int


class EngineSequences:
    """Sends the sequences of an engine to a drafter, and drafts for them.

    A row of a named request continues that request's sequence. An unnamed row continues a sequence
    only if all of the sequence's tokens are its prefix, compared one by one. Then only the new
    tokens are sent to the drafter. In one step no two rows share a sequence; unnamed rows with
    equal tokens may swap sequences.

    When a sequence ends, its output is remembered, even if the sequence was aborted, because it is
    the model's own text. Errors of the drafter only cost drafts: a refused sequence gets no drafts,
    and after a failure sessions are opened again; see `Followers`. `EngineGuard` handles all other
    errors. Not thread-safe.

    Args:
        drafter: the drafter, called once per step for all rows.
        limits: limits on sequences and time.
        clock: function that returns monotonic time in seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        limits: SequenceLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or SequenceLimits()
        known = DraftLimits(drafter_vocabulary=self._limits.vocabulary_size)
        self._followers = Followers(drafter, known, raises_refusals=False, clock=clock)
        self._deadline_s = math.inf if self._limits.deadline_s is None else self._limits.deadline_s
        self._clock = clock
        self._held = _HeldSequences()
        self._num_tokens = 0
        self._step = 0
        self._turn = 0
        self._draft_s = 0.0

    def __len__(self) -> int:
        """Number of tracked sequences."""
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the tracked sequences."""
        return self._num_tokens

    @property
    def num_failures(self) -> int:
        """Number of calls that the drafter refused or did not answer."""
        return self._followers.num_failures

    def step(self, rows: Sequence[EngineRow]) -> list[DraftTree]:
        """Return a tree for each row, in order; empty if there is no draft or no room."""
        held = self._take_in(rows)
        trees = [DraftTree.empty()] * len(rows)
        wanted = [
            (at, each.follower)
            for at, each in enumerate(held)
            if each is not None and not each.follower.is_over()
        ]
        if not wanted or not self._followers.backoff.is_over():
            return trees
        chosen = [wanted[at] for at in self._in_turns(len(wanted))]
        self._followers.open([each for _, each in chosen], self._clock() + self._deadline_s)
        asked = {at: (each, rows[at].budget_nodes) for at, each in chosen if each.is_open}
        for at, tree in zip(asked, self._ask(list(asked.values())), strict=True):
            trees[at] = tree
        return trees

    def note(self, rows: Sequence[EngineRow]) -> None:
        """Record a step without drafts; its tokens are sent with the next draft or end."""
        self._take_in(rows)

    def end(self, name: str | int, tokens: TokenIds | None = None) -> None:
        """End the sequence of a request, and remember its output.

        Args:
            name: name of the request; an unknown name is ignored.
            tokens: int32[n], all tokens of the sequence, if rows have not passed all of them.
        """
        held = self._held.named(name)
        if held is None:
            return
        rest = None if tokens is None else held.behind(tokens, 0)
        if rest is not None:
            self._extend(held, rest)
        self._end(held)

    def end_others(self, running: Container[str | int]) -> None:
        """End the sequences of named requests that are not in `running`."""
        for held in self._held.all():
            if held.request is not None and held.request.name not in running:
                self._end(held)

    def close(self) -> None:
        """End all sequences, and remember their outputs."""
        for held in self._held.all():
            self._end(held)

    def abandon(self) -> None:
        """Drop all sequences in any state, without closing them properly; never raise errors."""
        self._followers.abandon(held.follower for held in self._held.all())
        self._held = _HeldSequences()
        self._num_tokens = 0

    def _take_in(self, rows: Sequence[EngineRow]) -> list["_HeldSequence | None"]:
        """Return the updated sequence of each row; `None` for rows without a sequence."""
        self._step += 1
        now_s = self._clock()
        held = [self._follow(row, now_s) for row in rows]
        self._end_unseen(now_s)
        return held

    def _follow(self, row: EngineRow, now_s: float) -> "_HeldSequence | None":
        held, new = self._found(row)
        if not row.fields.drafts:
            return None
        held = self._begin(row) if held is None else self._go_on(held, new)
        if held is not None:
            held.step, held.seen_s = self._step, now_s
        return held

    def _found(self, row: EngineRow) -> tuple["_HeldSequence | None", TokenIds]:
        """Return the sequence that a row continues, if any, and the row's new tokens.

        If a row does not continue its request's sequence, that sequence is ended.
        """
        if row.request is None:
            before = row.tokens[: row.num_prompt]
            return self._held.of_tokens(before, self._step), row.tokens[row.num_prompt :]
        held = self._held.named(row.request.name)
        if held is None:
            return None, row.tokens
        new = held.behind(row.tokens, row.first)
        if new is not None and held.is_of(row.request):
            return held, new
        self._end(held)
        return None, row.tokens

    def _begin(self, row: EngineRow) -> "_HeldSequence | None":
        """Return a new sequence; `None` if there is no room for the sequence."""
        tokens, first = row.known()
        if not self._can_hold(tokens, is_new=True):
            return None
        num_prompt = min(row.num_prompt, len(tokens)) if first == 0 else len(tokens)
        follower = self._followers.follow(row.fields.begin(tokens, num_prompt))
        held = _HeldSequence(follower, row.request, first)
        self._held.add(held)
        self._num_tokens += len(tokens)
        return held

    def _go_on(self, held: "_HeldSequence", new: TokenIds) -> "_HeldSequence | None":
        """Return a sequence with its new tokens; `None` if there is no room for the tokens."""
        held.step = self._step  # so other rows of this step neither use nor end it
        if not self._can_hold(new, is_new=False):
            return None
        self._extend(held, new)
        return held

    def _extend(self, held: "_HeldSequence", new: TokenIds) -> None:
        self._held.remove(held)  # the key of an unnamed sequence is its tokens
        held.sequence.extend(new)
        self._held.add(held)
        self._num_tokens += len(new)

    def _end(self, held: "_HeldSequence") -> None:
        self._held.remove(held)
        self._num_tokens -= len(held.sequence)
        held.follower.close()

    def _can_hold(self, tokens: TokenIds, *, is_new: bool) -> bool:
        """Return whether tokens are valid and there is room; end other sequences if needed.

        The least recently seen sequences are ended, but none that was seen in this step.
        """
        if len(tokens) and tokens.min() < 0:
            return False
        while (
            len(self._held) + is_new > self._limits.max_sequences
            or self._num_tokens + len(tokens) > self._limits.max_tokens
        ):
            unseen = [each for each in self._held.all() if each.step < self._step]
            if not unseen:
                return False
            self._end(min(unseen, key=lambda each: each.step))
        return True

    def _end_unseen(self, now_s: float) -> None:
        """End unnamed sequences that have not been seen for too long."""
        last_step, last_s = self._step - self._limits.idle_steps, now_s - self._limits.idle_s
        for held in self._held.all():
            is_unseen = held.request is None and held.step < self._step
            if is_unseen and (held.step <= last_step or held.seen_s < last_s):
                self._end(held)

    def _in_turns(self, num_wanted: int) -> list[int]:
        """Return the rows to draft for: as many as the deadline allows, in rotation."""
        order = [(self._turn + at) % num_wanted for at in range(num_wanted)]
        if self._draft_s > 0 and self._deadline_s < num_wanted * self._draft_s:
            order = order[: max(1, int(self._deadline_s / self._draft_s))]
        self._turn = 0 if len(order) == num_wanted else self._turn + len(order)
        return order

    def _ask(self, asked: Sequence[tuple[Follower, int]]) -> list[DraftTree]:
        """Draft for open sessions; if all succeed, record the time."""
        failures, start_s = self.num_failures, self._clock()
        trees = self._followers.draft(asked, self._limits.min_probability)
        if asked and self.num_failures == failures:
            draft_s = (self._clock() - start_s) / len(asked)
            self._draft_s += (1 - _INERTIA) * (draft_s - self._draft_s)
        return trees


@dataclass(slots=True, eq=False)
class _HeldSequence:
    """A sequence with a copy of its tokens, and the follower that sends them to the drafter.

    Attributes:
        follower: the follower of the sequence.
        request: the sequence's request, if the engine names requests.
        first: number of unknown tokens before the known tokens of the sequence.
        step: number of the step in which the sequence was last seen.
        seen_s: time when the sequence was last seen, in seconds.
    """

    follower: Follower
    request: NamedRequest | None
    first: int = 0
    step: int = 0
    seen_s: float = 0.0

    @property
    def sequence(self) -> TokenSequence:
        """The tokens."""
        return self.follower.sequence

    @property
    def key(self) -> _Key:
        return _key(self.sequence.tokens) if self.request is None else self.request.name

    def is_of(self, request: NamedRequest) -> bool:
        return self.request is not None and self.request.state is request.state

    def behind(self, tokens: TokenIds, first: int) -> TokenIds | None:
        """Return a row's new tokens, int32[n]; `None` if its other tokens differ from the known."""
        known = self.sequence.tokens
        begin = max(first - self.first, 0)
        shown = tokens[max(self.first - first, 0) :]
        num_known = len(known) - begin
        if not 0 <= num_known <= len(shown) or (known[begin:] != shown[:num_known]).any():
            return None
        return shown[num_known:]


class _HeldSequences:
    """Sequences by name; unnamed sequences by length and last tokens.

    Unnamed sequences are compared from the first to the last token, so that a row never continues
    the wrong one. Comparing reads 4 bytes per token: a few microseconds for 32k tokens.
    """

    def __init__(self) -> None:
        self._filed: dict[_Key, list[_HeldSequence]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def all(self) -> list[_HeldSequence]:
        """Return all sequences in a new list, so that callers may change the original."""
        return [held for filed in self._filed.values() for held in filed]

    def add(self, held: _HeldSequence) -> None:
        self._filed.setdefault(held.key, []).append(held)
        self._num += 1

    def remove(self, held: _HeldSequence) -> None:
        filed = self._filed[held.key]
        filed.remove(held)
        if not filed:
            del self._filed[held.key]
        self._num -= 1

    def named(self, name: str | int) -> _HeldSequence | None:
        return next(iter(self._filed.get(name, ())), None)

    def of_tokens(self, tokens: TokenIds, step: int) -> _HeldSequence | None:
        """Return a sequence that equals int32[n] tokens and that no row of this step uses."""
        filed = self._filed.get(_key(tokens), ())
        return next(
            (each for each in filed if each.step != step and each.sequence.begins(tokens)), None
        )


def _key(tokens: TokenIds) -> _Key:
    return len(tokens), tokens[-_TAIL:].tobytes()
