"""The stages of a training in parts, after each of which it can be gone on with."""

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
"""Parts of a stage: after each the head is judged, and the best weights are kept."""

_PATIENCE: Final = 3
"""Parts in a row that may bring nothing before the stage ends."""

_LEAST_SECONDS: Final = 1.0
"""Of a stage: a few steps at least."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far a training had come.

    Attributes:
        weights: the best so far.
        parts: of all stages that were over.
        minutes: of its options.
    """

    weights: dict[str, torch.Tensor]
    parts: int
    minutes: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The file of how far a training has come.

    Attributes:
        path: of the file.
        stamp: what the training is of; one of another stamp is not gone on with.
        minutes: of its options.
    """

    path: Path
    stamp: dict[str, Any]
    minutes: float

    def keep(self, weights: dict[str, torch.Tensor], parts: int) -> None:
        """Write the file.

        Raises:
            TrainingError: the disk refuses.
        """
        said = {"of": self._said, "parts": str(parts), "minutes": str(self.minutes)}
        write_tensors(self.path, weights, said)

    def kept(self) -> _Progress | None:
        """Return what was kept; `None` if nothing was, it is damaged or of another training."""
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
    """The stages of a training, each in parts, after which it can be gone on with.

    Args:
        trainer: of the head.
        judge: says how often the head predicts held-out tokens.
        before: what it says of the head as it is.
        checkpoint: where the best weights are kept, and how far training is.
        watcher: is told of the progress.
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
        """Train, leave the best weights in the head, and return how often they predicted what came.

        Args:
            seconds: for all stages, from the first part on.

        Raises:
            TrainingError: the disk refuses.
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
        """Go on from what was kept, if that fits: with the last parts again for more minutes."""
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
        """Train for what is left of a stage whose parts are counted from `begin`."""
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
        """Judge the head; return whether it is the best so far, whose weights are noted."""
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
