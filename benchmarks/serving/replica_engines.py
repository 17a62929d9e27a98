"""Engines that decode through several services, each output compared with plain decoding.

The target is scripted: a pure function of its context, so that what drafts do to an output is seen.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier, Event
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np

from retriever.client.conversation import FailOpen
from retriever.client.resilient import ResilientDrafter
from retriever.drafter import DraftRequest
from retriever.tree import ROOT, DraftTree

LATE: Final = 1.2
"""Share of the deadline after which a step counts as late."""

_PATIENCE_S: Final = 60.0
_VOCABULARY: Final = 32_000
_PHRASES: Final = 40
_PHRASE: Final = 24
_BUDGET: Final = 16
_PROMPTS: Final = (50, 1500)  # tokens: from a question to a document
_OUTPUTS: Final = (50, 400)


@dataclass(frozen=True, slots=True)
class Load:
    """What the engines do.

    Attributes:
        addresses: of the services.
        deadline_s: longest wait of a step for its drafts, in seconds.
        pass_s: how long the scripted target takes for a pass, in seconds.
        width: sequences decoded at once by each engine.
        connected: each engine waits here until all have reached the services.
        until: set once no service changes any more, and no more sequences begin.
    """

    addresses: tuple[str, ...]
    deadline_s: float
    pass_s: float
    width: int
    connected: Barrier
    until: Event


@dataclass(slots=True)
class Counts:
    """What an engine has seen.

    Attributes:
        steps: calls of `draft`.
        late: those that took longer than `LATE` deadlines.
        longest_s: the longest of them, in seconds.
        outputs: sequences decoded to their end.
        wrong: outputs that differ from plain decoding.
        tokens: committed.
        accepted: of these, from drafts.
        drafts: sequences of steps.
        fail_opens: those without a service's draft, by reason.
    """

    steps: int = 0
    late: int = 0
    longest_s: float = 0.0
    outputs: int = 0
    wrong: int = 0
    tokens: int = 0
    accepted: int = 0
    drafts: int = 0
    fail_opens: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Counts") -> None:
        """Add what another engine has seen."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name == "longest_s" else mine + theirs)


class Target:
    """A scripted target: phrases that recur, and now and then another token.

    Args:
        seed: of its phrases.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._phrases: list[list[int]] = rng.integers(0, _VOCABULARY, (_PHRASES, _PHRASE)).tolist()

    def next_token(self, tokens: Sequence[int]) -> int:
        """Return the token after a context: it depends on its length and its last tokens."""
        at = len(tokens)
        phrase = self._phrases[(at // _PHRASE * 7 + tokens[0]) % _PHRASES]
        if at % 61 == 0:  # breaks off a match
            return (tokens[-1] * 31 + tokens[-2] + 1) % _VOCABULARY
        return phrase[at % _PHRASE]

    def plain(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Decode without drafts; return prompt and output."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            tokens.append(self.next_token(tokens))
        return tokens

    def verify(self, tokens: list[int], tree: DraftTree) -> list[int]:
        """Return the tokens of a pass: drafted ones that the target writes too, and one more."""
        context, current = list(tokens), ROOT
        for node, (parent, token) in enumerate(
            zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
        ):
            if parent == current and token == self.next_token(context):
                context.append(token)
                current = node
        context.append(self.next_token(context))
        return context[len(tokens) :]


class _Sequence:
    """A sequence under way."""

    def __init__(self, name: str, target: Target, rng: np.random.Generator) -> None:
        self.name = name
        self.target = target
        first = int(rng.integers(_VOCABULARY))
        prompt = target.plain([first, first], int(rng.integers(*_PROMPTS)))
        self.prompt = prompt
        self.tokens = list(prompt)
        self.end = len(prompt) + int(rng.integers(*_OUTPUTS))
        self.new: list[int] = []

    def request(self) -> DraftRequest:
        return DraftRequest(self.name, np.array(self.new, np.int32), len(self.tokens), _BUDGET)

    def take(self, tree: DraftTree) -> int:
        """Verify a draft and commit; return how many drafted tokens were accepted."""
        written = self.target.verify(self.tokens, tree)
        self.new = written[: self.end - len(self.tokens)]
        self.tokens += self.new
        return min(len(written) - 1, len(self.new))

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.end

    @property
    def is_right(self) -> bool:
        return self.tokens == self.target.plain(self.prompt, self.end - len(self.prompt))


def decode(number: int, load: Load) -> Counts:
    """Decode sequence after sequence until the end."""
    counts, rng = Counts(), np.random.default_rng(number)
    target = Target(seed=0)
    names = (f"{number}/{at}" for at in range(1 << 40))
    with ResilientDrafter(load.addresses, deadline_s=load.deadline_s) as drafter:
        drafter.wait(_PATIENCE_S)
        load.connected.wait(_PATIENCE_S)
        under_way: list[_Sequence] = []
        while not load.until.is_set():
            _refill(drafter, under_way, names, target, rng, load.width)
            _step(drafter, under_way, counts, load)
        for each in under_way:
            each.end = len(each.tokens)
            _finish(drafter, each, counts)
        counts.fail_opens = Counter({FailOpen(k).value: n for k, n in drafter.fail_opens.items()})
    return counts


def _refill(  # noqa: PLR0913, PLR0917  (all of an engine's own)
    drafter: ResilientDrafter,
    under_way: list[_Sequence],
    names: Iterator[str],
    target: Target,
    rng: np.random.Generator,
    width: int,
) -> None:
    while len(under_way) < width:
        sequence = _Sequence(next(names), target, rng)
        drafter.open(sequence.name, np.array(sequence.prompt, np.int32))
        under_way.append(sequence)


def _step(
    drafter: ResilientDrafter, under_way: list[_Sequence], counts: Counts, load: Load
) -> None:
    began_s = time.perf_counter()
    trees = drafter.draft([each.request() for each in under_way])
    took_s = time.perf_counter() - began_s
    counts.steps += 1
    counts.late += took_s > LATE * load.deadline_s
    counts.longest_s = max(counts.longest_s, took_s)
    counts.drafts += len(under_way)
    for sequence, tree in zip(list(under_way), trees, strict=True):
        counts.accepted += sequence.take(tree)
        counts.tokens += len(sequence.new)
        if sequence.is_done:
            under_way.remove(sequence)
            _finish(drafter, sequence, counts)
    time.sleep(load.pass_s)


def _finish(drafter: ResilientDrafter, sequence: _Sequence, counts: Counts) -> None:
    drafter.close(sequence.name, np.array(sequence.new, np.int32))
    counts.outputs += 1
    counts.wrong += not sequence.is_right


def waits(load: Load) -> Counts:
    """Wait for a deadline over and over, as a step of a late server does: the machine's share."""
    counts, nothing = Counts(), SimpleQueue[None]()
    while not load.until.is_set():
        began_s = time.perf_counter()
        try:
            nothing.get(timeout=load.deadline_s)
        except Empty:
            took_s = time.perf_counter() - began_s
        counts.steps += 1
        counts.late += took_s > LATE * load.deadline_s
        counts.longest_s = max(counts.longest_s, took_s)
    return counts
