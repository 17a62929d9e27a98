"""A process that goes on training a head on what a decoder verifies, and keeps what is better.

It is told of the target's outer layers and of finished sequences on its standard input, trains at
the lowest priority within a share of one core's time, and writes the head whenever sequences that
it holds out are predicted better; else it goes back to the best weights. So the head follows the
present requests, as in online speculative decoding (Liu et al., 2024, arXiv:2310.07177); it is
taught the target's own distribution on the target's own text, as in DistillSpec
(arXiv:2310.08461).

Texts and states stay in memory: what is written is the head alone.
"""

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from typing import IO, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch.nn import functional

from decoder.errors import DecoderError
from decoder.plugins.speculators.eagle import Eagle3Head
from decoder.plugins.speculators.head_files import HeadTarget, is_head, load_head, save_head
from decoder.plugins.speculators.layouts import HeadOrigin
from decoder.plugins.training.head_trainer import (
    BATCH_TOKENS,
    HeadTrainer,
    Stage,
    Teaching,
    weights_of,
)
from decoder.plugins.training.judging import agreement
from decoder.plugins.training.online import Order, read_messages
from decoder.plugins.training.taught_store import Example

TRAINED_ONLINE: Final = "sequences that it drafted for"
"""What the file of a head says that it was trained on."""

_STAGE: Final = Stage("while in use", depths=2, rate=2e-4, noise=0.0, share=1.0, warm_up=3)
"""At a quarter of the rate of a training from nothing: it changes what is good already."""

_HELD_OUT: Final = 6
"""One sequence in so many judges and is not taught."""

_JUDGED_SHARE: Final = 0.2
"""Of the memory, for sequences that judge."""

_LEAST_JUDGING: Final = 300
"""Tokens to predict below which nothing is judged, and so nothing changed: the share of predicted
tokens is then known to within 3%."""

_NEW_TOKENS: Final = 4096
"""Tokens that must come before a round: the same ones again would be learned by heart."""

_TIMES: Final = 2
"""How often a round goes through what there is, at most."""

_MOST_STEPS: Final = 32
"""Of a round: more at once move further without being judged."""


@dataclass(frozen=True, slots=True)
class TrainingRound:
    """A round of training, and what came of it.

    Attributes:
        before: what the drafted head was worth on held-out sequences, see `HeadAgreement.worth`.
        after: the same of the head that is drafted from now on.
        is_new: whether that is another one.
    """

    before: float
    after: float
    is_new: bool


class RecentExamples:
    """The latest sequences, within so many bytes of states; see `Examples`.

    Args:
        max_bytes: of states that are held.
        given: sequences that are there from the start.
    """

    def __init__(self, max_bytes: int, given: Iterable[Example] = ()) -> None:
        self._max_bytes = max_bytes
        self._held = deque(given)
        self._bytes = sum(map(_bytes_of, self._held))

    def add(self, example: Example) -> None:
        """Take a sequence in, and drop the oldest ones beyond the most."""
        self._held.append(example)
        self._bytes += _bytes_of(example)
        while self._bytes > self._max_bytes and len(self._held) > 1:
            self._bytes -= _bytes_of(self._held.popleft())

    def copy(self) -> "RecentExamples":
        """Return the sequences of this moment."""
        return RecentExamples(self._max_bytes, self._held)

    def __len__(self) -> int:
        return len(self._held)

    def lengths(self) -> NDArray[np.int64]:
        """See `Examples.lengths`."""
        return np.array([len(each.tokens) for each in self._held], np.int64)

    def __getitem__(self, number: int) -> Example:
        return self._held[number]


class HeadLearner:
    """Trains a head on sequences that come, in rounds.

    Args:
        head: in float32; trained in place.
        teaching: the target.
        first: weights of the head as it was given, which are gone back to where nothing that was
            learned predicts more; `None` where that is `head` itself.
        max_bytes: of sequences that are held.
        share: of the time, from 0 to 1: it sleeps for the rest.
        seed: of the order of sequences.
        new_tokens: that must come before a round.
        least_judging: tokens to predict, held out, below which there is no round.
    """

    def __init__(  # noqa: PLR0913  (the last five are options)
        self,
        head: Eagle3Head,
        teaching: Teaching,
        first: dict[str, torch.Tensor] | None = None,
        *,
        max_bytes: int,
        share: float = 1.0,
        seed: int = 0,
        new_tokens: int = _NEW_TOKENS,
        least_judging: int = _LEAST_JUDGING,
    ) -> None:
        self.head = head
        self._teaching = teaching
        self._served = weights_of(head)
        self._first = self._served if first is None else first
        judged = int(_JUDGED_SHARE * max_bytes)
        self._taught, self._judging = RecentExamples(max_bytes - judged), RecentExamples(judged)
        self._share = share
        self._seed = seed
        self._wanted_tokens, self._wanted_places = new_tokens, least_judging
        self._count = self._new_tokens = self._places = 0
        self._has_ended = False
        self._changed = Condition()

    def take(self, example: Example) -> None:
        """Take in a sequence; from any thread."""
        with self._changed:
            self._count += 1
            if self._count % _HELD_OUT:
                self._taught.add(example)
                self._new_tokens += len(example.tokens) - example.num_prompt
            else:
                self._judging.add(example)
                self._places += len(example.tokens) - example.num_prompt
            self._changed.notify()

    def end(self) -> None:
        """Let `rounds` end; from any thread."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def rounds(self) -> Iterator[TrainingRound]:
        """Yield rounds, each once enough has come for it, until `end` is called."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended or self._is_due())
                if self._has_ended:
                    return
                taught, judging = self._taught.copy(), self._judging.copy()
                self._new_tokens = 0
            self._train(taught)
            if self._has_ended:
                return
            yield self._judge(judging)

    def _is_due(self) -> bool:
        return self._new_tokens >= self._wanted_tokens and self._places >= self._wanted_places

    def _train(self, taught: RecentExamples) -> None:
        num_steps = math.ceil(_TIMES * int(taught.lengths().sum()) / BATCH_TOKENS)
        num_steps = min(num_steps, _MOST_STEPS)
        num_done, begun = 0, time.perf_counter()

        def on_step(_: float, loss: float) -> bool:
            nonlocal num_done, begun
            num_done += 1
            self._rest(time.perf_counter() - begun)
            begun = time.perf_counter()
            return num_done < num_steps and math.isfinite(loss) and not self._has_ended

        self._seed += 1
        trainer = HeadTrainer(self.head, self._teaching, taught, self._seed)
        trainer.train(_STAGE, math.inf, on_step)

    def _judge(self, judging: RecentExamples) -> TrainingRound:
        """Let the best of what is drafted, what was learned and what was given be drafted."""
        learned = weights_of(self.head)
        before = self._worth(self._served, judging)
        found = [(before, self._served), (self._worth(learned, judging), learned)]
        if self._first is not self._served:
            found.append((self._worth(self._first, judging), self._first))
        after, best = max(found, key=lambda each: each[0])
        is_new = best is not self._served
        self._served = best
        self.head.load_state_dict(best)
        return TrainingRound(before, after, is_new)

    def _worth(self, weights: dict[str, torch.Tensor], judging: RecentExamples) -> float:
        begun = time.perf_counter()
        self.head.load_state_dict(weights)
        worth = agreement(self.head, self._teaching, judging).worth
        self._rest(time.perf_counter() - begun)
        return worth if all(bool(each.isfinite().all()) for each in weights.values()) else -1.0

    def _rest(self, seconds: float) -> None:
        """Sleep after so many seconds of work, or until the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, timeout=seconds * (1 / self._share - 1))


class _Kept:
    """The head that a learner goes on with, and where it is written.

    Args:
        order: see `Order`.

    Attributes:
        head: as it was learned last, or as it was given.
        first: weights as given; `None` where nothing was learned before, or that is another head.
    """

    def __init__(self, order: Order) -> None:
        target = HeadTarget(**order.target)
        self._folder = Path(order.folder)
        given = load_head(Path(order.head), target)
        begun = load_head(self._folder, target) if is_head(self._folder) else given
        self.head = _eagle3(begun.head).float()
        first = _eagle3(given.head).float()
        fits = begun is not given and first.config == self.head.config
        self.first = weights_of(first) if fits else None
        self._origin = _with_training(begun.origin)

    def write(self) -> None:
        """Write the head, as a whole.

        Raises:
            HeadFileError: it cannot be written.
        """
        save_head(self._folder, deepcopy(self.head).bfloat16(), self._origin)


def main() -> None:
    """Learn for the process that started this one, until that ends or closes the stream."""
    order = Order(**json.loads(sys.argv[1]))
    with suppress(OSError):
        os.nice(order.niceness)
    torch.set_num_threads(1)
    try:
        _run(order, sys.stdin.buffer)
    except (DecoderError, OSError, SafetensorError, torch.OutOfMemoryError) as error:
        _tell({"error": str(error)})


def _run(order: Order, stream: IO[bytes]) -> None:
    messages = read_messages(stream)
    outer = next(messages, None)
    if outer is None:
        return
    kept = _Kept(order)
    embed = partial(functional.embedding, weight=outer["embedding"])
    learner = HeadLearner(
        kept.head,
        Teaching(embed, outer["rows"], outer.get("bias")),
        kept.first,
        max_bytes=order.max_bytes,
        share=order.share,
    )
    Thread(target=_feed, args=(learner, messages), daemon=True).start()
    for made in learner.rounds():
        if made.is_new:
            kept.write()
        _tell(asdict(made))


def _feed(learner: HeadLearner, messages: Iterator[dict[str, torch.Tensor]]) -> None:
    for sent in messages:
        learner.take(Example(sent["tokens"].numpy(), int(sent["num_prompt"]), sent["states"]))
    learner.end()


def _tell(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)  # noqa: T201  (read by the process that started this one)


def _eagle3(head: Any) -> Eagle3Head:
    if not isinstance(head, Eagle3Head):
        raise TypeError("only EAGLE-3 heads go on learning")
    return head


def _with_training(origin: HeadOrigin) -> HeadOrigin:
    names = [each for each in origin.trained_on if each != TRAINED_ONLINE]
    return replace(origin, trained_on=(*names, TRAINED_ONLINE))


def _bytes_of(example: Example) -> int:
    return example.states.numel() * example.states.element_size()


if __name__ == "__main__":
    main()
