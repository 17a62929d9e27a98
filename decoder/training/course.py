"""A whole training: what is taught is recorded, a head is begun, trained, judged and kept.

Everything that takes long is kept in a working folder next to the head, so that a training that is
interrupted goes on where it was: recordings by the file, a stage of training by the minute. Once
training has begun, no more is recorded, unless other options ask for it: then training starts over.
One that has ended goes on, too, where it is given more minutes.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from decoder.errors import TeachingTextError, TrainingError
from decoder.model.pretrained import LanguageModel
from decoder.model.states import num_states
from decoder.observation import Watcher
from decoder.speculators.eagle import Eagle3Head
from decoder.speculators.head_files import HeadTarget, save_head
from decoder.speculators.head_folders import check_writable, folder_lock
from decoder.training.head_start import recorded_states, started_head
from decoder.training.head_trainer import STAGES, HeadTrainer, Stage, TeachingModel, weights_of
from decoder.training.judging import Agreement, agreement
from decoder.training.layer_check import check_last_layer
from decoder.training.lessons import Lesson, held_out
from decoder.training.options import CourseOptions
from decoder.training.taught_store import TaughtStore
from decoder.training.teacher import Taught, Teacher
from indexer.errors import reason_of
from retriever.drafter import TokenIds

LEAST_LESSONS: Final = 16
"""Different prompts and outputs below which there is nothing to hold out and little to learn."""

LEAST_TOKENS: Final = 2_000
"""Recorded tokens below which a head would learn texts by heart."""

_BATCH: Final = 64
"""Prompts that are answered side by side: the weights are read once for all of them."""

_POOL: Final = 512
"""Prompts that are sorted by length together, so that batches hold similar ones."""

_READ_TOKENS: Final = 8192
"""Tokens of recorded texts that are read in one pass, padding included."""

_MOST_JUDGING: Final = 48
_JUDGING_TOKENS: Final = 64
_AGAIN_TEMPERATURE: Final = 0.8
"""Of answers to prompts that were answered before: greedily the same would come again."""

_MOST_ANSWERS: Final = 8
"""Answers to one prompt: more of them say less and less that is new."""

_RECORDING_SHARE: Final = 0.5
_JUDGED_TIMES: Final = 10
_PATIENCE: Final = 3
_KEPT_EVERY_S: Final = 60.0

_LEAST_TRAINING_SHARE: Final = 0.5
"""Of what is left behind recording: a short training still trains, and takes longer then."""

_LEAST_SECONDS: Final = 1.0
"""Of a stage: a few steps at least."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training made.

    Attributes:
        head: trained, on the CPU.
        before: how often it foretold held-out tokens before its first step.
        after: the same at the end.
        num_taught: recorded tokens of outputs.
        num_own: those that the target wrote.
        judging: prompts that were held out.
    """

    head: Eagle3Head
    before: Agreement
    after: Agreement
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
    """Teaches a head for a target.

    Args:
        language_model: the target.
        lessons: prompts, and outputs where there are any.
        output: folder for the head; the working folder has `.training` behind its name.
        options: how.
        watcher: is told of the progress.

    Raises:
        TeachingTextError: there are too few lessons.
        UnsupportedModelError: no head can be trained for the target.
        TrainingError: the head could not be written in the end.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        lessons: Sequence[Lesson],
        output: Path,
        options: CourseOptions,
        watcher: Watcher,
    ) -> None:
        lessons = _distinct(lessons)
        num_keys = len({lesson.key for lesson in lessons})
        if num_keys < LEAST_LESSONS:
            raise TeachingTextError(
                f"{num_keys} different prompts and outputs are too few to teach a speculator: give "
                f"at least {LEAST_LESSONS}, better some thousands"
            )
        check_writable(output.absolute())
        check_last_layer(language_model)
        self._language_model = language_model
        self._options = options
        self._watcher = watcher
        self._output = output.absolute()
        self._folder = self._output.with_name(self._output.name + ".training")
        self._states = recorded_states(num_states(language_model.model))
        self._taught, judging = _divided(lessons, options.held_out_share)
        self._judging = _unique(judging)[:_MOST_JUDGING]
        self._target = HeadTarget.of(
            language_model.model, language_model.name, language_model.vocabulary
        )

    def run(self, trained_on: Sequence[str]) -> Outcome:
        """Record, train and judge; write the head.

        Args:
            trained_on: what the texts are, for the head's file.

        Raises:
            TeachingTextError: what was recorded is too little to learn from.
            TrainingError: the disk refuses, or holds what other options recorded.
            HeadFileError: the head cannot be written, or is being trained by another process.
        """
        with folder_lock(self._folder):
            return self._taught_head(trained_on)

    def _taught_head(self, trained_on: Sequence[str]) -> Outcome:
        """Record, train and judge; see `run`."""
        store, judged = self._recorded()
        begun = time.perf_counter()
        tokens = self._drafted_tokens(store)
        teaching = TeachingModel(self._language_model, tokens)
        head = started_head(self._language_model, store, tokens)
        started_s = time.perf_counter() - begun
        before = agreement(head, teaching, judged)
        judging_s = time.perf_counter() - begun - started_s
        allowance = _Allowance(
            self._options.minutes * 60 - min(store.seconds, self._recording_seconds()),
            judged.seconds + started_s + (1 + len(STAGES)) * judging_s,
        )
        after = _Training(
            HeadTrainer(head, teaching, store, self._options.seed),
            lambda trained: agreement(trained, teaching, judged),
            self._progress(store),
            allowance,
            before,
            self._watcher,
        ).run()
        head = head.cpu()
        save_head(self._output, head.bfloat16(), self._target.origin(tuple(trained_on)))
        return Outcome(head, before, after, store.num_tokens, store.num_own_tokens, self._judging)

    def _recording_seconds(self) -> float:
        """Return the most that recording may take; training has all that is left."""
        return self._options.minutes * 60 * _RECORDING_SHARE

    def _progress(self, store: TaughtStore) -> "_Progress":
        """Return the progress of a training on what is recorded."""
        options = asdict(self._options)
        del options["minutes"]  # more of them are more of the same training
        stamp = {"options": options, "recorded": store.num_shards}
        return _Progress(self._folder / "head.safetensors", stamp)

    def _stamp(self) -> dict[str, Any]:
        """Return what recordings are of."""
        return {
            "model": self._target.name,
            "weights": self._target.weights,
            "states": list(self._states),
            "seed": self._options.seed,
            "lessons": _digest_of(self._taught),
        }

    def _recorded(self) -> tuple[TaughtStore, TaughtStore]:
        """Record what is missing; return texts and judges."""
        stamp = self._stamp()
        store = TaughtStore(self._folder / "taught", stamp)
        judged = TaughtStore(self._folder / "judging", stamp)
        teacher = Teacher(self._language_model, self._states)
        if not len(judged):
            start = time.perf_counter()
            answered = self._judges(teacher)
            judged.add(answered, time.perf_counter() - start)
        if self._progress(store).kept() is None:
            self._record(store, teacher)
        if store.num_tokens < LEAST_TOKENS:
            raise TeachingTextError(
                f"{store.num_tokens} tokens are too little to teach a speculator: give more texts "
                f"or time, for {LEAST_TOKENS} at least, better for some hundred thousand"
            )
        return store, judged

    def _judges(self, teacher: Teacher) -> list[Taught]:
        """Have held-out prompts answered, and outputs read whose prompts are not known."""
        prompts = sorted((each.prompt for each in self._judging if not each.is_own), key=len)
        outputs = [
            replace(each, output=each.output[:_JUDGING_TOKENS])
            for each in self._judging
            if each.is_own
        ]
        answered = teacher.answer(prompts, _JUDGING_TOKENS) if prompts else []
        return [*answered, *(teacher.read(outputs) if outputs else [])]

    def _record(self, store: TaughtStore, teacher: Teacher) -> None:
        """Record until there is enough, half of the time is over, or all is recorded."""
        options = self._options
        seconds = self._recording_seconds()
        generator = torch.Generator().manual_seed(options.seed + store.num_shards)
        texts = _behind(self._read_batches(), store.num_read)
        prompts = _behind(self._asked_batches(), store.num_shards - store.num_read)
        while store.num_tokens < options.num_tokens and store.seconds < seconds:
            start = time.perf_counter()
            is_own = store.num_own_tokens <= options.own_share * store.num_tokens
            batch = next(prompts if is_own else texts, None) or next(
                texts if is_own else prompts, None
            )
            if batch is None:
                return
            taught = self._taught_by(teacher, batch, generator)
            store.add(taught, time.perf_counter() - start)
            over = max(store.num_tokens / options.num_tokens, store.seconds / seconds)
            self._watcher("recording", min(over, 1.0), f"{store.num_tokens:,} tokens")

    def _taught_by(
        self, teacher: Teacher, batch: "list[Lesson] | _Asked", generator: torch.Generator
    ) -> list[Taught]:
        if isinstance(batch, _Asked):
            most = self._options.max_new_tokens
            return teacher.answer(batch.prompts, most, batch.temperature, generator)
        return teacher.read(batch)

    def _read_batches(self) -> Iterator[list[Lesson]]:
        """Yield recorded outputs, batch by batch, once."""
        recorded = [each for each in self._taught if len(each.output)]
        for pool in _pools(recorded, self._options.seed):
            batch: list[Lesson] = []
            for lesson in sorted(pool, key=lambda each: len(each.prompt) + len(each.output)):
                length = len(lesson.prompt) + len(lesson.output)
                if batch and (len(batch) + 1) * length > _READ_TOKENS:
                    yield batch
                    batch = []
                batch.append(lesson)
            yield batch

    def _asked_batches(self) -> Iterator["_Asked"]:
        """Yield prompts that the target answers: greedily, and then again at random."""
        prompts = [each for each in _unique(self._taught) if not each.is_own]
        for again in range(_MOST_ANSWERS if prompts else 0):
            for pool in _pools(prompts, self._options.seed + again):
                ordered = sorted((each.prompt for each in pool), key=len)
                for start in range(0, len(ordered), _BATCH):
                    yield _Asked(
                        ordered[start : start + _BATCH], _AGAIN_TEMPERATURE if again else 0.0
                    )

    def _drafted_tokens(self, store: TaughtStore) -> torch.Tensor:
        """Return int64[C], rising, the tokens that were written most often."""
        counts = store.token_counts(self._target.vocab_size)
        counts[list(self._language_model.stop_ids)] += 1
        most = min(self._options.num_columns, self._target.vocab_size)
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:most]).copy())


@dataclass(frozen=True, slots=True)
class _Asked:
    """Prompts to be answered side by side."""

    prompts: list[TokenIds]
    temperature: float


@dataclass(frozen=True, slots=True)
class _Allowance:
    """What a training may take, in seconds.

    Attributes:
        given: for all that is done behind recording. It is the same each time that a training is
            gone on with, unless that is given other minutes.
        elsewhere: what of that is no stage takes this time: answers to judge by, the start of the
            head, and judging it then and behind each stage. Within a stage judging is its time.
    """

    given: float
    elsewhere: float

    @property
    def stages(self) -> float:
        """What is left for the stages."""
        return max(self.given - self.elsewhere, self.given * _LEAST_TRAINING_SHARE)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Where a training was interrupted.

    Attributes:
        weights: the best so far.
        stage: the number of the stage that is under way.
        over: how much of it is over, from 0 to 1.
        seconds: that were given; see `_Allowance`.
    """

    weights: dict[str, torch.Tensor]
    stage: int
    over: float
    seconds: float


class _Progress:
    """A file of what a training has come to.

    Args:
        path: of the file.
        stamp: what the training is of; what another one kept is not gone on with.
    """

    def __init__(self, path: Path, stamp: dict[str, Any]) -> None:
        self._path = path
        self._stamp = json.dumps(stamp, sort_keys=True)

    def keep(self, kept: _Kept) -> None:
        """Write the file as a whole.

        Raises:
            TrainingError: the disk refuses.
        """
        said = {
            "of": self._stamp,
            "stage": str(kept.stage),
            "over": str(kept.over),
            "seconds": str(kept.seconds),
        }
        partial = self._path.with_suffix(".partial")
        try:
            save_file(kept.weights, partial, said)
            partial.replace(self._path)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"{self._path.parent} cannot be written ({reason_of(error)}): make room there, "
                "and run the same command again"
            ) from error

    def kept(self) -> _Kept | None:
        """Return what was kept; `None` if nothing was, it is damaged or of another training."""
        try:
            with safe_open(self._path, framework="pt") as file:
                said = file.metadata() or {}
            if said.get("of") != self._stamp:
                return None
            weights = load_file(self._path)
            return _Kept(weights, int(said["stage"]), float(said["over"]), float(said["seconds"]))
        except (OSError, SafetensorError, KeyError, ValueError):
            return None


class _Training:
    """The stages of a training, which can be gone on with.

    Args:
        trainer: of the head.
        judge: says how often the head foretells held-out tokens.
        progress: where the best weights are kept, and how far training is.
        allowance: the time for all stages.
        before: what the judge said of the head as it is.
        watcher: is told of the progress.
    """

    def __init__(  # noqa: PLR0913, PLR0917  each is another thing
        self,
        trainer: HeadTrainer,
        judge: Callable[[Eagle3Head], Agreement],
        progress: _Progress,
        allowance: _Allowance,
        before: Agreement,
        watcher: Watcher,
    ) -> None:
        self._trainer, self._judge_of = trainer, judge
        self._progress, self._allowance, self._watcher = progress, allowance, watcher
        self._head = trainer.head
        self._best, self._best_weights = before, weights_of(self._head)
        self._stage, self._over, self._misses = 0, 0.0, 0
        self._kept_at = 0.0

    def run(self) -> Agreement:
        """Train, keep the best weights, and return how often they foretold what came.

        Raises:
            TrainingError: the disk refuses.
        """
        self._resume()
        self._keep()
        try:
            for number in range(self._stage, len(STAGES)):
                self._train(STAGES[number])
                self._head.load_state_dict(self._best_weights)
                self._stage, self._over = number + 1, 0.0
                self._keep()
        except KeyboardInterrupt:
            self._keep()
            raise
        return self._best

    def _train(self, stage: Stage) -> None:
        begun = judged_at = self._over
        self._misses = 0

        def on_step(over: float, loss: float) -> bool:
            nonlocal judged_at
            self._over = begun + (1 - begun) * over
            self._watcher(f"training {stage.name}", self._over, f"loss {loss:.3f}")
            if time.perf_counter() - self._kept_at > _KEPT_EVERY_S:
                self._keep()
            if self._over - judged_at < 1 / _JUDGED_TIMES:
                return True
            judged_at = self._over
            return self._judge()

        seconds = max(self._allowance.stages * stage.share * (1 - begun), _LEAST_SECONDS)
        self._trainer.train(stage, seconds, on_step, begun)
        self._judge()

    def _judge(self) -> bool:
        """Judge the head and note the best weights; return whether to go on."""
        found = self._judge_of(self._head)
        self._head.train()
        self._misses += 1
        if found.worth > self._best.worth:
            self._best, self._best_weights, self._misses = found, weights_of(self._head), 0
        return self._misses < _PATIENCE

    def _keep(self) -> None:
        self._kept_at = time.perf_counter()
        given = self._allowance.given
        self._progress.keep(_Kept(self._best_weights, self._stage, self._over, given))

    def _resume(self) -> None:
        """Go on from what was kept, if that fits."""
        kept = self._progress.kept()
        if kept is None or _shapes_of(kept.weights) != _shapes_of(self._best_weights):
            return
        self._head.load_state_dict(kept.weights)
        self._stage, self._over = kept.stage, kept.over
        given = self._allowance.given
        if kept.stage == len(STAGES) and given > kept.seconds:
            self._stage = len(STAGES) - 1
            added = (given - kept.seconds) / (given * STAGES[-1].share)
            self._over = max(1 - added, 0.0)
        self._best, self._best_weights = self._judge_of(self._head), weights_of(self._head)


def _shapes_of(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in weights.items()}


def _divided(lessons: Sequence[Lesson], share: float) -> tuple[list[Lesson], list[Lesson]]:
    """Return the lessons to teach and those to judge by, of which there is at least one each."""
    taught, judging = held_out(lessons, share)
    if not taught or not judging:
        first = lessons[0].key
        judging = [lesson for lesson in lessons if lesson.key == first]
        taught = [lesson for lesson in lessons if lesson.key != first]
    return taught, judging


def _distinct(lessons: Sequence[Lesson]) -> list[Lesson]:
    """Return lessons without copies, in their order: a log may hold one ten thousand times."""
    found = {(each.prompt.tobytes(), each.output.tobytes(), each.is_own): each for each in lessons}
    return list(found.values())


def _unique(lessons: Sequence[Lesson]) -> list[Lesson]:
    """Return one lesson for each prompt, or for each output whose prompt is not known."""
    return list(
        {
            (each.is_own, (each.output if each.is_own else each.prompt).tobytes()): each
            for each in lessons
        }.values()
    )


def _pools(lessons: Sequence[Lesson], seed: int) -> Iterator[list[Lesson]]:
    """Yield lessons in random order, a few hundred at a time."""
    order = np.random.default_rng(seed).permutation(len(lessons))
    for start in range(0, len(order), _POOL):
        yield [lessons[place] for place in order[start : start + _POOL]]


def _behind(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Return the batches behind those that were recorded before."""
    for _ in range(count):
        next(batches, None)
    return batches


def _digest_of(lessons: Sequence[Lesson]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for lesson in lessons:
        digest.update(lesson.prompt.tobytes())
        digest.update(lesson.output.tobytes())
    return digest.hexdigest()
