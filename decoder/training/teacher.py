"""The target as a teacher: it answers prompts many at a time, and its states are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from decoder.errors import TrainingError, UnsupportedModelError
from decoder.model.cache import TreeCache, num_seen
from decoder.model.compatibility import Capability, compatibility_of, position_limit
from decoder.model.pretrained import LanguageModel
from decoder.model.user_model import UserModel
from decoder.sampling.verification import draw
from decoder.training.lessons import Lesson
from retriever.drafter import TokenIds

_LEAST_BUSY: Final = 0.35
"""Share of a batch that is still answering below which it is ended: a pass over few rows takes as
long as one over many, and the answers that are cut are as good to learn from."""


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """A prompt and an output with the target's states.

    Attributes:
        tokens: int32[n], prompt and output.
        num_prompt: how many of them are the prompt's.
        states: bfloat16[m, F], the states at the first m tokens, side by side in the order of
            their numbers; m is n, or n - 1 where the last token was not read any more.
        is_own: whether the target wrote the output.
        was_asked: whether it wrote it now, and not before.
    """

    tokens: TokenIds
    num_prompt: int
    states: torch.Tensor
    is_own: bool
    was_asked: bool = False


class Teacher:
    """A target that answers prompts and reads texts in batches.

    Args:
        language_model: the target.
        states: numbers of the states to keep, see `decoder.model.states`.

    Attributes:
        states: the numbers, in the order in which states stand side by side.
        state_size: numbers of one state at one token.

    Raises:
        UnsupportedModelError: the model's layers cannot be found, or it takes no masks.
    """

    def __init__(self, language_model: LanguageModel, states: Sequence[int]) -> None:
        model = language_model.model
        compatibility = compatibility_of(model)
        if compatibility.layers is None or compatibility.capability is not Capability.TREES:
            raise UnsupportedModelError(
                f"{language_model.name} cannot teach: {compatibility.reason or 'its cache'}"
            )
        self._layers = compatibility.layers
        self._windows = dict(compatibility.layers)
        self._user = UserModel(model, tapped=states)
        self._name = language_model.name
        self._max_length = position_limit(model.config)
        self._stop_ids = frozenset(language_model.stop_ids)
        self._last_logits: dict[str, Any] = {}
        if self._user.takes("logits_to_keep"):
            self._last_logits["logits_to_keep"] = 1
        self.states = tuple(states)
        self.state_size = int(model.config.get_text_config(decoder=True).hidden_size)

    @property
    def device(self) -> torch.device:
        """Where the target computes."""
        return self._user.device

    @torch.no_grad()
    def read(self, lessons: Sequence[Lesson]) -> list[Taught]:
        """Read prompts with their recorded outputs in one pass.

        Raises:
            TrainingError: the target's states are no finite numbers.
        """
        texts = [np.concatenate([each.prompt, each.output]) for each in lessons]
        tokens = np.zeros((len(texts), max(map(len, texts))), np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text  # what stands behind a text, no row of it sees
        self._user.run(input_ids=torch.from_numpy(tokens).to(self.device), **self._last_logits)
        states = self._kept()
        return [
            Taught(text.astype(np.int32), len(each.prompt), states[row, : len(text)], each.is_own)
            for row, (each, text) in enumerate(zip(lessons, texts, strict=True))
        ]

    @torch.no_grad()
    def answer(
        self,
        prompts: Sequence[TokenIds],
        max_new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[Taught]:
        """Answer prompts side by side; once few are left, those are cut.

        Args:
            prompts: int32[n] each, shorter than the model's limit; best of similar lengths, as all
                take the longest one's time.
            max_new_tokens: of each answer, if the model's limit leaves room for them.
            temperature: 0 answers greedily.
            generator: of random numbers.

        Raises:
            TrainingError: the target's states are no finite numbers.
        """
        if self._max_length is not None:
            max_new_tokens = min(max_new_tokens, self._max_length - max(map(len, prompts)))
        batch = _Batch(prompts, max_new_tokens, self._stop_ids)
        cache = TreeCache([window for _, window in self._layers])
        states: list[torch.Tensor] = []
        tokens, positions = batch.first()
        while True:
            logits = self._pass(batch, cache, tokens, positions)
            states.append(self._kept())
            chosen = _choose(logits, temperature, generator)
            if batch.take(chosen) < max(_LEAST_BUSY * len(prompts), 1) or batch.is_full:
                break
            tokens, positions = batch.following(chosen)
        return batch.taught(torch.cat(states, dim=1))

    def _pass(
        self,
        batch: "_Batch",
        cache: TreeCache,
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return float32[batch, vocabulary], the logits after the last tokens given."""
        past, width = cache.get_seq_length(), tokens.shape[1]
        masks = {
            kind: batch.mask(past, width, window, self._user.dtype).to(self.device)
            for kind, window in self._windows.items()
        }
        output = self._user.run(
            cache=cache,
            input_ids=tokens.to(self.device),
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=positions.to(self.device),
            **self._last_logits,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _kept(self) -> torch.Tensor:
        """Return bfloat16[batch, rows, F], the states of the last pass on the CPU.

        Raises:
            TrainingError: some are no finite numbers.
        """
        states = self._user.batched_states
        kept = torch.cat([states[number] for number in self.states], -1).bfloat16()
        if not bool(torch.isfinite(kept).all()):
            raise TrainingError(
                f"{self._name} computes states that are no finite numbers, from which nothing can "
                "be learned: load it in another --precision, or check its weights"
            )
        return kept.cpu()


class _Batch:
    """Sequences of one batch, which end at the same slot of the cache."""

    def __init__(
        self, prompts: Sequence[TokenIds], max_new_tokens: int, stop_ids: frozenset[int]
    ) -> None:
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._stop_ids = stop_ids
        self._length = max(map(len, prompts))
        self._padding = torch.tensor([self._length - len(prompt) for prompt in prompts])
        self._outputs: list[list[int]] = [[] for _ in prompts]
        self._is_busy = [True] * len(prompts)
        self._num_chosen = 0

    @property
    def is_full(self) -> bool:
        """Whether answers are as long as they may be."""
        return self._num_chosen == self._max_new_tokens

    def first(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64[batch, length], the prompts behind their padding, and the positions."""
        tokens = torch.zeros(len(self._prompts), self._length, dtype=torch.int64)
        for row, prompt in enumerate(self._prompts):
            tokens[row, self._length - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        positions = torch.arange(self._length)[None] - self._padding[:, None]
        return tokens, positions.clamp(min=0)

    def following(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64[batch, 1] twice: the tokens chosen last and their positions."""
        positions = self._length + self._num_chosen - 1 - self._padding
        return chosen[:, None], positions[:, None]

    def mask(self, past: int, width: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return dtype[batch, 1, width, keys], zero where a row sees a key of its own sequence."""
        first = past - num_seen(past, window)
        keys = torch.arange(first, past + width)
        rows = torch.arange(past, past + width)
        is_seen = (keys[None] <= rows[:, None])[None] & (
            keys[None, None] >= self._padding[:, None, None]
        )
        if window is not None:
            is_seen &= (rows[:, None] - keys[None] < window)[None]
        mask = torch.zeros(len(self._prompts), 1, width, len(keys), dtype=dtype)
        return mask.masked_fill_(~is_seen[:, None], torch.finfo(dtype).min)

    def take(self, chosen: torch.Tensor) -> int:
        """Note int64[batch], the tokens chosen; return how many answers are not finished."""
        self._num_chosen += 1
        for row, token in enumerate(chosen.tolist()):
            if self._is_busy[row]:
                self._outputs[row].append(token)
                self._is_busy[row] = token not in self._stop_ids
        return sum(self._is_busy)

    def taught(self, states: torch.Tensor) -> list[Taught]:
        """Return the sequences, given [batch, slots, F], the states of all passes."""
        found = []
        for row, (prompt, output) in enumerate(zip(self._prompts, self._outputs, strict=True)):
            begin = int(self._padding[row])
            tokens = np.concatenate([prompt, np.array(output, np.int32)]).astype(np.int32)
            own = states[row, begin : begin + len(tokens)].clone()
            found.append(Taught(tokens, len(prompt), own, is_own=True, was_asked=True))
        return found


def _choose(
    logits: torch.Tensor, temperature: float, generator: torch.Generator | None
) -> torch.Tensor:
    """Return int64[batch], a token for each row of float32[batch, vocabulary], on the CPU."""
    if temperature == 0.0:
        if logits.device.type != "cpu":
            return logits.argmax(-1).cpu()
        return torch.from_numpy(logits.numpy().argmax(-1))  # torch's takes 50 times as long
    points = torch.rand(len(logits), generator=generator, dtype=torch.float64)
    return draw(torch.softmax(logits / temperature, dim=-1), points).cpu()
