"""Training a head on recorded states: first on the target's states, then on the head's own outputs.

The loss is the cross-entropy against the target's distribution over the tokens that the head may
draft. In the second stage, each position continues from the head's own output for a few tokens, as
in a draft (EAGLE-3's training-time test, arXiv:2503.01840; the same in HASS, arXiv:2408.15766).
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
"""Most tokens in a batch, padding included; each training step takes one batch."""

_BETAS: Final = (0.9, 0.95)
_WEIGHT_DECAY: Final = 0.01
_LARGEST_GRADIENT: Final = 1.0
_BUCKET: Final = 512
"""Texts that are sorted by length together, which keeps the padding of a batch small."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the training.

    Attributes:
        name: name in messages.
        depths: number of tokens that each position predicts; 1 trains only on the target's states.
        rate: highest learning rate; the rate rises for a few steps and then falls as a cosine.
        noise: largest uniform noise on the features, in standard deviations of the features.
        share: share of the training time.
        warm_up: number of steps in which the learning rate rises.
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
"""Factor for the loss of each further token, as in EAGLE-3."""


@dataclass(frozen=True, slots=True, eq=False)
class LessonBatch:
    """A batch of texts; row t stands for the state at t and the token at t + 1.

    Attributes:
        tokens: int64[batch, rows + 1], the tokens.
        features: float32[batch, rows, F], the states that the head reads.
        last: float32[batch, rows, d], the last recorded state, from the target's last layer.
        counts: bool[batch, rows], whether the token at t + 1 belongs to an output.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    last: torch.Tensor
    counts: torch.Tensor


class Examples(Protocol):
    """Recorded texts, by number."""

    def __len__(self) -> int: ...

    def lengths(self) -> NDArray[np.int64]:
        """Return int64[texts], the number of tokens in each text."""
        ...

    def __getitem__(self, number: int, /) -> Example: ...


class Teaching:
    """The parts of a target that training needs: its embedding and rows of its output layer.

    Args:
        embed: returns embeddings [..., d] for tokens int64[...].
        rows: [C, d], the rows of the output layer for the tokens that the head may draft.
        bias: [C], the bias of these rows, if the output layer has one.
        norm: the norm before the output layer; leave it out if the last recorded state is already
            normalised.
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
        """Return the parts of a target whose last recorded state is the output of its last layer.

        Args:
            language_model: the target.
            tokens: int64[C], the tokens that the head may draft.
        """
        model: Any = language_model.model
        output = model.get_output_embeddings()
        rows = tokens.to(output.weight.device)
        bias = None if output.bias is None else output.bias.detach()[rows]
        embed, norm = model.get_input_embeddings(), model.base_model.norm
        return cls(embed, output.weight.detach()[rows], bias, norm)

    @property
    def device(self) -> torch.device:
        """Device of the target."""
        return self._rows.device

    @torch.no_grad()
    def embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32[..., d], the embeddings of tokens."""
        embedded: torch.Tensor = self._embed(tokens)
        return embedded.float()

    @torch.no_grad()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Return [..., C], the target's logits from its last recorded state."""
        return functional.linear(self._norm(last), self._rows, self._bias)


class HeadTrainer:
    """Trains a head; every step is one batch.

    Args:
        head: head in float32; training changes it.
        teaching: parts of the target.
        store: recorded texts.
        seed: seed for the order of texts and for the noise.
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
        """Train for a stage, or for the rest of it.

        Args:
            stage: the stage.
            seconds: duration of the whole stage.
            on_step: called after each step with the finished part of the stage, from 0 to 1, and
                the loss; training ends if it returns false.
            begun: part of the stage that was already finished, from 0 to 1.
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
        """Return float32[], the weighted sum of the cross-entropies at all depths of a stage."""
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
                    break  # all outputs are shorter; the mean would be NaN
                said = self.head.logits(output[rows])
                taught = wanted[numbers[rows[0], rows[1] + depth + 1]]
                total = total + _DEPTH_DECAY**depth * soft_cross_entropy(said, taught)
        return total


def soft_cross_entropy(said: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """Return float32[], the mean cross-entropy against target distributions.

    It equals `torch.nn.functional.cross_entropy`, but passes over memory half as often.

    Args:
        said: [N, C], the head's logits.
        taught: float32[N, C], the target's probabilities.
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
    """Yield the head's outputs for each depth, [batch, rows, d], continued from every position.

    Args:
        head: the head.
        teaching: parts of the target, which embed the tokens.
        tokens: int64[batch, rows + 1], the tokens.
        features: [batch, rows, F], the states that the head reads.
        depths: number of depths.
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
    """Return a copy of a head's weights, which later training steps do not change."""
    return {name: value.detach().clone() for name, value in head.state_dict().items()}


def places_at(counts: torch.Tensor, depth: int) -> torch.Tensor:
    """Return bool[batch, rows]: whether the predicted token is known and belongs to an output.

    Row t at depth k predicts the token at t + k + 2.
    """
    chosen = torch.zeros_like(counts)
    ahead = depth + 1
    if ahead < counts.shape[1]:
        chosen[:, :-ahead] = counts[:, ahead:]
    return chosen


def batch_of(
    examples: Sequence[Example], width: int, target_size: int, device: torch.device
) -> LessonBatch:
    """Return texts as one batch; shorter texts are padded at the end."""
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
    """Return batches of texts with similar lengths, in random order.

    Args:
        order: int64[texts], numbers of the texts.
        lengths: int64[all texts], number of tokens in each text.
        max_tokens: most tokens in a batch, padding included; a longer text is a batch by itself.
        random: shuffles the batches.
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
    """Return the learning rate of a step; `over` is the finished part of the stage, from 0 to 1."""
    risen = min(1.0, (step + 1) / stage.warm_up)
    return stage.rate * risen * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * over)))
