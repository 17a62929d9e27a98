"""Building a decoder from names and options: draft sources, draft model, acceptance rule."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Final

import numpy as np

from decoder.budget.budget import MeasuredBudget
from decoder.budget.cost_store import CostStore, known_costs
from decoder.drafters.asking import StepCosts
from decoder.drafters.draft_model import DraftModel, ModelReader, frequent_tokens
from decoder.drafters.drawing import DrawnFusion, Draws
from decoder.drafters.following import states_of
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.keeping import kept_logits
from decoder.drafters.options import WITHOUT_INDEX, DraftOptions
from decoder.drafters.readers import TreeReader
from decoder.drafters.recycling import RecycledLogits
from decoder.errors import refuse_contradictions
from decoder.loop import Decoder
from decoder.model.capability_check import FOUND_HERE
from decoder.model.pretrained import (
    LanguageModel,
    ModelOptions,
    Precision,
    PreparedModel,
    prepare_model,
)
from decoder.model.target import Target
from decoder.sampling.constraint import Grammar
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.stated import stated_processors, unapplied_settings
from decoder.sampling.verification import AcceptRule, SelectingRule, accept_greedy
from indexer.launch import plugged
from indexer.reader import Index, Vocabulary
from retriever.client.connecting import connect
from retriever.client.resilient import ResilientDrafter
from retriever.client.shared_findings import SharedFindings
from retriever.client.strict import RemoteDrafter
from retriever.drafter import Drafter, FindingsStore, TokenIds
from retriever.errors import VocabularyMismatchError
from retriever.follower import DraftLimits
from retriever.limits import Limits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.options import check_files, load_phrases

_log = getLogger(__name__)

HEADS: Final = "decoder.plugins.speculators"
"""The plugin of drafting heads."""


def load_draft_reader(
    name: str,
    target: LanguageModel,
    indexes: Sequence[Path] = (),
    num_tokens: int | None = None,
) -> ModelReader:
    """Load a draft model that extends fused drafts, on the target's device and in its dtype.

    The tokenizers are compared before any weights are loaded.

    Args:
        name: a hub id, a directory or a `.gguf` file; see `ModelOptions`.
        target: the model to draft for.
        indexes: folders of the indexes whose frequent tokens make up a trimmed vocabulary.
        num_tokens: number of tokens in the trimmed vocabulary, which are the indexes' most frequent
            tokens; `None` for the full vocabulary.

    Raises:
        ContradictoryOptionsError: the vocabulary is to be trimmed, but no index is given to count
            its tokens.
        VocabularyMismatchError: the models have different tokenizers; the message names both
            models.
        UnsupportedModelError: the model cannot draft.
        ModelLoadError: the model's files cannot be found or read.
        IndexerError: an index cannot be opened.
    """
    kept = _kept(num_tokens, target, indexes)
    parameter = next(target.model.parameters())
    precision = Precision(str(parameter.dtype).removeprefix("torch."))
    prepared = prepare_model(ModelOptions(name, str(parameter.device), precision))
    check_draft_vocabulary(prepared, target)
    drafting = DraftModel(prepared.load().model, vocabulary_size=target.vocabulary.size, kept=kept)
    return ModelReader(drafting)


def check_draft_vocabulary(prepared: PreparedModel, target: LanguageModel) -> None:
    """Refuse a draft model with another tokenizer; its embeddings may be padded differently.

    Raises:
        VocabularyMismatchError: the message names both models and vocabularies.
    """
    if prepared.vocabulary.fingerprint != target.vocabulary.fingerprint:
        raise VocabularyMismatchError(
            f"the draft model ({prepared.vocabulary.describe()}) has "
            f"a different tokenizer from the model ({target.vocabulary.describe()}): "
            "draft with a smaller model of the same family"
        )


def _kept(num_tokens: int | None, target: LanguageModel, paths: Sequence[Path]) -> TokenIds | None:
    """Return the tokens to draft: the frequent tokens and those that end a sequence."""
    if num_tokens is None:
        return None
    refuse_contradictions((not paths, WITHOUT_INDEX))
    with ExitStack() as stack:
        indexes = [
            stack.enter_context(Index.open(path, vocabulary=target.vocabulary)) for path in paths
        ]
        frequent = frequent_tokens(indexes, num_tokens)
    return np.union1d(frequent, np.array(target.stop_ids, np.int32)).astype(np.int32)


def check_drafts(drafts: DraftOptions, vocabulary: Vocabulary | None = None) -> None:
    """Check the files of the draft sources, so that errors show before a model loads.

    Args:
        drafts: the sources of drafts.
        vocabulary: vocabulary of the model's tokenizer, once it is known.

    Raises:
        IndexerError: an index cannot be opened or was built for another tokenizer.
        PhrasesError: a file of phrases cannot be read.
        CredentialsError: a token or certificate for a service cannot be read.
        HeadFileError: the speculator cannot be read.
    """
    drafts.shown_credentials()
    check_files(drafts.index, drafts.phrases, vocabulary)
    if drafts.speculator is not None:
        plugged(f"{HEADS}.head_files", "--speculator").check_head(drafts.speculator)


@contextmanager
def connect_drafter(
    drafts: DraftOptions,
    language_model: LanguageModel,
    sampling: SamplingSettings | None = None,
    costs: StepCosts | None = None,
) -> Iterator[Drafter]:
    """Open a drafter for a model's vocabulary; it closes when the block ends.

    Args:
        drafts: the sources of drafts.
        language_model: the target.
        sampling: sampling settings of the output; with `draft_sampling`, drafts are sampled with
            them too.
        costs: seconds of the target's and the draft models' passes; measured if not given.

    Raises:
        IndexerError: an index cannot be opened or was built for another tokenizer.
        StateError: the state directory cannot be used.
        VocabularyMismatchError: the draft model, or what the folder `state` holds, was made for
            another tokenizer.
    """
    with ExitStack() as opened:
        readers = draft_readers(drafts, language_model)
        for reader in readers:
            if isinstance(reader, AbstractContextManager):  # one that learns
                opened.enter_context(reader)
        retrieval = _retrieval(drafts, language_model)
        opened.callback(retrieval.shut_down)
        if drafts.recycle or readers:
            recycled = _recycled(drafts, language_model, retrieval, opened)
            fusion = fusion_for(drafts, language_model, sampling)
            yield fusion([retrieval], readers=readers, recycled=recycled, costs=costs)
        else:
            yield retrieval


def draft_readers(drafts: DraftOptions, language_model: LanguageModel) -> list[TreeReader]:
    """Load the speculator and the draft model that extend drafts, in this order.

    Raises:
        HeadFileError: the speculator cannot be read.
        HeadMismatchError: the speculator was made for another model.
        VocabularyMismatchError: the draft model or the speculator has another tokenizer.
    """
    readers: list[TreeReader] = []
    if drafts.speculator is not None:
        readers.append(_speculator(drafts, language_model))
    if drafts.draft_model is not None:
        trimmed = drafts.draft_vocabulary
        readers.append(load_draft_reader(drafts.draft_model, language_model, drafts.index, trimmed))
    return readers


def fusion_for(
    drafts: DraftOptions, language_model: LanguageModel, sampling: SamplingSettings | None
) -> Callable[..., FusedDrafter]:
    """Return a constructor for the drafter that fuses drafts, and samples them if settings say so.

    Args:
        drafts: the sources of drafts.
        language_model: the target.
        sampling: sampling settings of the output, if any.

    Returns:
        A callable that takes the arguments of `FusedDrafter` except `limits`.
    """
    limits, draws = draft_limits(language_model), draws_for(drafts, language_model, sampling)
    if draws is None:
        return partial(FusedDrafter, limits=limits)
    return partial(DrawnFusion, limits=limits, draws=draws)


def draws_for(
    drafts: DraftOptions, language_model: LanguageModel, sampling: SamplingSettings | None
) -> Draws | None:
    """Return how drafts are sampled, from the output's settings; `None` if they are not sampled.

    Args:
        drafts: the sources of drafts.
        language_model: the target; its generation_config completes the settings.
        sampling: sampling settings of the output, if any.
    """
    if not drafts.draft_sampling or sampling is None or sampling.is_greedy:
        return None
    stated = getattr(language_model.model, "generation_config", None)
    if stated is not None:
        sampling = sampling.completed(stated)
    return Draws(
        sampling.temperature,
        sampling.top_k or None,
        1.0 if sampling.top_p is None else sampling.top_p,
        secrets.randbits(64) if sampling.seed is None else sampling.seed,
    )


def _speculator(drafts: DraftOptions, language_model: LanguageModel) -> TreeReader:
    load = plugged(f"{HEADS}.speculator", "--speculator").load_speculator
    if drafts.online is not None:
        training = plugged("decoder.plugins.training.online", "--online", needs=(HEADS,))
        learning = training.LearningSpeculator
        load = partial(learning, share=drafts.online_share, folder=drafts.online)
    reader: TreeReader = load(
        drafts.speculator,
        model=language_model.model,
        vocabulary=language_model.vocabulary,
        name=language_model.name,
        kept=_kept(drafts.draft_vocabulary, language_model, drafts.index),
    )
    return reader


def _recycled(
    drafts: DraftOptions, language_model: LanguageModel, retrieval: Drafter, opened: ExitStack
) -> RecycledLogits | None:
    """Return recycled logits; a store for them, if any, stays open until `opened` closes."""
    if not drafts.recycle:
        return None
    recycled, vocabulary = RecycledLogits(), language_model.vocabulary
    store: FindingsStore | None = None
    if drafts.recycled_bytes and drafts.server:
        store = opened.enter_context(
            SharedFindings(
                drafts.server,
                vocabulary_fingerprint=vocabulary.fingerprint,
                credentials=drafts.shown_credentials(),
            )
        )
    elif drafts.recycled_bytes and drafts.state and isinstance(retrieval, EmbeddedDrafter):
        store = retrieval.state
    if store is not None:
        model, most = language_model.model, drafts.recycled_bytes
        opened.enter_context(kept_logits(recycled, store, model, vocabulary, max_bytes=most))
    return recycled


def _retrieval(
    drafts: DraftOptions, language_model: LanguageModel
) -> EmbeddedDrafter | RemoteDrafter | ResilientDrafter:
    vocabulary = language_model.vocabulary
    if drafts.server:
        return connect(
            drafts.server,
            vocabulary_fingerprint=vocabulary.fingerprint,
            credentials=drafts.shown_credentials(),
        )
    encode = partial(language_model.tokenizer.encode, add_special_tokens=False)
    drafter = EmbeddedDrafter.open_indexes(
        drafts.index,
        vocabulary=vocabulary,
        phrases=load_phrases(drafts.phrases, encode, vocabulary),
        state=drafts.state,
        limits=Limits(recycled_bytes=drafts.recycled_bytes),
    )
    drafter.warm()
    return drafter


def draft_limits(language_model: LanguageModel) -> DraftLimits:
    """Return the vocabulary sizes of a model and of drafters with its tokenizer."""
    embeddings = language_model.model.get_input_embeddings().get_parameter("weight")
    return DraftLimits(int(embeddings.shape[0]), language_model.vocabulary.size)


@dataclass(frozen=True, slots=True)
class Extent:
    """The largest workload to prepare for.

    Attributes:
        num_tokens: most tokens of one sequence, prompt and output together.
        num_places: most sequences decoded at the same time.
    """

    num_tokens: int
    num_places: int = 1


def assemble(  # noqa: PLR0913  all but the first three are options
    language_model: LanguageModel,
    drafter: Drafter,
    accept: AcceptRule = accept_greedy,
    *,
    costs: CostStore | None = None,
    num_ahead: int = 0,
    prepared: Extent | None = None,
) -> Decoder:
    """Build a decoder that knows the costs of its model's passes.

    Args:
        language_model: the target.
        drafter: the drafter that proposes drafts.
        accept: the rule that accepts or rejects drafted tokens.
        costs: stores measured costs for the next start; `None` to measure at every start.
        num_ahead: number of likely outcomes of a pass for which the drafter drafts while the pass
            runs; see `Decoder`.
        prepared: the workload for which memory is allocated and CUDA graphs are captured now; see
            `Target.prepare`.

    Logs a warning if the model's generation_config sets options that `accept` does not apply.

    Raises:
        UnsupportedModelError: no sequence can be decoded with the model; the message gives the
            reason.
        OutOfMemoryError: there is not enough memory for the workload `prepared`.
    """
    target = Target(
        language_model.model,
        states=states_of(drafter),
        reuse_prefixes=True,  # the model was loaded here, so nothing else changes it
        verdicts=costs or FOUND_HERE,
    )
    warn_of_unapplied(language_model, accept)
    budget = MeasuredBudget(known_costs(target, language_model.model, costs))
    if prepared is not None:  # last, because measuring long contexts may replace the memory
        target.prepare(prepared.num_tokens, prepared.num_places)
        if isinstance(accept, SelectingRule) and accept.drawing is not None:
            target.prepare_drawing(accept.drawing)
    return Decoder(
        target,
        drafter,
        budget,
        accept,
        language_model.stop_ids,
        drafter_vocabulary=language_model.vocabulary.size,
        num_ahead=num_ahead,
    )


def warn_of_unapplied(language_model: LanguageModel, accept: AcceptRule) -> None:
    """Log a warning if the model's generation_config sets options that the rule does not apply."""
    unapplied = unapplied_settings(language_model.model, language_model.stop_ids, accept)
    if unapplied:
        _log.warning(
            "the model's generation_config sets %s, which is not applied: "
            "the output is that of model.generate without it",
            ", ".join(f"{name}={value}" for name, value in unapplied.items()),
        )


def grammar_for(language_model: LanguageModel, grammar: str | None) -> Grammar | None:
    """Return the constraint of a grammar for a model's tokens; `None` if there is no grammar.

    Raises:
        InvalidConstraintError: the grammar is too large, or the tokenizer is not a fast tokenizer.
    """
    if grammar is None:
        return None
    return Grammar.of(grammar, language_model.tokenizer, language_model.stop_ids)


def own_rule(
    language_model: LanguageModel, settings: SamplingSettings, pattern: Grammar | None = None
) -> AcceptRule:
    """Return the accept rule for sampling settings, completed by the model's generation_config.

    Args:
        language_model: the target; its generation_config and tokenizer are used.
        settings: the sampling settings, which say how tokens are chosen.
        pattern: grammar that the whole output must match.

    Raises:
        InvalidSettingsError: the generation_config sets a value that is out of its range.
    """
    model, stop_ids = language_model.model, language_model.stop_ids
    stated = getattr(model, "generation_config", None)
    if stated is not None:
        settings = settings.completed(stated)
    return accept_rule(settings, stated_processors(model, stop_ids), pattern)
