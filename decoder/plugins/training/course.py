"""A whole training: it records texts, makes an initial head, then trains, evaluates and writes it.

Progress is saved in a working folder next to the head, so the same command resumes after an
interruption. Recording saves every batch, and training saves every tenth of a stage. Once training
has started, nothing more is recorded. Training with other options records more and starts over. A
complete training continues if it gets more minutes.
"""

import hashlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from decoder.errors import TeachingTextError
from decoder.model.pretrained import LanguageModel
from decoder.model.states import num_states
from decoder.observation import Watcher
from decoder.plugins.speculators.eagle import Eagle3Head
from decoder.plugins.speculators.head_files import HeadTarget, save_head
from decoder.plugins.speculators.head_folders import check_writable, folder_lock
from decoder.plugins.training.head_start import recorded_states, started_head
from decoder.plugins.training.head_trainer import STAGES, HeadTrainer, Teaching
from decoder.plugins.training.judging import HeadAgreement, agreement
from decoder.plugins.training.layer_check import check_last_layer
from decoder.plugins.training.lessons import Lesson, held_out
from decoder.plugins.training.options import CourseOptions
from decoder.plugins.training.staged_training import Checkpoint, StagedTraining
from decoder.plugins.training.taught_store import Example, TaughtStore
from decoder.plugins.training.teacher import BATCH, Teacher

LEAST_LESSONS: Final = 16
"""Fewest different prompts and outputs: with fewer, none can be held out and little is learned."""

LEAST_TOKENS: Final = 2_000
"""Fewest recorded tokens: with fewer, a head would learn the texts by heart."""

_POOL: Final = 512
"""Prompts that are sorted by length together, so that a batch holds prompts of similar length."""

_READ_TOKENS: Final = 8192
"""Most tokens of recorded texts in one batch, padding included."""

_MOST_JUDGING: Final = 48
_JUDGING_TOKENS: Final = 64
_AGAIN_TEMPERATURE: Final = 0.8
"""Temperature for further answers to a prompt; greedy decoding would repeat the first answer."""

_MOST_ANSWERS: Final = 8
"""Most answers to one prompt: each further answer adds less that is new."""

_RECORDING_SHARE: Final = 0.5

_LEAST_TRAINING_SHARE: Final = 0.5
"""Smallest share that training gets of the time after recording. If the option allows only a few
minutes, the whole run takes longer than that."""


@dataclass(frozen=True, slots=True)
class CourseOutcome:
    """The result of a training.

    Attributes:
        head: the trained head, on the CPU.
        before: how often the initial head predicted held-out tokens.
        after: how often the trained head predicts held-out tokens.
        num_taught: number of recorded tokens in outputs.
        num_own: number of these tokens that the target wrote.
        judging: held-out prompts.
    """

    head: Eagle3Head
    before: HeadAgreement
    after: HeadAgreement
    num_taught: int
    num_own: int
    judging: list[Lesson]

    def report(self) -> dict[str, Any]:
        """Return figures as plain values."""
        return {
            "taught_tokens": self.num_taught,
            "own_tokens": self.num_own,
            "held_out_prompts": len(self.judging),
            "before_training": self.before.report(),
            "after_training": self.after.report(),
        }


class Course:
    """Trains a head for a target.

    Args:
        language_model: the target.
        lessons: prompts, with recorded outputs if there are any.
        output: folder for the head; the working folder has the same name plus `.training`.
        options: options of the training.
        watcher: called with the progress.

    Raises:
        TeachingTextError: there are too few prompts and outputs.
        UnsupportedModelError: no head can be trained for the target.
        HeadFileError: the head cannot be written to the folder.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        lessons: Sequence[Lesson],
        output: Path,
        options: CourseOptions,
        watcher: Watcher,
    ) -> None:
        # A log may contain the same prompt and output ten thousand times.
        lessons = _distinct(lessons, lambda each: (*_asked(each), each.output.tobytes()))
        num_keys = len({lesson.key for lesson in lessons})
        if num_keys < LEAST_LESSONS:
            raise TeachingTextError(
                f"{num_keys} different prompts and outputs are too few to train a speculator: give "
                f"at least {LEAST_LESSONS}, better a few thousand"
            )
        check_writable(output.absolute())
        check_last_layer(language_model)
        self._language_model = language_model
        self._options = options
        self._watcher = watcher
        self._output = output.absolute()
        self._folder = self._output.with_name(self._output.name + ".training")
        self._states = recorded_states(num_states(language_model.model))
        self._taught, judging = held_out(lessons, options.held_out_share)
        self._judging = _distinct(judging, _asked)[:_MOST_JUDGING]
        self._target = HeadTarget.of(
            language_model.model, language_model.name, language_model.vocabulary
        )

    def run(self, trained_on: Sequence[str]) -> CourseOutcome:
        """Record texts, train and evaluate the head, and write it.

        Args:
            trained_on: names of the texts, for the head's file.

        Raises:
            TeachingTextError: too few tokens were recorded.
            TrainingError: the working folder cannot be written, or its recordings were made with
                other options.
            HeadFileError: the head cannot be written, or another process is training it.
        """
        with folder_lock(self._folder):
            return self._taught_head(trained_on)

    def _taught_head(self, trained_on: Sequence[str]) -> CourseOutcome:
        """Record texts, train and evaluate the head, and write it; see `run`."""
        store, judged = self._recorded()
        begun = time.perf_counter()
        tokens = self._drafted_tokens(store)
        teaching = Teaching.of(self._language_model, tokens)
        head = started_head(self._language_model, store, tokens)
        started = time.perf_counter()
        before = agreement(head, teaching, judged)
        judging_s = (1 + len(STAGES)) * (time.perf_counter() - started)
        training = StagedTraining(
            HeadTrainer(head, teaching, store, self._options.seed),
            lambda trained: agreement(trained, teaching, judged),
            before,
            self._checkpoint(store),
            self._watcher,
        )
        after = training.run(
            self._training_seconds(store, judged.seconds + started - begun + judging_s)
        )
        head = head.cpu()
        save_head(self._output, head.bfloat16(), self._target.origin(tuple(trained_on)))
        return CourseOutcome(
            head, before, after, store.num_tokens, store.num_own_tokens, self._judging
        )

    @property
    def _recording_seconds(self) -> float:
        """Most seconds that recording may take; training gets the rest."""
        return self._options.minutes * 60 * _RECORDING_SHARE

    def _training_seconds(self, store: TaughtStore, elsewhere: float) -> float:
        """Return the stages' seconds; `elsewhere` is time for neither stages nor recording."""
        left = self._options.minutes * 60 - min(store.seconds, self._recording_seconds)
        return max(left - elsewhere, left * _LEAST_TRAINING_SHARE)

    def _checkpoint(self, store: TaughtStore) -> Checkpoint:
        """Return the checkpoint of a training on the recorded texts."""
        options = self._options.model_dump(include=set(CourseOptions.model_fields))
        minutes = options.pop("minutes")  # more minutes continue the same training
        stamp = {"options": options, "recorded": store.num_shards}
        return Checkpoint(self._folder / "head.safetensors", stamp, minutes)

    def _stamp(self) -> dict[str, Any]:
        """Return the stamp that identifies the recordings."""
        return {
            "model": self._target.name,
            "weights": self._target.weights,
            "states": list(self._states),
            "seed": self._options.seed,
            "lessons": _digest_of(self._taught),
        }

    def _recorded(self) -> tuple[TaughtStore, TaughtStore]:
        """Record missing texts; return the training texts and the held-out texts."""
        stamp = self._stamp()
        store = TaughtStore(self._folder / "taught", stamp)
        judged = TaughtStore(self._folder / "judging", stamp)
        teacher = Teacher(self._language_model, self._states)
        if not len(judged):
            start = time.perf_counter()
            answered = self._judges(teacher)
            judged.add(answered, time.perf_counter() - start)
        if self._checkpoint(store).kept() is None:
            self._record(store, teacher)
        if store.num_tokens < LEAST_TOKENS:
            raise TeachingTextError(
                f"{store.num_tokens} tokens are too few to train a speculator: give more texts or "
                f"time, for at least {LEAST_TOKENS}, better for a few hundred thousand"
            )
        return store, judged

    def _judges(self, teacher: Teacher) -> list[Example]:
        """Let the target answer held-out prompts, and read held-out outputs of unknown prompts."""
        prompts = sorted((each.prompt for each in self._judging if not each.is_own), key=len)
        outputs = [
            replace(each, output=each.output[:_JUDGING_TOKENS])
            for each in self._judging
            if each.is_own
        ]
        answered = teacher.answer(prompts, _JUDGING_TOKENS) if prompts else []
        return [*answered, *(teacher.read(outputs) if outputs else [])]

    def _record(self, store: TaughtStore, teacher: Teacher) -> None:
        """Record until there are enough tokens, half of the time is over, or no texts are left."""
        options, seconds = self._options, self._recording_seconds
        texts = islice(self._read_batches(teacher), store.num_read, None)
        prompts = islice(self._asked_batches(teacher), store.num_shards - store.num_read, None)
        while store.num_tokens < options.tokens and store.seconds < seconds:
            start = time.perf_counter()
            is_own = store.num_own_tokens <= options.own_share * store.num_tokens
            batch = next(prompts if is_own else texts, None) or next(
                texts if is_own else prompts, None
            )
            if batch is None:
                return
            taught = batch()
            store.add(taught, time.perf_counter() - start)
            over = max(store.num_tokens / options.tokens, store.seconds / seconds)
            self._watcher("recording", min(over, 1.0), f"{store.num_tokens:,} tokens")

    def _read_batches(self, teacher: Teacher) -> "Iterator[_Batch]":
        """Yield calls that read the recorded outputs once, one call for each batch."""
        recorded = [each for each in self._taught if len(each.output)]
        for pool in _pools(recorded, self._options.seed):
            batch: list[Lesson] = []
            for lesson in sorted(pool, key=lambda each: len(each.prompt) + len(each.output)):
                length = len(lesson.prompt) + len(lesson.output)
                if batch and (len(batch) + 1) * length > _READ_TOKENS:
                    yield partial(teacher.read, batch)
                    batch = []
                batch.append(lesson)
            yield partial(teacher.read, batch)

    def _asked_batches(self, teacher: Teacher) -> "Iterator[_Batch]":
        """Yield calls that answer the prompts in batches: first greedily, then by sampling."""
        options, seed = self._options, self._options.seed
        prompts = [each for each in _distinct(self._taught, _asked) if not each.is_own]
        for again in range(_MOST_ANSWERS if prompts else 0):
            temperature = _AGAIN_TEMPERATURE if again else 0.0
            for pool in _pools(prompts, options.seed + again):
                ordered = sorted((each.prompt for each in pool), key=len)
                for start in range(0, len(ordered), BATCH):
                    asked = ordered[start : start + BATCH]
                    yield partial(teacher.answer, asked, options.max_new_tokens, temperature, seed)
                    seed += 1

    def _drafted_tokens(self, store: TaughtStore) -> torch.Tensor:
        """Return int64[C], ascending, the most frequent tokens of outputs."""
        counts = store.token_counts(self._target.vocab_size)
        counts[list(self._language_model.stop_ids)] += 1
        most = min(self._options.draft_vocabulary, self._target.vocab_size)
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:most]).copy())


_Batch = Callable[[], list[Example]]
"""A call that reads a batch of texts or answers a batch of prompts."""


def _asked(lesson: Lesson) -> tuple[bool, bytes]:
    """Return the identity of a prompt, or of an output whose prompt is unknown."""
    return lesson.is_own, (lesson.output if lesson.is_own else lesson.prompt).tobytes()


def _distinct(lessons: Sequence[Lesson], key: Callable[[Lesson], Hashable]) -> list[Lesson]:
    """Return one training example for each key, in the order of the keys."""
    return list({key(each): each for each in lessons}.values())


def _pools(lessons: Sequence[Lesson], seed: int) -> Iterator[list[Lesson]]:
    """Yield training examples in random order, a few hundred at a time."""
    order = np.random.default_rng(seed).permutation(len(lessons))
    for start in range(0, len(order), _POOL):
        yield [lessons[place] for place in order[start : start + _POOL]]


def _digest_of(lessons: Sequence[Lesson]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for lesson in lessons:
        digest.update(lesson.prompt.tobytes())
        digest.update(lesson.output.tobytes())
    return digest.hexdigest()
