"""Decoding prompts in a benchmark, with this package's loop and a drafter or with transformers."""

import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, Protocol

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter
from decoder.loop import Decoder, Request
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.observation import ObservedPass, Observer, Statistics, Times
from decoder.sampling.constraint import Grammar, GrammarProcessor
from decoder.sampling.stated import without_own_settings
from decoder.sampling.verification import AcceptRule, Drawing, PassContext, SelectingRule, Selection
from decoder.sampling.walk import Acceptance
from retriever.drafter import SequenceOptions
from retriever.tree import DraftTree

PLAIN: Final = "plain"
PROMPT_LOOKUP: Final = "transformers-lookup"
FOREDRAFT: Final = "foredraft"
UNDRAFTED: Final = "undrafted"
"""This package's own loop and target without drafts, to isolate the effect of drafting."""
THEIRS: Final = frozenset({PLAIN, PROMPT_LOOKUP})
"""Contenders that are not ours."""
PROMPT_LOOKUP_TOKENS: Final = 10
"""Tokens that prompt lookup proposes. The documentation of transformers uses 3 and 10; 10 is
faster."""

_TORCH_SEEDS: Final = 2**63


Account = tuple[float, float, float, float]
"""Figures of a run: seconds, tokens, passes after the prompts' passes, and tokens of these passes.
With several prompts, a pass counts once for each of its sequences."""


@dataclass(frozen=True, slots=True)
class Run:
    """One or several prompts decoded in one way, some at a time.

    Attributes:
        token_ids: the generated tokens; the outputs of several prompts are concatenated.
        seconds: time from prompt tokens to output tokens, including the prompts' passes.
        num_passes: number of forward passes of the target, including the prompts' passes. With
            several prompts, a pass counts once for each of its sequences.
        statistics: figures of this package's decoder; empty for other decoders.
        lengths: number of tokens in each output, if there are several prompts.
        steps: times of passes by part. Passes that only read prompts are left out, and so is the
            share of prompts in other passes. Empty for transformers.
    """

    token_ids: list[int]
    seconds: float
    num_passes: int
    statistics: Statistics = field(default_factory=Statistics)
    lengths: Sequence[int] = ()
    steps: Sequence[Times] = ()

    @property
    def outputs(self) -> list[list[int]]:
        """The generated tokens of each prompt."""
        tokens = iter(self.token_ids)
        return [list(islice(tokens, length)) for length in self.lengths or [len(self.token_ids)]]

    @property
    def account(self) -> Account:
        """Time, tokens and passes of the run; see `Account`."""
        num_tokens = len(self.token_ids)
        num_begun = sum(map(bool, self.lengths)) if self.lengths else 1
        steps, step_tokens = self.num_passes - num_begun, num_tokens - num_begun
        return self.seconds, num_tokens, max(steps, 0), max(step_tokens, 0)


def total_of(runs: Iterable[Run]) -> Statistics:
    """Return the combined figures of several runs."""
    total = Statistics()
    for run in runs:
        total.add(run.statistics)
    return total


class Contender(Protocol):
    """A way of decoding."""

    def __call__(self, prompts: Sequence[list[int]], parallel: int = 1, *, remember: bool) -> Run:
        """Decode prompts, at most `parallel` at a time.

        Args:
            prompts: tokens of each prompt.
            parallel: largest number of prompts at a time.
            remember: whether later prompts may use the outputs.
        """
        ...


def contenders(
    language_model: LanguageModel, decoder: Decoder, max_new_tokens: int
) -> dict[str, Contender]:
    """Return contenders by name: two of transformers, undrafted decoding, and the given decoder.

    All have the same token limit, even near the model's own limit. None applies the model's
    generation_config: they only decode greedily.
    """
    target = decoder.target
    undrafted = Decoder(target, NoDrafter(), FixedBudget(0), decoder.accept, decoder.stop_ids)
    lookup = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    return {
        PLAIN: LibraryContender(language_model, target, max_new_tokens),
        PROMPT_LOOKUP: LibraryContender(language_model, target, max_new_tokens, lookup),
        UNDRAFTED: OwnContender(undrafted, max_new_tokens),
        FOREDRAFT: OwnContender(decoder, max_new_tokens),
    }


@dataclass(frozen=True, slots=True)
class OwnContender:
    """Decodes with this package."""

    decoder: Decoder
    max_new_tokens: int

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter, which can remember answers."""
        return not isinstance(self.decoder.drafter, NoDrafter)

    def __call__(self, prompts: Sequence[list[int]], parallel: int = 1, *, remember: bool) -> Run:
        """Decode prompts in shared passes; a prompt starts when an earlier one has ended.

        Raises:
            DecoderError: a prompt failed.
        """
        self.decoder.target.forget()
        outputs: list[list[int]] = [[] for _ in prompts]
        total, parts = Statistics(), _PassTimes()
        requests = (
            Request(
                prompt, self.max_new_tokens, SequenceOptions(remember), observer=parts.observer()
            )
            for prompt in prompts
        )
        start = time.perf_counter()
        for generation, tokens in self.decoder.generate_many(requests, parallel):
            outputs[generation.number].extend(tokens)
            if generation.error is not None:
                raise generation.error
            if generation.is_over:
                total.add(generation.statistics)
        seconds = time.perf_counter() - start
        return Run(
            [token for output in outputs for token in output],
            seconds,
            total.num_passes,
            total,
            tuple(map(len, outputs)),
            parts.times,
        )


class _PassTimes:
    """Adds up the time of each pass over its sequences.

    Observing a pass takes 2 to 4 µs per sequence on a busy core; the run's seconds include that.

    Attributes:
        times: times of each pass that verified drafts, including empty drafts.
    """

    def __init__(self) -> None:
        self.times: list[Times] = []
        self._shares: list[Times] = []

    def observer(self) -> Observer:
        """Return an observer of one sequence; it ignores the prompt's pass."""
        has_begun = False

        def observe(step: ObservedPass) -> None:
            nonlocal has_begun
            if has_begun:
                self._add(step)
            has_begun = True

        return observe

    def _add(self, step: ObservedPass) -> None:
        """Add the share of a sequence; the shares of one pass arrive one after another."""
        self._shares.append(step.times)
        if len(self._shares) < step.num_sequences:
            return
        self.times.append(
            Times(
                sum(share.draft_s for share in self._shares),
                sum(share.target_s for share in self._shares),
                sum(share.host_s for share in self._shares),
            )
        )
        self._shares.clear()


@dataclass(frozen=True, slots=True)
class LibraryContender:
    """Decodes with `model.generate` of transformers.

    Attributes:
        language_model: the model.
        target: this package's target for the model, which knows the model's length limit.
        max_new_tokens: most tokens to generate.
        options: further options of `model.generate`.
        temperature: temperature of sampling from the full distribution; 0 is greedy decoding.
        seed: with sampling, the seed of torch's random numbers, which is combined with the prompt.
        grammar: grammar that outputs must match; None for no grammar.
    """

    language_model: LanguageModel
    target: Target
    max_new_tokens: int
    options: Mapping[str, int] = field(default_factory=dict)
    temperature: float = 0.0
    seed: int = 0
    grammar: Grammar | None = None

    def __call__(
        self,
        prompts: Sequence[list[int]],
        parallel: int = 1,
        *,
        remember: bool,  # noqa: ARG002  stores nothing
    ) -> Run:
        """Decode prompts in left-padded batches; a batch ends with its longest output.

        Args:
            prompts: tokens of each prompt. The model's limit should leave room for
                `max_new_tokens`; otherwise the whole batch is limited to the available room.
            parallel: number of prompts in a batch.
            remember: ignored, because nothing is stored.
        """
        outputs: list[list[int]] = []
        with self._measured(prompts) as passes:
            start = time.perf_counter()
            for begin in range(0, len(prompts), parallel):
                batch = prompts[begin : begin + parallel]
                room = min(self.target.room(len(prompt), self.max_new_tokens) for prompt in batch)
                outputs += map(self._ended, self._generated(batch, room))
            seconds = time.perf_counter() - start
        lengths = tuple(map(len, outputs))
        tokens = [token for output in outputs for token in output]
        num_passes = passes.count if parallel == 1 else sum(lengths)  # a batch also reads padding
        return Run(tokens, seconds, num_passes, lengths=lengths)

    @contextmanager
    def _measured(self, prompts: Sequence[list[int]]) -> Iterator["_PassCount"]:
        """Count passes during the block; with sampling, set the same seed each time."""
        model = self.language_model.model
        passes = _PassCount()
        counting = model.register_forward_pre_hook(passes)
        if self.temperature:
            said = repr(prompts[0] if len(prompts) == 1 else list(prompts))
            torch.manual_seed((self.seed + zlib.crc32(said.encode())) % _TORCH_SEEDS)
        try:
            with warnings.catch_warnings(), without_own_settings(model):
                warnings.simplefilter("ignore")  # advice about options that we do not set
                yield passes
        finally:
            counting.remove()

    def _generated(self, batch: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Return the library's output for each prompt, padded to the longest output."""
        model = self.language_model.model
        longest = max(map(len, batch))
        missing = [longest - len(prompt) for prompt in batch]
        padded = [[self._padding] * n + p for n, p in zip(missing, batch, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in missing]
        device = torch.device(model.device)
        output: Any = GenerationMixin.generate(
            model,  # type: ignore[arg-type]  # every causal model has the mixin
            torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=self._config(max_new_tokens),
            logits_processor=LogitsProcessorList(
                [] if self.grammar is None else [GrammarProcessor(self.grammar)]
            ),
        )
        rows: list[list[int]] = output[:, longest:].tolist()
        return rows

    def _ended(self, tokens: list[int]) -> list[int]:
        """Return the tokens up to the first stop token; the rest is padding."""
        stop_ids = self.language_model.stop_ids
        end = next((at for at, token in enumerate(tokens, 1) if token in stop_ids), None)
        return tokens[:end]

    @property
    def _padding(self) -> int:
        stop_ids = self.language_model.stop_ids
        return stop_ids[0] if stop_ids else 0

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        stop_ids = list(self.language_model.stop_ids)
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0}
        return GenerationConfig(  # type: ignore[no-untyped-call]  # the library gives no types
            max_new_tokens=max_new_tokens,
            eos_token_id=stop_ids or None,
            pad_token_id=self._padding,
            **sampling,
            **self.options,
        )


class _PassCount:
    """A forward hook that counts passes."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


@dataclass(frozen=True, slots=True)
class DrawnByPrompt:
    """A rule whose random numbers depend on the prompt, not on the number of earlier prompts.

    So decoders sample the same tokens for the same prompt, whatever else they have decoded.

    Attributes:
        rule: rule whose random numbers depend on seed, sequence number and position.
    """

    rule: AcceptRule

    def __call__(self, tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
        """Accept as the rule does, with the prompt's random numbers."""
        return self.rule(tree, logits, _by_prompt(context))

    @property
    def drawing(self) -> Drawing | None:
        """See `SelectingRule.drawing`."""
        return self.rule.drawing if isinstance(self.rule, SelectingRule) else None

    def selection(self, tree: DraftTree, context: PassContext) -> Selection | None:
        """See `SelectingRule.selection`."""
        if not isinstance(self.rule, SelectingRule):
            return None
        return self.rule.selection(tree, _by_prompt(context))


def _by_prompt(context: PassContext) -> PassContext:
    """Return a context whose sequence number is derived from the prompt."""
    prompt = context.tokens[: context.num_prompt_tokens]
    return replace(context, sequence=zlib.crc32(prompt.tobytes()))
