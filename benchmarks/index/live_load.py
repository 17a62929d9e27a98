"""Clients that draft from an index all the time, and a writer that changes it at the same time."""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final

import numpy as np

from indexer.change.changes import add_documents, compact, remove_documents
from retriever import DraftRequest, RemoteDrafter, RetrieverError
from retriever.drafter import TokenIds
from tests.oracles.fuzz.planted_leaks import (
    Life,
    Pair,
    Seen,
    other_documents,
    planted,
    planted_pairs,
    text_of,
)

PLANTED_AT_ONCE: Final = 4
"""Documents that are added in one go."""

_ROUNDS_ALIVE: Final = 3
_COMPACT_EVERY: Final = 4
_BUDGET_NODES: Final = 32
_PROMPT_TOKENS: Final = 8
_STEP_TOKENS: Final = 3
_LOWEST_PRIORITY: Final = 19
_PATIENCE_S: Final = 10.0

Span = tuple[float, float]
"""From one moment to another, by `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class Load:
    """What clients and the writer need to know.

    Attributes:
        folder: where documents are written, and `newest`, the number of the last one.
        index: the index's directory.
        address: of the service.
        pause_s: between a draft and the next one of a client: what a model would take for a pass.
        end: when clients end, by `time.monotonic`.
    """

    folder: Path
    index: Path
    address: str
    pause_s: float
    end: float

    @property
    def newest(self) -> Path:
        """The file with the number of the planted document that was added last."""
        return self.folder / "newest"


@dataclass(slots=True)
class Drafted:
    """What a client saw.

    Attributes:
        times: when each draft was asked for, by `time.monotonic`.
        seconds: how long each took.
        seen: pairs of planted documents in the drafts.
        errors: by message.
    """

    times: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    seen: dict[Pair, Seen] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)


def keep_drafting(load: Load, client: int) -> Drafted:
    """Draft one document after the other, planted ones and others, until the end."""
    rng, drafted = random.Random(client), Drafted()  # noqa: S311  (chooses documents)
    others = [np.array(tokens, np.int32) for tokens in other_documents(40_000)]
    with RemoteDrafter(load.address, timeout_s=_PATIENCE_S) as drafter:
        while time.monotonic() < load.end:
            newest = int(load.newest.read_text())
            number = newest - rng.randrange(-1, 5 * PLANTED_AT_ONCE)
            is_planted = rng.random() < 0.5 and number >= 0  # noqa: PLR2004
            tokens = np.array(planted(number), np.int32) if is_planted else rng.choice(others)
            try:
                _draft_document(drafter, str(rng.random()), tokens, load, drafted)
            except RetrieverError as error:
                drafted.errors[repr(error)] += 1
    return drafted


def _draft_document(
    drafter: RemoteDrafter, session: str, tokens: TokenIds, load: Load, drafted: Drafted
) -> None:
    """Draft along a document; nothing of it is remembered."""
    drafter.open(session, tokens[:_PROMPT_TOKENS], remember=False)
    for end in range(_PROMPT_TOKENS + _STEP_TOKENS, len(tokens), _STEP_TOKENS):
        request = DraftRequest(session, tokens[end - _STEP_TOKENS : end], end, _BUDGET_NODES)
        sent = time.monotonic()
        (tree,) = drafter.draft([request])
        came = time.monotonic()
        drafted.times.append(sent)
        drafted.seconds.append(came - sent)
        for pair in planted_pairs(tree, tokens[:end]):
            known = drafted.seen.setdefault(pair, Seen(sent, sent))
            known.last = sent
        time.sleep(load.pause_s)
    drafter.close(session)


@dataclass(slots=True)
class Changed:
    """What the writer did to an index.

    Attributes:
        lives: when each planted document could be in it, by number.
        spans: when it was changed, by `time.monotonic`.
        turns: of adding documents.
    """

    lives: dict[int, Life] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    turns: int = 0


def keep_changing(loads: Sequence[Load], spans: Sequence[Span]) -> list[Changed]:
    """Add, remove and merge documents, at the lowest priority.

    Args:
        loads: on which indexes, by turns.
        spans: when to, each for the next index; what is begun is ended, which may take longer.

    Returns:
        For each load, what was done.
    """
    os.nice(_LOWEST_PRIORITY)
    changes = [Changed() for _ in loads]
    for (begin, end), (load, changed) in zip(
        spans, cycle(zip(loads, changes, strict=True)), strict=False
    ):
        time.sleep(max(0.0, begin - time.monotonic()))
        began = time.monotonic()
        while time.monotonic() < end:
            _change(load, changed)
        changed.spans.append((began, time.monotonic()))
    return changes


def _change(load: Load, changed: Changed) -> None:
    turn = changed.turns
    _add(load, turn, changed.lives)
    if turn >= _ROUNDS_ALIVE:
        _remove(load, turn - _ROUNDS_ALIVE, changed.lives)
    if turn % _COMPACT_EVERY == _COMPACT_EVERY - 1:
        compact(load.index)
    changed.turns += 1


def _numbers(turn: int) -> range:
    return range(turn * PLANTED_AT_ONCE, (turn + 1) * PLANTED_AT_ONCE)


def _add(load: Load, turn: int, lives: dict[int, Life]) -> None:
    path = load.folder / f"turn-{turn}.jsonl"
    lines = [json.dumps({"text": text_of(planted(number))}) for number in _numbers(turn)]
    path.write_text("\n".join(lines) + "\n")
    began = time.monotonic()
    add_documents(load.index, [path])
    for number in _numbers(turn):
        lives[number] = Life(began, time.monotonic())
    newest = load.newest.with_suffix(".new")
    newest.write_text(str(_numbers(turn)[-1]))
    newest.replace(load.newest)


def _remove(load: Load, turn: int, lives: dict[int, Life]) -> None:
    remove_documents(load.index, patterns=[f"*turn-{turn}.jsonl:*"])
    for number in _numbers(turn):
        lives[number].end = time.monotonic()
