"""A process that trains a head on the sequences of a running decoder, and keeps the best weights.

It receives the target's outer layers and finished sequences on its standard input. It trains at the
lowest priority, within a share of one core's time. When the head predicts held-out sequences
better, it writes the head; otherwise it restores the best weights. So the head follows the current
requests, as in online speculative decoding (Liu et al., 2024, arXiv:2310.07177). It learns the
target's own distribution on the target's own text, as in DistillSpec (arXiv:2310.08461).

Texts and states stay in memory. Only the head is written to disk.
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
"""Name of the training texts in the file of a head that was trained online."""

_STAGE: Final = Stage("while in use", depths=2, rate=2e-4, noise=0.0, share=1.0, warm_up=3)
"""A quarter of the learning rate of a new training, because the head is already good."""

_HELD_OUT: Final = 6
"""One sequence in this many is held out for evaluation."""

_JUDGED_SHARE: Final = 0.2
"""Share of the memory that is for held-out sequences."""

_LEAST_JUDGING: Final = 300
"""Fewest held-out tokens for an evaluation; with fewer, the head is not changed. With this many,
the share of predicted tokens is known to within 3%."""

_NEW_TOKENS: Final = 4096
"""Number of new tokens that a round needs. In rounds on the same tokens, the head would learn these
by heart."""

_TIMES: Final = 2
"""Most times that a round goes through all sequences."""

_MOST_STEPS: Final = 32
"""Most training steps in a round: with more, the head would change further between evaluations."""


@dataclass(frozen=True, slots=True)
class TrainingRound:
    """The outcome of a round of training.

    Attributes:
        before: `HeadAgreement.worth` of the head in use, on held-out sequences.
        after: `HeadAgreement.worth` of the head that is used from now on.
        is_new: whether the head in use has changed.
    """

    before: float
    after: float
    is_new: bool


class RecentExamples:
    """The latest sequences, within a limit on the bytes of their states; see `Examples`.

    Args:
        max_bytes: most bytes of stored states.
        given: initial sequences.
    """

    def __init__(self, max_bytes: int, given: Iterable[Example] = ()) -> None:
        self._max_bytes = max_bytes
        self._held = deque(given)
        self._bytes = sum(map(_bytes_of, self._held))

    def add(self, example: Example) -> None:
        """Add a sequence, and drop the oldest ones above the limit."""
        self._held.append(example)
        self._bytes += _bytes_of(example)
        while self._bytes > self._max_bytes and len(self._held) > 1:
            self._bytes -= _bytes_of(self._held.popleft())

    def copy(self) -> "RecentExamples":
        """Return a copy of the current sequences."""
        return RecentExamples(self._max_bytes, self._held)

    def __len__(self) -> int:
        return len(self._held)

    def lengths(self) -> NDArray[np.int64]:
        """See `Examples.lengths`."""
        return np.array([len(each.tokens) for each in self._held], np.int64)

    def __getitem__(self, number: int) -> Example:
        return self._held[number]


class HeadLearner:
    """Trains a head in rounds, on sequences as they arrive.

    Args:
        head: head in float32; it is trained in place.
        teaching: parts of the target.
        first: weights of the original head, which are restored if no learned weights predict more;
            `None` if `head` is the original head.
        max_bytes: most bytes of stored sequences.
        share: share of the time to work, from 0 to 1; it sleeps for the rest.
        seed: seed for the order of sequences.
        new_tokens: number of new tokens that a round needs.
        least_judging: number of held-out tokens that a round needs.
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
        """Add a sequence; callable from any thread."""
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
        """End `rounds`; callable from any thread."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def rounds(self) -> Iterator[TrainingRound]:
        """Train and yield a round whenever enough tokens have come, until `end` is called."""
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
        """Choose the best weights: the ones in use, the learned ones or the original ones."""
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
        """Sleep in proportion to the seconds of work, or until `end` is called."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, timeout=seconds * (1 / self._share - 1))


class _Kept:
    """The head that a learner trains, and the folder where it is written.

    Args:
        order: what to train; see `Order`.

    Attributes:
        head: the head that was learned last; the original head if none was learned.
        first: weights of the original head; `None` if nothing was learned before, or if the learned
            head has another shape.
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
        """Write the head.

        Raises:
            HeadFileError: the head cannot be written.
        """
        save_head(self._folder, deepcopy(self.head).bfloat16(), self._origin)


def main() -> None:
    """Train for the parent process, until it ends or closes the stream."""
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
        raise TypeError("only EAGLE-3 heads can be trained online")
    return head


def _with_training(origin: HeadOrigin) -> HeadOrigin:
    names = [each for each in origin.trained_on if each != TRAINED_ONLINE]
    return replace(origin, trained_on=(*names, TRAINED_ONLINE))


def _bytes_of(example: Example) -> int:
    return example.states.numel() * example.states.element_size()


if __name__ == "__main__":
    main()
