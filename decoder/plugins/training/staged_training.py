"""The stages of a training, split into parts; an interrupted training resumes at the next part."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from decoder.observation import Watcher
from decoder.plugins.speculators.eagle import Eagle3Head
from decoder.plugins.training.head_trainer import STAGES, HeadTrainer, Stage, weights_of
from decoder.plugins.training.judging import HeadAgreement
from decoder.plugins.training.taught_store import write_tensors

_PARTS: Final = 10
"""Number of parts in a stage; after each, the head is evaluated and the best weights are saved."""

_PATIENCE: Final = 3
"""Number of parts in a row without an improvement after which the stage ends."""

_LEAST_SECONDS: Final = 1.0
"""Shortest duration of a stage, which leaves time for a few steps."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """The saved progress of a training.

    Attributes:
        weights: the best weights so far.
        parts: number of finished parts, over all stages.
        minutes: the training's option `minutes`.
    """

    weights: dict[str, torch.Tensor]
    parts: int
    minutes: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The file with the progress of a training.

    Attributes:
        path: path of the file.
        stamp: options and recordings of the training; a file with another stamp is not resumed.
        minutes: the training's option `minutes`.
    """

    path: Path
    stamp: dict[str, Any]
    minutes: float

    def keep(self, weights: dict[str, torch.Tensor], parts: int) -> None:
        """Write the file.

        Raises:
            TrainingError: the file cannot be written.
        """
        said = {"of": self._said, "parts": str(parts), "minutes": str(self.minutes)}
        write_tensors(self.path, weights, said)

    def kept(self) -> _Progress | None:
        """Return the saved progress; `None` if there is no intact file of this training."""
        try:
            with safe_open(self.path, framework="pt") as file:
                said = file.metadata() or {}
            if said.get("of") != self._said:
                return None
            return _Progress(load_file(self.path), int(said["parts"]), float(said["minutes"]))
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    @property
    def _said(self) -> str:
        return json.dumps(self.stamp, sort_keys=True)


class StagedTraining:
    """The stages of a training, each split into parts; training can resume after each part.

    Args:
        trainer: trainer of the head.
        judge: returns how often a head predicts held-out tokens.
        before: result of `judge` for the initial head.
        checkpoint: file for the best weights and the progress.
        watcher: called with the progress.
    """

    def __init__(
        self,
        trainer: HeadTrainer,
        judge: Callable[[Eagle3Head], HeadAgreement],
        before: HeadAgreement,
        checkpoint: Checkpoint,
        watcher: Watcher,
    ) -> None:
        self._trainer, self._judge_of, self._head = trainer, judge, trainer.head
        self._checkpoint, self._watcher = checkpoint, watcher
        self._best, self._best_weights = before, weights_of(self._head)
        self._parts = 0

    def run(self, seconds: float) -> HeadAgreement:
        """Train, put the best weights into the head, and return how often they predict tokens.

        Args:
            seconds: duration of all stages, counted from the first part.

        Raises:
            TrainingError: the checkpoint cannot be written.
        """
        self._resume(seconds)
        self._keep()
        for number, stage in enumerate(STAGES):
            begin, end = number * _PARTS, (number + 1) * _PARTS
            if self._parts < end:
                self._train(stage, max(seconds * stage.share, _LEAST_SECONDS), begin)
                self._head.load_state_dict(self._best_weights)
                self._parts = end
                self._keep()
        return self._best

    def _resume(self, seconds: float) -> None:
        """Resume from a matching checkpoint; after a complete one, more minutes add parts."""
        kept = self._checkpoint.kept()
        if kept is None or _shapes_of(kept.weights) != _shapes_of(self._best_weights):
            return
        self._head.load_state_dict(kept.weights)
        self._best, self._best_weights = self._judge_of(self._head), weights_of(self._head)
        self._parts, added = kept.parts, 60 * (self._checkpoint.minutes - kept.minutes)
        if kept.parts == len(STAGES) * _PARTS and added > 0:
            again = math.ceil(added / (seconds * STAGES[-1].share) * _PARTS)
            self._parts -= min(again, _PARTS)

    def _train(self, stage: Stage, seconds: float, begin: int) -> None:
        """Train for the rest of a stage; `begin` is the number of parts in the stages before it."""
        misses = 0

        def on_step(over: float, loss: float) -> bool:
            nonlocal misses
            self._watcher(f"training {stage.name}", over, f"loss {loss:.3f}")
            parts = begin + int(over * _PARTS)
            if parts <= self._parts:
                return True
            misses = 0 if self._judge() else misses + 1
            self._parts = parts
            self._keep()
            return misses < _PATIENCE

        self._trainer.train(stage, seconds, on_step, (self._parts - begin) / _PARTS)
        self._judge()

    def _judge(self) -> bool:
        """Evaluate the head; if it is the best so far, copy its weights and return true."""
        found = self._judge_of(self._head)
        self._head.train()
        if found.worth <= self._best.worth:
            return False
        self._best, self._best_weights = found, weights_of(self._head)
        return True

    def _keep(self) -> None:
        self._checkpoint.keep(self._best_weights, self._parts)


def _shapes_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in weights.items()}
