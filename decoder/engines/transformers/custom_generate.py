"""Decoding with drafts inside `model.generate(..., custom_generate=...)`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decoder.budget.budget import Budget, MeasuredBudget
from decoder.budget.cost_store import key_of, known_costs, store_at
from decoder.budget.costs import CostSurface
from decoder.drafters.draft_model import DraftModel, ModelReader
from decoder.drafters.following import states_of
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.readers import TreeReader
from decoder.drafters.recycling import RecycledLogits
from decoder.engines.engine_options import checked_vocabulary_size
from decoder.engines.transformers.prompt_rows import PromptRow, joined, own_processors
from decoder.engines.transformers.requests import (
    Call,
    Ending,
    Listeners,
    OnTokens,
    RowPredictions,
    check_listeners,
    check_transformers,
    checked_rows,
    ended_on_errors,
    pad_token_of,
    predictions_by_row,
    streamer_of_call,
    with_constraint,
)
from decoder.engines.transformers.results import RowRecord, Wanted, fill, given_prefixes
from decoder.errors import (
    ContradictoryOptionsError,
    DecoderBusyError,
    InvalidPromptError,
    InvalidSettingsError,
    UnsupportedGenerationError,
    UnsupportedModelError,
    WeightsNotLoadedError,
)
from decoder.loop import DEFAULT_PARALLEL, Decoder, Request
from decoder.model.cache import Prefix
from decoder.model.capability_check import FOUND_HERE
from decoder.model.compatibility import Capability, computed_limit, num_embeddings, tell_once
from decoder.model.stamp import Structure, num_said, parameters_of, version_of
from decoder.model.target import Target
from decoder.model.user_model import generating
from decoder.observation import Statistics
from decoder.sampling.constraint import Grammar
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.speedup import Speedup
from indexer.launch import plugged
from indexer.tokenizer import Vocabulary, vocabulary_of
from retriever.drafter import DEFAULT, Drafter, OfOneProcess, SequenceOptions
from retriever.follower import DraftLimits

_log = getLogger(__name__)
_curves: WeakKeyDictionary[PreTrainedModel, dict[str, CostSurface]] = WeakKeyDictionary()

_QUIETER: Final = 1 / 1.5
"""If passes take less than this share of their measured time, the machine was busy during the
measurement, so passes are measured again. If they take more time than measured, the machine is busy
now, so nothing is measured."""


class Foredraft(OfOneProcess):
    """Decodes with drafts when passed to `model.generate` as `custom_generate`.

    Logits processors, sampling, lengths and stopping follow the call and the model's
    generation_config. Each pass runs the model in its current state: weights, adapters, modules and
    hooks may change between calls, and within a call in a processor, criterion or streamer. If
    passes with drafts would not be exact, the model's own `generate` decodes; this is logged once.
    The model's passes are timed once, which takes seconds. Their costs are stored for the next
    start (`FOREDRAFT_CACHE`), and the budget learns from every call. Torch's generator provides the
    seed for sampling.

    The rows of a batch and the sequences of `num_return_sequences` share passes, each with its own
    drafts. With greedy decoding, each row's output is the same as if decoded alone. With sampling,
    each row has its own random numbers, determined by the seed and the row's number.

    Args:
        model: the model of all calls, or a wrapper around it from PEFT, torch.compile or a trainer.
        drafter: proposes the drafts.
        budget: decides how many nodes of a draft are verified; by default as many as pay off
            according to measured costs.
        drafter_vocabulary: size of the drafter's vocabulary if the model has more embeddings; by
            default the vocabulary size of the drafter or the tokenizer.
        tokenizer: the model's tokenizer, so that drafters for other tokenizers are refused;
            required for calls with `stop_strings`.
        speculator: folder or file of a head that drafts from the model's own hidden states, such as
            EAGLE's; see `load_speculator`. Its drafts are fused with the drafter's and with
            recycled logits.
        assistant_model: a smaller model with the same tokenizer, whose drafts are fused in the same
            way. At each node, the sources that know it are weighted by how well they predicted so
            far. A head or assistant is called if its recent tokens saved more time than it took.
        draft_sampling: whether sampling calls accept sampled drafts (`DrawnFusion`) by the
            distributions from which they were sampled. The output of a seed then depends on the
            drafts; its distribution does not.
        parallel: most rows in a pass; other rows wait for a place.
        reuse_prefixes: whether a call may reuse keys and values of an earlier call, as in the next
            turn of a chat, if no change of the model is detected. Set it only if all your changes
            can be detected: changes in the internal state of your own hooks or layers cannot.
        queues: whether a call waits while another thread's call is decoded; otherwise the call
            raises an error.
        counts_versions: whether changed weights count as a new policy version, for calls whose
            `options` set no version; outputs of earlier versions then count less. Report changes
            that torch does not count with `foredraft.model_changed`.

    Attributes:
        statistics: counts and times of all calls and rows.
        speedup: speedup of all calls over decoding row by row without drafts, estimated from
            measured costs of passes; unknown if the budget does not measure costs.

    Raises:
        WeightsNotLoadedError: some weights of the model are on no device.
        VocabularyMismatchError: the drafter, the speculator or the assistant was made for another
            tokenizer.
        HeadFileError: the speculator cannot be read.
        HeadMismatchError: the speculator was made for another model.
        ContradictoryOptionsError: the drafter is a `FusedDrafter`, which takes drafting models
            itself.
        InvalidSettingsError: `parallel` is less than one.
    """

    def __init__(  # noqa: PLR0913  all but the first two are options
        self,
        model: PreTrainedModel | nn.Module,
        drafter: Drafter,
        *,
        budget: Budget | None = None,
        drafter_vocabulary: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        speculator: Path | str | None = None,
        assistant_model: PreTrainedModel | nn.Module | None = None,
        draft_sampling: bool = False,
        parallel: int = DEFAULT_PARALLEL,
        reuse_prefixes: bool = False,
        queues: bool = False,
        counts_versions: bool = False,
    ) -> None:
        check_transformers()
        if parallel < 1:
            raise InvalidSettingsError(f"parallel must be 1 or more, not {parallel}")
        self._model = generating(model)
        self._drafter, self._budget = drafter, budget
        self._drafter_vocabulary = drafter_vocabulary
        self._tokenizer = tokenizer
        self._vocabulary = None if tokenizer is None else vocabulary_of(tokenizer)
        self._speculator = None if speculator is None else Path(speculator)
        self._assistant = None if assistant_model is None else generating(assistant_model)
        self._couples = not draft_sampling
        self._parallel = parallel
        self._reuses = reuse_prefixes
        self.statistics = Statistics()
        self.speedup = Speedup()
        self._queues, self._lock = queues, Lock()
        self._caller: int | None = None
        self._counts_versions, self._version = counts_versions, 0
        self._weights: tuple[Any, ...] | None = None
        self._structure: Structure | None = None
        self._decodes_plainly = False
        self._follow_model()

    def _follow_model(self) -> None:
        """Build a decoder for the model, unless the model's structure is unchanged.

        Raises:
            UnsupportedModelError: the speculator or the assistant cannot be used with the model.
        """
        structure = Structure.of(self._model)
        if self._structure is not None and structure.is_of(self._structure):
            if not self._decodes_plainly:
                self._measure_again_if_quieter()
            return
        model, drafter = self._model, self._drafter
        known = checked_vocabulary_size(drafter, num_embeddings(model), self._vocabulary)
        if self._speculator is not None or self._assistant is not None:
            drafter = _with_readers(
                drafter, model, self._vocabulary, self._speculator, self._assistant
            )
        self._structure = None  # until the new decoder is built
        try:
            target = Target(
                model,
                states=states_of(drafter),
                reuse_prefixes=self._reuses,
                verdicts=store_at(None) or FOUND_HERE,
            )
        except WeightsNotLoadedError:
            raise
        except UnsupportedModelError as error:
            tell_once(model, Capability.PLAIN, str(error))
            self._decodes_plainly, self._structure = True, structure
            return
        self._decodes_plainly = target.capability is Capability.PLAIN
        if self._decodes_plainly:
            self._structure = structure
            return
        target.max_length = computed_limit(model.config)  # `generate` continues as far as it can
        self._decoder = Decoder(
            target,
            drafter,
            self._budget or MeasuredBudget(_costs(model, target)),
            drafter_vocabulary=self._drafter_vocabulary or known,
        )
        self._structure = structure

    def _measure_again_if_quieter(self) -> None:
        """Time passes again if the machine was busy during the last measurement."""
        budget = self._decoder.budget
        if self._budget is not None or not isinstance(budget, MeasuredBudget):
            return
        if budget.costs.load < _QUIETER:
            _curves.pop(self._model, None)
            self._decoder.budget = MeasuredBudget(_costs(self._model, self._decoder.target))

    def __call__(  # noqa: PLR0913  as `model.generate` calls it
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        on_tokens: OnTokens | None = None,
        predictions: RowPredictions = (),
        options: SequenceOptions = DEFAULT,
        drafts: bool = True,
        budget: int | None = None,
        constraint: Grammar | None = None,
        stop_strings: str | list[str] | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode one sequence or a batch for `model.generate`.

        Args:
            model: the model given at construction.
            input_ids: int64[rows, n], the prompts, padded on the left; each is repeated
                `num_return_sequences` times.
            logits_processor: processors, applied along each path with all tokens before a row. If
                the call has several prompts, each has its own copies; see `own_processors`.
            stopping_criteria: criteria, applied to each prompt like processors; tokens after the
                first stop are cut.
            generation_config: configuration of the call.
            on_tokens: called with the tokens of each pass; a `streamer` of the call also gets each
                token. Both work for one sequence only.
            predictions: texts that the outputs are expected to contain: one list for all rows, or a
                list for each row. They are a further source of drafts, if the drafter supports
                predictions.
            options: options for the drafter, for every row: whether later calls may draft from the
                outputs, the group of all rows (which then draft from one another), the version of
                the model, the tenant, and predictions, which come before those of each row.
            drafts: whether to draft; if not, the drafter does not see the call.
            budget: most nodes of a row's tree that a pass verifies; see `Request`.
            constraint: grammar that each output must match. It applies like a `GrammarProcessor`
                among the call's processors, and forced tokens are drafted.
            stop_strings: strings that end an output, as in `generate`; needs the tokenizer given at
                construction.
            model_kwargs: further arguments of the model.

        Returns:
            int64[rows, n + new], prompts and outputs, padded on the right, or a
            GenerateDecoderOnlyOutput with them if `return_dict_in_generate` is set. In that case,
            or if a cache was given, the cache holds what `generate` would have left in it, to
            continue from. In rows that end before others, scores and logits are zeros after the
            end.

        Raises:
            UnsupportedGenerationError: the call asks for something that drafts do not support.
            InvalidPromptError: a prompt is longer than the model allows or holds only padding; or a
                prediction, group, version or tenant name is invalid.
            InvalidSettingsError: the budget is negative.
            InvalidRequestError: the drafter does not keep tenants apart.
            DecoderBusyError: another call is being decoded, and calls do not queue.

        An output ends at `Target.max_length` tokens if longer passes would differ from the model's
        own (`decoder.model.compatibility.computed_limit`); this logs a warning.
        """
        streamer = streamer_of_call()
        with ended_on_errors(streamer), self._turn():
            self._check_model(model)
            call = Call(
                model,
                input_ids,
                with_constraint(logits_processor, constraint),
                self._with_stop_strings(stopping_criteria, stop_strings),
                generation_config,
                streamer,
                on_tokens,
                model_kwargs,
            )
            about = Request(
                prompt=(),
                options=self._versioned(options),
                drafts=drafts,
                budget=budget,
            )
            return self._answered(call, about, predictions)

    def _check_model(self, model: PreTrainedModel) -> None:
        if model is not self._model:
            raise UnsupportedGenerationError(
                f"this Foredraft was made for another model, a {type(self._model).__name__}: make "
                f"one for this {type(model).__name__}, Foredraft(model, drafter)"
            )

    def _with_stop_strings(
        self, criteria: StoppingCriteriaList, strings: str | list[str] | None
    ) -> StoppingCriteriaList:
        """Return the criteria of a call, with a criterion for stop strings if there are any."""
        if strings is None:
            return criteria
        if self._tokenizer is None:
            raise UnsupportedGenerationError(
                "stop_strings needs the model's tokenizer, which generate does not pass on: "
                "Foredraft(model, drafter, tokenizer=tokenizer)"
            )
        return StoppingCriteriaList([*criteria, StopStringCriteria(self._tokenizer, strings)])

    def _versioned(self, options: SequenceOptions) -> SequenceOptions:
        """Return the call's options, with the version of the weights if versions are counted."""
        if not self._counts_versions:
            return options
        held = parameters_of(self._model)
        weights = [(id(each), version_of(each)) for each in held]
        now = (weights, num_said())
        if self._weights is not None and now != self._weights:
            self._version += 1
        self._weights = now
        if options.policy_version is not None:
            return options
        return replace(options, policy_version=self._version)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold this Foredraft during the block: its target decodes one call at a time.

        Raises:
            DecoderBusyError: another call holds this Foredraft, and calls do not queue or would
                wait forever.
        """
        if self._caller == get_ident():
            raise DecoderBusyError(
                "a streamer, processor or criterion of a call makes another call of the same "
                "Foredraft: create another one for it"
            )
        if not self._lock.acquire(blocking=self._queues):
            raise DecoderBusyError(
                "another thread's call is being decoded: wait for its end, or let calls wait for "
                "their turn with Foredraft(..., queues=True)"
            )
        self._caller = get_ident()
        try:
            yield
        finally:
            self._caller = None
            self._lock.release()

    def _answered(
        self, call: Call, about: Request, predictions: RowPredictions
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode with drafts if their passes match the model's own; otherwise without drafts.

        Args:
            call: the call of `generate`.
            about: request settings that all rows share.
            predictions: expected texts for all rows, or a list for each row.
        """
        if adaptation := call.adaptation:
            tell_once(call.model, Capability.PLAIN, adaptation)
            return call.plainly()
        self._follow_model()
        if self._decodes_plainly:
            return call.plainly()
        if call.continues and not (call.has_all_tokens and self._decoder.target.hands_over):
            return call.plainly()
        rows = checked_rows(call.input_ids, call.config, call.model_kwargs)
        past = given_prefixes(call, rows) if call.continues else [None] * len(rows)
        if past is None:
            return call.plainly()
        try:
            return self._decoded(call, about, predictions, rows, past)
        except WeightsNotLoadedError:
            raise
        except UnsupportedModelError as error:  # before the first token: the model just changed
            tell_once(call.model, Capability.PLAIN, str(error))
            self._structure = None
            return call.plainly()

    def _decoded(
        self,
        call: Call,
        about: Request,
        predictions: RowPredictions,
        rows: Sequence[PromptRow],
        past: Sequence[Prefix | None],
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode all rows with drafts, and return what `generate` returns."""
        ending = Ending(call.criteria, call.input_ids.shape[1])
        pad = pad_token_of(call.config)
        check_listeners(len(rows), call.streamer, call.on_tokens)
        self._check_lengths(rows, ending, pad)
        wanted = Wanted.of(call.config, next(iter(call.caches), None))
        records = [wanted.record() for _ in rows]
        settings = self._sampling(call.config)
        about = replace(about, hands_over=wanted.cache is not None)
        expected = predictions_by_row(predictions, len(rows))
        requests = (
            replace(
                self._request(about, row, ending, call, record),
                past=held,
                options=replace(about.options, predictions=(*about.options.predictions, *of_row)),
                accept=accept_rule(settings, record.around(own_processors(call.processors, row))),
            )
            for row, record, held, of_row in zip(rows, records, past, expected, strict=True)
        )
        ended = self._run(requests, len(rows), ending.stop_ids, call.on_tokens)
        new = [tokens for tokens, _ in ended]
        for row, output in zip(rows, new, strict=True):
            self._tell_of_limit(row.input_ids.shape[1], output, ending)
        sequences = joined(call.input_ids, new, pad)
        if wanted.cache is not None:
            kept = [each for _, each in ended]
            fill(wanted.cache, call, sequences, rows, kept)
        if call.streamer is not None:
            call.streamer.end()
        return wanted.result(sequences, new, records)

    def _tell_of_limit(self, num_prompt_tokens: int, new: list[int], ending: Ending) -> None:
        """Log a warning if an output ended although the call allowed more tokens."""
        is_cut = num_prompt_tokens + len(new) == self._decoder.target.max_length
        is_stopped = bool(new) and new[-1] in ending.stop_ids
        if is_cut and len(new) < ending.max_new_tokens and not is_stopped:
            _log.warning(
                "%s: the output ends at %d tokens, prompt included: further positions are not in "
                "its table, or change those of earlier tokens; continue without drafts",
                type(self._model).__name__,
                num_prompt_tokens + len(new),
            )

    def _check_lengths(self, rows: Sequence[PromptRow], ending: Ending, pad: int | None) -> None:
        """Refuse prompts that the model cannot continue, and outputs that cannot be padded."""
        target = self._decoder.target
        for row in rows:
            try:
                target.checked_prompt(row.input_ids[0].tolist())
            except InvalidPromptError as error:
                raise InvalidPromptError(f"{row.name}: {error}") from error
        rooms = {target.room(row.input_ids.shape[1], ending.max_new_tokens) for row in rows}
        may_differ = len(rooms) > 1 or ending.is_at_any_length
        if pad is None and len(rows) > 1 and may_differ:
            raise UnsupportedGenerationError(
                "outputs may differ in length, but there is no token to pad them with: "
                "pass pad_token_id"
            )

    def _sampling(self, config: GenerationConfig) -> SamplingSettings | None:
        """Return the settings of a sampling call; `None` for greedy decoding.

        The call's processors include the warpers. Torch's generator provides one seed for all rows;
        a row's random numbers also depend on the row's number.
        """
        if not config.do_sample:
            return None
        seed = int(torch.randint(2**63 - 1, ()))
        return SamplingSettings(temperature=1.0, seed=seed, coupled=self._couples)

    def _request(
        self, about: Request, row: PromptRow, ending: Ending, call: Call, record: RowRecord
    ) -> Request:
        """Return the request that decodes a row as if it were alone."""
        prompt = row.input_ids[0].tolist()
        shown = None if record.scores is None else record.scores.rows
        listeners = Listeners(row.input_ids, ending.criteria(row), call.streamer, shown)
        others = ending.others or call.streamer is not None or any(map(_is_own, call.processors))
        return replace(
            about,
            prompt=prompt,
            max_new_tokens=ending.max_new_tokens,
            stop_rule=listeners,
            on_token=listeners.on_token if others else None,
            observer=self.speedup.observer(self._decoder.budget, len(prompt)),
        )

    def _run(
        self,
        requests: Iterable[Request],
        num_rows: int,
        stop_ids: set[int],
        on_tokens: OnTokens | None,
    ) -> list[tuple[list[int], Prefix | None]]:
        """Return each request's output, keys and values; the first failure ends all requests."""
        base = self._decoder
        decoder = Decoder(base.target, base.drafter, base.budget, stop_ids=stop_ids)
        decoder.followers = base.followers
        new: list[list[int]] = [[] for _ in range(num_rows)]
        kept: list[Prefix | None] = [None] * num_rows
        figures: dict[int, Statistics] = {}
        passes: Any = decoder.generate_many(requests, min(num_rows, self._parallel))
        try:
            with closing(passes):
                for generation, tokens in passes:
                    number = generation.number
                    figures[number] = generation.statistics
                    new[number].extend(tokens)
                    if tokens and on_tokens is not None:
                        on_tokens(tokens)
                    if generation.error is not None:
                        raise _told(generation.error, number, num_rows)
                    kept[number] = generation.kept
        except RuntimeError as error:
            if isinstance(error.__cause__, StopIteration):  # a loop would mistake it for its end
                raise error.__cause__ from None
            raise
        finally:
            for each in figures.values():
                self.statistics.add(each)
        return list(zip(new, kept, strict=True))


def foredraft_generate(  # noqa: PLR0913  as `model.generate` calls it
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter | None = None,
    parallel: int = DEFAULT_PARALLEL,
    on_tokens: OnTokens | None = None,
    predictions: RowPredictions = (),
    options: SequenceOptions = DEFAULT,
    drafts: bool = True,
    budget: int | None = None,
    stop_strings: str | list[str] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode with drafts: `model.generate(..., custom_generate=foredraft_generate, drafter=...)`.

    Measured costs are cached for each model while the model exists, but nothing else that a
    `Foredraft` learns is. So prefer a `Foredraft` for a model that is called often. Arguments and
    errors are the same.
    """
    if drafter is None:
        raise UnsupportedGenerationError(
            "foredraft_generate needs a drafter: model.generate(..., drafter=...)"
        )
    return Foredraft(model, drafter, parallel=parallel)(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        on_tokens=on_tokens,
        predictions=predictions,
        options=options,
        drafts=drafts,
        budget=budget,
        stop_strings=stop_strings,
        **model_kwargs,
    )


def _is_own(processor: object) -> bool:
    """Return whether a processor is user code, which may have side effects."""
    return not type(processor).__module__.startswith("transformers.")


def _told(error: Exception, number: int, num_rows: int) -> Exception:
    """Return an error with a note that names the row, if there are several rows."""
    if num_rows > 1:
        error.add_note(f"in row {number} of {num_rows}")
    return error


def _with_readers(
    drafter: Drafter,
    model: PreTrainedModel,
    vocabulary: Vocabulary | None,
    speculator: Path | None,
    assistant: PreTrainedModel | None,
) -> FusedDrafter:
    """Fuse a drafter with recycled logits and, if given, a speculator and an assistant model."""
    if isinstance(drafter, FusedDrafter):
        raise ContradictoryOptionsError(
            "a FusedDrafter takes drafting models itself: "
            "FusedDrafter(..., readers=[load_speculator(path, model)])"
        )
    size = num_embeddings(model)
    known = None if vocabulary is None else vocabulary.size
    readers: list[TreeReader] = []
    if speculator is not None:
        heads = plugged("decoder.plugins.speculators.speculator", "a speculator")
        readers.append(heads.load_speculator(speculator, model, vocabulary=vocabulary))
    if assistant is not None:
        readers.append(ModelReader(DraftModel(assistant, vocabulary_size=known or size)))
    limits = DraftLimits(size, known)
    return FusedDrafter([drafter], limits, readers=readers, recycled=RecycledLogits())


def _costs(model: PreTrainedModel, target: Target) -> CostSurface:
    """Return the costs of a model's passes for its current structure."""
    of_model, key = _curves.setdefault(model, {}), json.dumps(key_of(model))
    if key not in of_model:
        of_model[key] = known_costs(target, model, store_at(None))
    return of_model[key]
