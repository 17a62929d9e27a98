"""Training a head on recorded states: first on true states, then on its own outputs.

The loss is the cross-entropy against the target's own distribution over the tokens that the head
may draft. Unrolled, each place goes on from the head's own output for a few tokens, as it does in a
draft (EAGLE-3's training-time test, arXiv:2503.01840; the same in HASS, arXiv:2408.15766).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from decoder.model.pretrained import LanguageModel
from decoder.plugins.speculators.eagle import Eagle3Head, JoinedKeyValues, unrolled_mask
from decoder.plugins.training.taught_store import Example

BATCH_TOKENS: Final = 4096
"""Tokens of a step of training, padding included."""

_BETAS: Final = (0.9, 0.95)
_WEIGHT_DECAY: Final = 0.01
_LARGEST_GRADIENT: Final = 1.0
_BUCKET: Final = 512
"""Texts that are sorted by length together, so that little of a batch is padding."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training.

    Attributes:
        name: for people.
        depths: tokens that each place goes on for; 1 trains on true states alone.
        rate: highest rate of learning; it rises for a few steps and then falls as a cosine.
        noise: of the features, uniform, in their standard deviations.
        share: of the time for training.
        warm_up: steps in which the rate rises.
    """

    name: str
    depths: int
    rate: float
    noise: float
    share: float
    warm_up: int = 30


STAGES: Final = (
    Stage("on true states", 1, 8e-4, 0.1, 0.5),
    Stage("on its own outputs", 3, 4e-4, 0.0, 0.5),
)

_DEPTH_DECAY: Final = 0.8
"""Weight of each further token in the loss, as in EAGLE-3."""


@dataclass(frozen=True, slots=True, eq=False)
class LessonBatch:
    """Texts side by side; row t stands for the state at t and the token at t + 1.

    Attributes:
        tokens: int64[batch, rows + 1].
        features: float32[batch, rows, F], what the head takes.
        last: float32[batch, rows, d], what the target's last layer gave.
        counts: bool[batch, rows], whether the token at t + 1 is of an output.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    last: torch.Tensor
    counts: torch.Tensor


class Examples(Protocol):
    """Recorded texts, by number."""

    def __len__(self) -> int: ...

    def lengths(self) -> NDArray[np.int64]:
        """Return int64[texts], the tokens of each."""
        ...

    def __getitem__(self, number: int, /) -> Example: ...


class Teaching:
    """What training needs of a target: its embedding, and its output layer for drafted tokens.

    Args:
        embed: gives [..., d] for int64[...], tokens.
        rows: [C, d], of the output layer, for the tokens that are drafted.
        bias: [C], of that layer, if it has one.
        norm: between the last of the recorded states and the output layer, if that is not recorded
            behind it.
    """

    def __init__(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        rows: torch.Tensor,
        bias: torch.Tensor | None = None,
        norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._embed, self._norm = embed, norm or nn.Identity()
        self._rows, self._bias = rows.float(), None if bias is None else bias.float()

    @classmethod
    def of(cls, language_model: LanguageModel, tokens: torch.Tensor) -> Self:
        """Return those of a target whose last layer's states are recorded.

        Args:
            language_model: the target.
            tokens: int64[C], those that are drafted.
        """
        model: Any = language_model.model
        output = model.get_output_embeddings()
        rows = tokens.to(output.weight.device)
        bias = None if output.bias is None else output.bias.detach()[rows]
        embed, norm = model.get_input_embeddings(), model.base_model.norm
        return cls(embed, output.weight.detach()[rows], bias, norm)

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        return self._rows.device

    @torch.no_grad()
    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32[..., d]."""
        embedded: torch.Tensor = self._embed(tokens)
        return embedded.float()

    @torch.no_grad()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Return [..., C], the target's logits for the last of its recorded states."""
        return functional.linear(self._norm(last), self._rows, self._bias)


class HeadTrainer:
    """Trains a head; every step is one batch.

    Args:
        head: in float32, changed.
        teaching: the target.
        store: recorded texts.
        seed: of the order of texts and of the noise.
    """

    def __init__(
        self, head: Eagle3Head, teaching: Teaching, store: Examples, seed: int = 0
    ) -> None:
        self.head = head.to(teaching.device)
        self._teaching = teaching
        self._store = store
        self._width = len(head.config.states) * head.config.target_size
        self._random = np.random.default_rng(seed)
        self._noise = torch.Generator().manual_seed(seed)

    def train(
        self,
        stage: Stage,
        seconds: float,
        on_step: Callable[[float, float], bool],
        begun: float = 0.0,
    ) -> None:
        """Train for a stage, or for what is left of it.

        Args:
            stage: what to train on.
            seconds: that the whole stage takes.
            on_step: is told after each step how much of the stage is over, from 0 to 1, and the
                loss; training ends where it returns false.
            begun: how much of the stage was over before, from 0 to 1.
        """
        self.head.train()
        weights = [each for each in self.head.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(
            weights, lr=stage.rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY
        )
        start = time.perf_counter()
        for number, batch in enumerate(self._batches()):
            over = begun + (time.perf_counter() - start) / seconds
            if over >= 1:
                return
            for group in optimizer.param_groups:
                group["lr"] = _rate(stage, number, over)
            loss = self._loss(batch, stage)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.nn.utils.clip_grad_norm_(weights, _LARGEST_GRADIENT)
            optimizer.step()
            if not on_step(over, float(loss.detach())):
                return

    def _batches(self) -> Iterator[LessonBatch]:
        while True:
            order = self._random.permutation(len(self._store))
            for numbers in batches_of(order, self._store.lengths(), BATCH_TOKENS, self._random):
                batch = batch_of(
                    [self._store[number] for number in numbers],
                    self._width,
                    self.head.config.target_size,
                    self._teaching.device,
                )
                if places_at(batch.counts, 0).any():
                    yield batch

    def _loss(self, batch: LessonBatch, stage: Stage) -> torch.Tensor:
        """Return float32[], the cross-entropy over all depths of a stage."""
        features = batch.features
        if stage.noise:
            noise = torch.rand(features.shape, generator=self._noise).to(features.device) - 0.5
            features = features + 2 * stage.noise * features.std() * noise
        device = features.device.type
        with torch.autocast(device, torch.bfloat16):
            total = torch.zeros((), device=features.device)
            logits = self._teaching.logits(batch.last[batch.counts])
            wanted = logits.softmax(-1, dtype=torch.float32)
            numbers = batch.counts.flatten().cumsum(0).view(batch.counts.shape) - 1
            outputs = unrolled(self.head, self._teaching, batch.tokens, features, stage.depths)
            for depth, output in enumerate(outputs):
                rows = places_at(batch.counts, depth).nonzero(as_tuple=True)
                if not len(rows[0]):
                    break  # all outputs are shorter, and a mean of nothing is no number
                said = self.head.logits(output[rows])
                taught = wanted[numbers[rows[0], rows[1] + depth + 1]]
                total = total + _DEPTH_DECAY**depth * soft_cross_entropy(said, taught)
        return total


def soft_cross_entropy(said: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """Return float32[], the mean cross-entropy against distributions.

    As `torch.nn.functional.cross_entropy`, with half of its passes over memory.

    Args:
        said: [N, C], logits.
        taught: float32[N, C], probabilities.
    """
    loss: torch.Tensor = _SoftCrossEntropy.apply(said, taught)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, said: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        logs = said.log_softmax(-1, dtype=torch.float32)
        ctx.save_for_backward(logs, taught)
        ctx.kind = said.dtype
        return -torch.dot(logs.view(-1), taught.view(-1)) / len(said)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logs, taught = ctx.saved_tensors
        given = logs.exp_().sub_(taught).mul_(gradient / len(logs))
        return given.to(ctx.kind), None


def unrolled(
    head: Eagle3Head,
    teaching: Teaching,
    tokens: torch.Tensor,
    features: torch.Tensor,
    depths: int,
) -> Iterator[torch.Tensor]:
    """Yield [batch, rows, d] for each depth: the head's outputs where every place goes on.

    Args:
        head: whose they are.
        teaching: embeds tokens.
        tokens: int64[batch, rows + 1].
        features: [batch, rows, F].
        depths: how many.
    """
    rows = features.shape[1]
    positions = torch.arange(rows, device=features.device)[None].expand(len(tokens), -1)
    cache = [JoinedKeyValues() for _ in range(head.num_layers)]
    hidden = head.project(features)
    for depth in range(depths):
        following = torch.roll(tokens[:, 1:], -depth, dims=1)
        mask = unrolled_mask(rows, depth, features.device)
        hidden = head.step(teaching.embeddings(following), hidden, positions + depth, mask, cache)
        yield hidden


def weights_of(head: Eagle3Head) -> dict[str, torch.Tensor]:
    """Return a copy of a head's weights, which further steps leave as they are."""
    return {name: value.detach().clone() for name, value in head.state_dict().items()}


def places_at(counts: torch.Tensor, depth: int) -> torch.Tensor:
    """Return bool[batch, rows]: where the token that a depth predicts is known and of an output.

    Row t of depth k predicts the token at t + k + 2.
    """
    chosen = torch.zeros_like(counts)
    ahead = depth + 1
    if ahead < counts.shape[1]:
        chosen[:, :-ahead] = counts[:, ahead:]
    return chosen


def batch_of(
    examples: Sequence[Example], width: int, target_size: int, device: torch.device
) -> LessonBatch:
    """Lay texts side by side, the shorter ones padded behind their end."""
    rows = max(min(len(each.tokens) - 1, len(each.states)) for each in examples)
    tokens = torch.zeros(len(examples), rows + 1, dtype=torch.int64)
    features = torch.zeros(len(examples), rows, width)
    last = torch.zeros(len(examples), rows, target_size)
    counts = torch.zeros(len(examples), rows, dtype=torch.bool)
    for row, each in enumerate(examples):
        known = min(len(each.tokens) - 1, len(each.states))
        tokens[row, : known + 1] = torch.from_numpy(each.tokens[: known + 1].astype(np.int64))
        features[row, :known] = each.states[:known, :width]
        last[row, :known] = each.states[:known, width:]
        counts[row, max(each.num_prompt - 1, 0) : known] = True
    return LessonBatch(*(each.to(device) for each in (tokens, features, last, counts)))


def batches_of(
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    max_tokens: int,
    random: np.random.Generator,
) -> list[list[int]]:
    """Return texts in batches of similar lengths, in random order.

    Args:
        order: int64[texts], the texts.
        lengths: int64[all texts], tokens of each.
        max_tokens: of a batch, padding included; a longer text is a batch by itself.
        random: puts the batches in order.
    """
    found: list[list[int]] = []
    for start in range(0, len(order), _BUCKET):
        part = order[start : start + _BUCKET]
        current: list[int] = []
        for number in part[np.argsort(lengths[part], kind="stable")].tolist():
            if current and (len(current) + 1) * lengths[number] > max_tokens:
                found.append(current)
                current = []
            current.append(number)
        found.append(current)
    return [found[place] for place in random.permutation(len(found))]


def _rate(stage: Stage, step: int, over: float) -> float:
    """Return the rate of a step; `over` is the part of the stage that is over, from 0 to 1."""
    risen = min(1.0, (step + 1) / stage.warm_up)
    return stage.rate * risen * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * over)))
