"""Drafts of recordings: every tree that a replay is given, with its probabilities.

Recordings of this file's own are made of phrases, by a seed, so that each database has something to
say: outputs like an index, files rewritten with edits, turns of agents at one task, samples of one
prompt at a time, outputs that were predicted, listed phrases. Recordings in a folder are replayed
as well where one is given.
"""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Final

import numpy as np

from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from indexer.tokenizer import vocabulary_of
from retriever.drafter import DraftRequest, Prediction, SequenceOptions, TokenIds
from retriever.predict.phrases import ListedPhrases
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.traces.traces import ChatEncoder, Trace, read_outputs, read_traces
from retriever.tree import DraftTree
from tests.golden.record import Step, rate_step, tree_step
from tests.golden.sections import Scope

BUDGETS: Final = (8, 32, 64)
VOCABULARY: Final = Vocabulary(300, "ab" * 32)
_MOST_TRACES: Final = 12
"""Of each file in a folder of recordings."""
_MOST_WARM: Final = 100
_MOST_DOCUMENTS: Final = 2000


@dataclass(frozen=True, slots=True)
class Replay:
    """Recordings and what they are drafted from.

    Attributes:
        name: in the names of steps.
        traces: what is replayed, in order.
        warm: outputs that count as recent generations.
        documents: of an index; none for no index.
        phrases: that are listed.
        lanes: how many sequences are replayed at once.
        outcomes: tokens that are drafted ahead after, in every step; none for no such drafts.
    """

    name: str
    traces: Sequence[Trace]
    warm: Sequence[TokenIds] = ()
    documents: Sequence[list[int]] = ()
    phrases: Sequence[list[int]] = ()
    lanes: int = 1
    outcomes: Sequence[TokenIds] = field(default_factory=list)


def steps(scope: Scope) -> Iterator[Step]:
    """Yield the trees of all replays, at 8, 32 and 64 nodes, and the tokens per step of each."""
    for each in _made(scope):
        for budget in BUDGETS:
            index = scope.scratch / f"{each.name}-{budget}"
            if each.documents:
                documents = [(str(n), ids) for n, ids in enumerate(each.documents)]
                build_from_tokens(documents, index, VOCABULARY)
            indexes = [index] if each.documents else []
            yield from _replayed(each, indexes, VOCABULARY, budget, is_small=scope.small)
    if scope.traces is not None:
        yield from _of_folder(scope.traces, scope.scratch)


def _replayed(
    replay: Replay,
    indexes: Sequence[Path],
    vocabulary: Vocabulary,
    budget: int,
    *,
    is_small: bool,
) -> Iterator[Step]:
    """Replay recordings as they would be decoded; those of a group at once, as lanes allow."""
    drafter = EmbeddedDrafter.open_indexes(
        indexes, vocabulary=vocabulary, phrases=ListedPhrases(map(tuple, replay.phrases))
    )
    name, num_tokens, num_steps = f"trees/{replay.name}/{budget} nodes", 0, 0
    try:
        for output in replay.warm:
            drafter.remember(output)
        for start in range(0, len(replay.traces), replay.lanes):
            at_once = replay.traces[start : start + replay.lanes]
            lanes = [_Lane(f"{name}/{start + n}", trace) for n, trace in enumerate(at_once)]
            for lane in lanes:
                lane.open(drafter)
            while running := [lane for lane in lanes if not lane.is_done]:
                requests = [lane.request(budget, replay.outcomes) for lane in running]
                drafted = _drafts(drafter, requests)
                for lane, (tree, ahead) in zip(running, drafted, strict=True):
                    yield lane.step(tree, budget, is_small=is_small)
                    yield from lane.steps_ahead(ahead, budget, is_small=is_small)
                    lane.commit(tree)
                num_steps += len(running)
            num_tokens += sum(lane.done for lane in lanes)
            for lane in lanes:
                lane.close(drafter)
    finally:
        drafter.shut_down()
    yield rate_step(f"{name}/tokens per step", num_tokens, num_steps)


def _drafts(
    drafter: EmbeddedDrafter, requests: Sequence[DraftRequest]
) -> Iterator[tuple[DraftTree, list[DraftTree]]]:
    """Yield the tree of each request, and those drafted ahead if outcomes are stated.

    Drafting ahead is asked for with nothing new, so that it leaves the sequence as it was.
    """
    trees = drafter.draft([each._replace(outcomes=()) for each in requests])
    ahead: list[list[DraftTree]] = [[] for _ in requests]
    if requests[0].outcomes:
        again = [each._replace(new_tokens=each.new_tokens[:0]) for each in requests]
        ahead = drafter.draft_ahead(again)
    yield from zip(trees, ahead, strict=True)


class _Lane:
    """A recording that is replayed.

    Args:
        name: of its steps, and of its session.
        trace: the recording.

    Attributes:
        done: tokens of the output that were committed.
    """

    def __init__(self, name: str, trace: Trace) -> None:
        self._name, self._trace = name, trace
        self._new = trace.output[:0]
        self.done = 0

    @property
    def is_done(self) -> bool:
        return self.done == len(self._trace.output)

    def open(self, drafter: EmbeddedDrafter) -> None:
        options = SequenceOptions(
            predictions=tuple(self._trace.predictions), group=self._trace.group or ""
        )
        drafter.open(self._name, self._trace.prompt, options)

    def close(self, drafter: EmbeddedDrafter) -> None:
        drafter.close(self._name, self._new)

    def request(self, budget: int, outcomes: Sequence[TokenIds]) -> DraftRequest:
        length = len(self._trace.prompt) + self.done
        return DraftRequest(self._name, self._new, length, budget, outcomes=tuple(outcomes))

    def step(self, tree: DraftTree, budget: int, *, is_small: bool) -> Step:
        return _shortened(tree_step(f"{self._name}/at {self.done}", tree, budget), is_small)

    def steps_ahead(self, trees: list[DraftTree], budget: int, *, is_small: bool) -> list[Step]:
        names = (f"{self._name}/at {self.done}/ahead {number}" for number in range(len(trees)))
        found = (tree_step(name, tree, budget) for name, tree in zip(names, trees, strict=True))
        return [_shortened(step, is_small) for step in found]

    def commit(self, tree: DraftTree) -> None:
        rest = self._trace.output[self.done :]
        self._new = rest[: len(tree.follow(rest)) + 1]
        self.done += len(self._new)


def _shortened(step: Step, is_small: bool) -> Step:  # noqa: FBT001  (as in a scope)
    """Return a step whose probabilities have six digits, where it is kept in the repository."""
    if not is_small:
        return step
    digits = [float(f"{value:.6g}") for value in step.value["probabilities"]]
    return replace(step, value={**step.value, "probabilities": digits})


def _of_folder(folder: Path, scratch: Path) -> Iterator[Step]:
    """Replay the recordings of a folder: `NAME.test`, after `NAME.warm`, with `KIND.corpus`."""
    encoder = ChatEncoder(None)
    vocabulary = vocabulary_of(encoder.tokenizer)
    for file in sorted(folder.glob("*.test.jsonl.gz")):
        name = file.name.removesuffix(".test.jsonl.gz")
        warm = folder / f"{name}.warm.jsonl.gz"
        corpus = folder / f"{name.split('.')[0]}.corpus.jsonl.gz"
        index = scratch / f"{corpus.name}.index"
        if corpus.is_file() and not index.exists():
            with gzip.open(corpus, "rt", encoding="utf-8") as lines:
                rows = map(json.loads, islice(lines, _MOST_DOCUMENTS))
                documents = ((str(row["id"]), encoder.encode_output(row["text"])) for row in rows)
                build_from_tokens(documents, index, vocabulary)
        outputs = list(islice(read_outputs(warm, encoder), _MOST_WARM)) if warm.is_file() else []
        replay = Replay(name, list(read_traces(file, encoder, _MOST_TRACES)), outputs)
        for budget in BUDGETS:
            indexes = [index] if corpus.is_file() else []
            yield from _replayed(replay, indexes, vocabulary, budget, is_small=False)


# Recordings made of phrases.


def _made(scope: Scope) -> Iterator[Replay]:
    """Yield replays of every kind, shorter ones where little time is there."""
    many, length = (1, 40) if scope.small else (4, 160)
    say = _Speaker(random.Random(11))
    documents = [say.text(120) for _ in range(20)]
    warm = [_ids(say.text(60)) for _ in range(6)]
    traces = [_trace(say.text(40), say.text(length)) for _ in range(many)]
    yield Replay("chats", traces, warm, documents)
    yield Replay("ahead", traces, warm, documents, outcomes=[_ids(say.text(n)) for n in (1, 3)])
    files = [say.text(2 * length) for _ in range(many)]
    edited = [_trace(text, say.edited(text)[: 2 * length]) for text in files]
    yield Replay("edits", edited)
    guesses = [
        Trace(_ids(say.text(12)), _ids(say.edited(text)), (Prediction(_ids(text), "file"),))
        for text in files
    ]
    yield Replay("predictions", guesses)
    turns = [say.turn(number, length) for number in range(2 * many)]
    yield Replay("agents", [_trace(prompt, output, "task") for prompt, output in turns])
    prompt, model = say.text(30), say.text(length)
    samples = [_trace(prompt, say.edited(model), "prompt") for _ in range(2 * many)]
    yield Replay("samples", samples, lanes=min(4, 2 * many))
    phrases = [say.text(9) for _ in range(5)]
    quoting = [_trace(say.text(20), say.shuffled(phrases)) for _ in range(many)]
    yield Replay("phrases", quoting, phrases=phrases)


def _ids(tokens: Sequence[int]) -> TokenIds:
    return np.array(tokens, np.int32)


def _trace(prompt: list[int], output: list[int], group: str = "") -> Trace:
    return Trace(_ids(prompt), _ids(output), group=group)


class _Speaker:
    """Says texts of its own phrases, common ones more often, and now and then any token.

    Args:
        rng: what it draws from.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._phrases = [self._drawn(rng.randint(3, 9)) for _ in range(60)]

    def _drawn(self, count: int) -> list[int]:
        return [self._rng.randrange(20, VOCABULARY.size) for _ in range(count)]

    def text(self, length: int) -> list[int]:
        """Return so many tokens."""
        found: list[int] = []
        while len(found) < length:
            common = int(len(self._phrases) * self._rng.random() ** 2)
            found += self._phrases[common] if self._rng.random() < 0.9 else self._drawn(2)
        return found[:length]

    def edited(self, text: list[int]) -> list[int]:
        """Return a text in which one token is another throughout, and a few places are new."""
        old, new = self._rng.choice(text), self._rng.randrange(20)
        found: list[int] = []
        for token in text:
            if self._rng.random() < 0.02:
                found += self._drawn(self._rng.randint(1, 4))
            elif self._rng.random() > 0.02:
                found.append(new if token == old else token)
        return found

    def turn(self, number: int, length: int) -> tuple[list[int], list[int]]:
        """Return what an agent was given and what it answered: calls of the same few shapes."""
        call = [1, 2, 3, 4, number % 20, 5, 6]
        return [*self.text(length // 2), 7], [*call, *self.text(length // 2), 8, *call, 9]

    def shuffled(self, texts: list[list[int]]) -> list[int]:
        """Return texts one behind the other, in another order."""
        return list(chain.from_iterable(self._rng.sample(texts, len(texts))))
