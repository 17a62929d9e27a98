"""Tiny targets that teach, and recorded texts for the tests of training."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from decoder.model.pretrained import LanguageModel
from decoder.model.states import num_states
from decoder.plugins.speculators.eagle import Eagle3Head, eagle_head
from decoder.plugins.training.head_start import head_config, recorded_states, trained_states
from decoder.plugins.training.taught_store import Example
from indexer.tokenizer import Vocabulary, vocabulary_of
from tests.decoder.decoding import VOCABULARY, tiny_llama

STATE_SIZE = 32
FEATURES = 3 * STATE_SIZE


class StepClock:
    """Stands for `time` in modules that train: it goes on by so many seconds each time it is read.

    A training reads it once at each step, so that its minutes are a number of steps.
    """

    def __init__(self, seconds: float = 0.2) -> None:
        self._seconds = seconds
        self._now = 0.0

    def perf_counter(self) -> float:
        """Return seconds."""
        self.go_on(self._seconds)
        return self._now

    def go_on(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self._now += seconds


def language_model_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...] = ()
) -> LanguageModel:
    vocabulary: Vocabulary = vocabulary_of(tokenizer)
    return LanguageModel("tiny", model, tokenizer, vocabulary, stop_ids)


def successors() -> torch.Tensor:
    """Return int64[vocabulary]: the token that follows each in the texts of `counting_llama`."""
    return torch.from_numpy(np.random.default_rng(5).permutation(VOCABULARY))


@cache
def counting_llama() -> PreTrainedModel:
    """Return a tiny target that learned which token follows which: in a second or two, once.

    Half of the texts that it learns from are of random tokens, and half go on as they should, as
    its own will; it finds the right token nine times as likely as all others together.
    """
    model: Any = tiny_llama(layers=3)
    following = successors()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=120)
    model.train()
    for _ in range(120):
        tokens = torch.randint(VOCABULARY, (16, 24), generator=generator)
        for place in range(1, 24):
            tokens[:8, place] = following[tokens[:8, place - 1]]
        logits = model(tokens).logits.flatten(0, 1)
        labels = following[tokens].flatten()
        functional.cross_entropy(logits, labels, label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        slower.step()
        optimizer.zero_grad()
    assert isinstance(model, LlamaForCausalLM)
    evaluated: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return evaluated


def prompts_of(
    lengths: list[int], seed: int = 0, vocabulary: int = VOCABULARY
) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocabulary, length).astype(np.int32) for length in lengths]


def states_of(language_model: LanguageModel) -> tuple[int, ...]:
    return recorded_states(num_states(language_model.model))


def drawn_head(language_model: LanguageModel, num_columns: int, seed: int = 0) -> Eagle3Head:
    """Return a head of random weights for all tokens below a number."""
    torch.manual_seed(seed)
    head = eagle_head(head_config(language_model, num_columns))
    assert isinstance(head, Eagle3Head)
    assert head.config.states == trained_states(num_states(language_model.model))
    if head.config.is_cut:
        head.keep(torch.arange(num_columns))
    return head


def undecided_head(language_model: LanguageModel, num_columns: int) -> Eagle3Head:
    """Return a head that finds all tokens as likely: it predicts more after a step or two."""
    head = drawn_head(language_model, num_columns)
    assert head.lm_head is not None
    torch.nn.init.zeros_(head.lm_head.weight)
    return head


def drawn_texts(lengths: list[tuple[int, int]], seed: int = 0) -> list[Example]:
    """Return texts of random tokens and states, given the lengths of prompts and outputs."""
    rng = np.random.default_rng(seed)
    return [
        Example(
            rng.integers(0, VOCABULARY, prompt + output).astype(np.int32),
            prompt,
            torch.from_numpy(rng.standard_normal((prompt + output, 4 * STATE_SIZE))).bfloat16(),
            is_own=bool(number % 2),
            was_asked=bool(number % 2),
        )
        for number, (prompt, output) in enumerate(lengths)
    ]
