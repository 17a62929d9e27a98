"""Decoding with drafts inside `model.generate(..., custom_generate=...)`."""

from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decoder.budget.budget import Budget, MeasuredBudget
from decoder.budget.cost_store import known_costs, store_at
from decoder.budget.costs import CostSurface
from decoder.drafters.following import states_of
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.engines.engine_options import checked_vocabulary_size
from decoder.engines.transformers.requests import (
    Ending,
    Stream,
    check_request,
    check_transformers,
    streamer_of_call,
)
from decoder.errors import ContradictoryOptionsError, UnsupportedGenerationError
from decoder.loop import Decoder
from decoder.model.capability_check import FOUND_HERE
from decoder.model.compatibility import computed_limit
from decoder.model.target import Target
from decoder.observation import Statistics
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import AcceptRule
from decoder.speculators.speculator import load_speculator
from decoder.worth import Worth
from indexer.tokenizer import Vocabulary, vocabulary_of
from retriever.drafter import Drafter
from retriever.follower import DraftLimits

_log = getLogger(__name__)
OnTokens = Callable[[list[int]], object]
_curves: WeakKeyDictionary[PreTrainedModel, CostSurface] = WeakKeyDictionary()


class Foredraft:
    """Decodes with drafts when passed to `model.generate` as `custom_generate`.

    Logits processors, sampling, lengths and stopping are those of the call and of the model's
    generation_config. The model's passes are measured once, which takes seconds; what they cost is
    kept for the next start (`FOREDRAFT_CACHE`), and the budget keeps learning from call to call.
    Sampling draws its seed from torch.

    Args:
        model: the model of all calls.
        drafter: proposes the drafts.
        budget: how much of a draft is verified; by default what pays, by measurement.
        drafter_vocabulary: size of the vocabulary that the drafter knows, where the model's
            embedding is larger; by default what the drafter or the tokenizer says.
        tokenizer: the model's, so that a drafter for another one is refused.
        speculator: a head that drafts from the model's own states, see `load_head`: its drafts are
            fused with the drafter's and with recycled logits.
        draft_sampling: whether drafts that the drafter drew at random (`DrawnFusion`, or
            `DraftingOptions.draws`) are accepted by their distributions, where a call samples. The
            output of a seed then depends on the drafts; its distribution does not.

    Attributes:
        statistics: figures of all calls.
        worth: what drafts were worth in all calls, estimated from what passes cost here; nothing is
            known with a budget that does not measure.

    Raises:
        UnsupportedModelError: the model cannot be decoded here.
        VocabularyMismatchError: the drafter or the speculator is for another tokenizer.
        HeadFileError: the speculator cannot be read.
        HeadMismatchError: it was made for another model.
        ContradictoryOptionsError: the drafter is a fused one, which takes speculators itself.
    """

    def __init__(  # noqa: PLR0913  all but the first two are options
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        *,
        budget: Budget | None = None,
        drafter_vocabulary: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        speculator: Path | str | None = None,
        draft_sampling: bool = False,
    ) -> None:
        check_transformers()
        own = None if tokenizer is None else vocabulary_of(tokenizer)
        known = checked_vocabulary_size(drafter, _num_embeddings(model), own)
        if speculator is not None:
            drafter = _with_speculator(drafter, Path(speculator), model, own)
        target = Target(model, states=states_of(drafter), verdicts=store_at(None) or FOUND_HERE)
        target.max_length = computed_limit(model.config)  # `generate` goes on as far as it can
        self._model = model
        self._couples = not draft_sampling
        self._decoder = Decoder(
            target,
            drafter,
            budget or MeasuredBudget(_costs(model, target)),
            drafter_vocabulary=known if drafter_vocabulary is None else drafter_vocabulary,
        )
        self.statistics = Statistics()
        self.worth = Worth()

    def __call__(  # noqa: PLR0913  as `model.generate` calls it
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        on_tokens: OnTokens = lambda _: None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode one sequence, as `model.generate` asks for it.

        Args:
            model: the same as at the start.
            input_ids: int64[1, n], the prompt.
            logits_processor: applied along each path.
            stopping_criteria: tokens behind the first stop are cut.
            generation_config: of the call.
            on_tokens: is called with the tokens of each pass; a `streamer` of the call is told
                each token, as well.
            model_kwargs: further arguments of the model.

        Returns:
            int64[1, n + new], or a GenerateDecoderOnlyOutput of it if
            `return_dict_in_generate` is set.

        Raises:
            UnsupportedGenerationError: the call asks for what drafts do not serve.
            InvalidPromptError: the prompt is longer than the model can take.

        An output ends at `Target.max_length` tokens where passes beyond are not those of the model
        (`decoder.model.compatibility.computed_limit`); a warning in the log tells so.
        """
        if model is not self._model:
            raise UnsupportedGenerationError("this Foredraft was made for another model")
        check_request(input_ids, generation_config, model_kwargs)
        ending, stream = Ending(stopping_criteria, input_ids), Stream(streamer_of_call())
        prompt, budget = input_ids[0].tolist(), self._decoder.budget
        with self._decoder.reserved():
            generation = self._decoding(logits_processor, generation_config, ending).generate(
                prompt,
                ending.max_new_tokens,
                stop_rule=ending.rule,
                observer=self.worth.observer(budget, len(prompt)),
            )
            new: list[int] = []
            try:
                for tokens in generation:
                    new.extend(tokens)
                    stream.put(tokens)
                    on_tokens(tokens)
            finally:
                self.statistics.add(generation.statistics)
        stream.end()
        self._tell_of_limit(len(prompt), new, ending)
        sequences = torch.cat([input_ids, input_ids.new_tensor([new])], dim=-1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]  # a LongTensor

    def _tell_of_limit(self, num_prompt_tokens: int, new: list[int], ending: Ending) -> None:
        """Log where an output ended that the call would have gone on with."""
        is_cut = num_prompt_tokens + len(new) == self._decoder.target.max_length
        is_stopped = bool(new) and new[-1] in ending.stop_ids
        if is_cut and len(new) < ending.max_new_tokens and not is_stopped:
            _log.warning(
                "%s: the output ends at %d tokens, prompt included: beyond them positions have no "
                "place in its table, or change those of earlier tokens; go on without drafts",
                type(self._model).__name__,
                num_prompt_tokens + len(new),
            )

    def _decoding(
        self, processors: LogitsProcessorList, config: GenerationConfig, ending: Ending
    ) -> Decoder:
        """Return a decoder for one call."""
        base = self._decoder
        rule = rule_of(processors, do_sample=bool(config.do_sample), coupled=self._couples)
        decoder = Decoder(
            base.target,
            base.drafter,
            base.budget,
            rule,
            ending.stop_ids,
        )
        decoder.followers = base.followers
        return decoder


def foredraft_generate(  # noqa: PLR0913  as `model.generate` calls it
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter | None = None,
    on_tokens: OnTokens = lambda _: None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode with drafts: `model.generate(..., custom_generate=foredraft_generate, drafter=...)`.

    Measured costs are kept for each model while it exists, but not what a `Foredraft` learns
    besides, so prefer a `Foredraft` for a model that is called often. Arguments and errors are
    the same.
    """
    if drafter is None:
        raise UnsupportedGenerationError(
            "foredraft_generate needs a drafter: model.generate(..., drafter=...)"
        )
    return Foredraft(model, drafter)(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        on_tokens=on_tokens,
        **model_kwargs,
    )


def rule_of(
    processors: LogitsProcessorList, *, do_sample: bool, coupled: bool = True
) -> AcceptRule:
    """Return the rule by which `model.generate` itself would choose tokens.

    Args:
        processors: of the call, its warpers included.
        do_sample: whether to draw; the seed is drawn from torch's own generator.
        coupled: see `SamplingSettings.coupled`.
    """
    if not do_sample:
        return accept_rule(None, processors)
    seed = int(torch.randint(2**63 - 1, ()))
    return accept_rule(SamplingSettings(temperature=1.0, seed=seed, coupled=coupled), processors)


def _with_speculator(
    drafter: Drafter, path: Path, model: PreTrainedModel, vocabulary: Vocabulary | None
) -> FusedDrafter:
    if isinstance(drafter, FusedDrafter):
        raise ContradictoryOptionsError(
            "a fused drafter takes speculators itself: "
            "FusedDrafter(..., readers=[load_speculator(path, model)])"
        )
    reader = load_speculator(path, model, vocabulary=vocabulary)
    limits = DraftLimits(_num_embeddings(model), None if vocabulary is None else vocabulary.size)
    return FusedDrafter([drafter], limits, readers=[reader], recycled=RecycledLogits())


def _num_embeddings(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().get_parameter("weight").shape[0])


def _costs(model: PreTrainedModel, target: Target) -> CostSurface:
    if model not in _curves:
        _curves[model] = known_costs(target, model, store_at(None))
    return _curves[model]
