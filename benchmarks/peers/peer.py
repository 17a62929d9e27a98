"""A drafter as a benchmark drives it: one sequence at a time, its own call timed alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np

from benchmarks.workloads import Workload
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.traces.traces import Trace
from retriever.tree import ROOT, DraftTree, Source

_SESSION: Final = "the sequence"


class Kind(StrEnum):
    """Whose code drafts."""

    OURS = "ours"
    PROGRAM = "program"
    READING = "reading"


class Peer(Protocol):
    """A drafter with one open sequence at most."""

    def open(self, prompt: TokenIds, room: int) -> None:
        """Begin a sequence.

        Args:
            prompt: int32[n], n > 0.
            room: tokens that will follow at most; buffers that an engine holds are made for them.
        """

    def propose(self, new_tokens: TokenIds, budget: int) -> Any:
        """Append int32[n] and draft: all that the program does between two passes.

        Returns:
            The draft as the program returns it.
        """

    def tree(self, proposed: Any) -> DraftTree:
        """Return what `propose` returned as a tree; this is not timed."""

    def close(self, new_tokens: TokenIds) -> None:
        """End the sequence with its last tokens, int32[n]; it may be drafted from later."""


@dataclass(frozen=True, slots=True)
class Made:
    """A drafter that is ready.

    Attributes:
        peer: it has seen the workload's outputs, and its documents where the contender says so.
        settings: how it drafts, in words.
    """

    peer: Peer
    settings: str = ""


@dataclass(frozen=True, slots=True)
class Contender:
    """A way of drafting that is measured.

    Attributes:
        name: in reports and on the command line.
        kind: whose code it is.
        evidence: what it drafts from besides the sequence, in words.
        make: gives its drafter for a workload, trees of so many nodes and recordings to find its
            best settings with (none: its usual ones).
        needs_index: whether it is left out where there is no index, since it would be the same as
            another contender.
        reads: name of the program that a reading is of; empty where no program can be had.
    """

    name: str
    kind: Kind
    evidence: str
    make: Callable[[Workload, int, Sequence[Trace]], Made]
    needs_index: bool = False
    reads: str = ""


class Text:
    """The tokens of a sequence in one array, as an engine holds them.

    Args:
        prompt: int32[n].
        room: tokens that will follow at most.

    Attributes:
        tokens: int32[n + room], of which the first `length` are there.
        length: tokens so far.
    """

    def __init__(self, prompt: TokenIds, room: int) -> None:
        self.tokens = np.zeros(len(prompt) + room, np.int32)
        self.length = 0
        self.append(prompt)

    def append(self, new_tokens: TokenIds) -> None:
        """Append int32[n]."""
        end = self.length + len(new_tokens)
        self.tokens[self.length : end] = new_tokens
        self.length = end

    def last(self, num_tokens: int) -> TokenIds:
        """Return int32[<= num_tokens], the end of the sequence."""
        return self.tokens[max(0, self.length - num_tokens) : self.length]


class DrafterPeer:
    """A drafter of ours, or a reading of ours, as a peer.

    Args:
        drafter: what drafts.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._length = 0

    def open(self, prompt: TokenIds, room: int) -> None:  # noqa: ARG002  it grows by itself
        """Begin a sequence; see `Peer.open`."""
        self._drafter.open(_SESSION, prompt)
        self._length = len(prompt)

    def propose(self, new_tokens: TokenIds, budget: int) -> DraftTree:
        """Append and draft; see `Peer.propose`."""
        self._length += len(new_tokens)
        request = DraftRequest(_SESSION, new_tokens, self._length, budget)
        return self._drafter.draft([request])[0]

    def tree(self, proposed: DraftTree) -> DraftTree:
        """Return the draft."""
        return proposed

    def close(self, new_tokens: TokenIds) -> None:
        """End the sequence; see `Peer.close`."""
        self._drafter.close(_SESSION, new_tokens)


def path_of(tokens: TokenIds) -> DraftTree:
    """Return int32[n] as a tree that is one path, with probabilities of 1."""
    parents = np.arange(ROOT, len(tokens) - 1, dtype=np.int32)
    return drafted(tokens, parents, np.ones(len(tokens), np.float32))


def drafted(token_ids: Any, parents: Any, probabilities: Any) -> DraftTree:
    """Return a program's draft, integers[n], integers[n] and floats[n], as a tree."""
    return DraftTree(
        np.array(token_ids, np.int32),
        np.array(parents, np.int32),
        np.array(probabilities, np.float32),
        np.full(len(token_ids), int(Source.UNSPECIFIED), np.uint8),
    )
