"""From names and options to a decoder that is ready to run."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from decoder.budget.budget import MeasuredBudget
from decoder.budget.cost_store import CostStore, known_costs
from decoder.drafters.fusion import FusedDrafter
from decoder.drafters.model_drafter import DraftingOptions, ModelDrafter
from decoder.drafters.recycling import RecycledLogits
from decoder.errors import ContradictoryOptionsError
from decoder.loop import Decoder
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
from decoder.sampling.verification import AcceptRule, accept_greedy
from indexer.reader import Index, Vocabulary
from retriever.client.credentials import Credentials
from retriever.client.sharded import ShardedDrafter, connect
from retriever.client.strict import RemoteDrafter
from retriever.drafter import Drafter, TokenIds
from retriever.errors import VocabularyMismatchError
from retriever.follower import DraftLimits
from retriever.predict.phrases import ListedPhrases
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.live_corpora import frequent_tokens
from retriever.sessions.options import check_files


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Which model drafts.

    Attributes:
        name: a hub id, a directory or a `.gguf` file; see `ModelOptions`.
        num_tokens: draft only so many tokens, the most frequent ones of the indexes; all of them
            if not given.
    """

    name: str
    num_tokens: int | None = None

    def check(self, indexes: Sequence[Path]) -> None:
        """Refuse to rank tokens by nothing.

        Raises:
            ContradictoryOptionsError: there are no indexes, and not all tokens are drafted.
        """
        if self.num_tokens is not None and not indexes:
            raise ContradictoryOptionsError(
                "--draft-vocabulary takes the most frequent tokens of an index: "
                "give one with --index"
            )


def load_draft_model(
    options: DraftModelOptions,
    target: LanguageModel,
    indexes: Sequence[Path] = (),
    drafting: DraftingOptions | None = None,
) -> ModelDrafter:
    """Load a draft model for a target, on its device and in its precision.

    Whether the tokenizers agree is checked before any weights are loaded.

    Args:
        options: which model.
        target: the model to draft for.
        indexes: whose frequent tokens a trimmed vocabulary is made of.
        drafting: how it drafts.

    Raises:
        ContradictoryOptionsError: there are no indexes to rank a trimmed vocabulary by.
        VocabularyMismatchError: the models have different tokenizers; the message names both.
        UnsupportedModelError: the model cannot draft.
        ModelLoadError: the files cannot be found or read.
        IndexerError: an index cannot be opened.
    """
    kept = _kept(options, target, indexes)
    parameter = next(target.model.parameters())
    precision = Precision(str(parameter.dtype).removeprefix("torch."))
    prepared = prepare_model(ModelOptions(options.name, str(parameter.device), precision))
    check_draft_vocabulary(prepared, target)
    model = prepared.load().model
    return ModelDrafter(
        model,
        drafting,
        vocabulary_size=target.vocabulary.size,
        target_vocabulary=_num_logits(target),
        kept=kept,
    )


def check_draft_vocabulary(prepared: PreparedModel, target: LanguageModel) -> None:
    """Refuse a draft model of another tokenizer; embeddings may be padded to another size.

    Raises:
        VocabularyMismatchError: the message names both models and vocabularies.
    """
    if prepared.vocabulary.fingerprint != target.vocabulary.fingerprint:
        raise VocabularyMismatchError(
            f"the draft model {prepared.options.name} ({_described(prepared.vocabulary)}) has "
            f"another tokenizer than {target.name} ({_described(target.vocabulary)}): "
            "draft with a smaller model of the same family"
        )


def _kept(
    options: DraftModelOptions, target: LanguageModel, paths: Sequence[Path]
) -> TokenIds | None:
    """Return the tokens to draft: the frequent ones, and those that end a sequence."""
    if options.num_tokens is None:
        return None
    options.check(paths)
    with ExitStack() as stack:
        indexes = [
            stack.enter_context(Index.open(path, vocabulary=target.vocabulary)) for path in paths
        ]
        frequent = frequent_tokens(indexes, options.num_tokens)
    return np.union1d(frequent, np.array(target.stop_ids, np.int32)).astype(np.int32)


def _num_logits(target: LanguageModel) -> int:
    head: torch.nn.Module = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not typed there
    return int(head.get_parameter("weight").shape[0])


def _described(vocabulary: Vocabulary) -> str:
    return f"vocabulary {vocabulary.size}, fingerprint {vocabulary.fingerprint[:12]}\u2026"


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """Where drafts come from: servers, or databases in this process.

    Attributes:
        indexes: directories of indexes to draft from in this process.
        servers: addresses of drafting services, each with a part of a corpus; exclude the others.
        phrases: files of listed phrases to draft from in this process.
        draft_model: a smaller model that drafts, too.
        recycle: whether to draft from what the target itself found likely before, too.
        credentials: what to show to the servers, and whom to trust.

    Raises:
        ContradictoryOptionsError: servers and others are given, or a draft model's vocabulary is
            trimmed without an index.
    """

    indexes: Sequence[Path] = field(default=())
    servers: Sequence[str] = field(default=())
    phrases: Sequence[Path] = field(default=())
    draft_model: DraftModelOptions | None = None
    recycle: bool = True
    credentials: Credentials | None = None

    def __post_init__(self) -> None:
        if self.indexes and self.servers:
            raise ContradictoryOptionsError(
                "--index and --server exclude each other: a server drafts from its own indexes"
            )
        if self.phrases and self.servers:
            raise ContradictoryOptionsError(
                "--phrases and --server exclude each other: list them where the server starts"
            )
        if self.draft_model is not None:
            self.draft_model.check(self.indexes)

    def check(self, vocabulary: Vocabulary | None = None) -> None:
        """Open the files for a moment: what is wrong with them need not wait for a model to load.

        Args:
            vocabulary: of the model's tokenizer, once that is known.

        Raises:
            IndexerError: an index cannot be opened or was built for another tokenizer.
            PhrasesError: a file of phrases cannot be read.
        """
        check_files(self.indexes, self.phrases, vocabulary)

    def describe(self) -> str:
        """Return a few words for reports."""
        if self.servers:
            parts = [f"server {', '.join(self.servers)}"]
        else:
            parts = ["context", "generations", *map(str, [*self.phrases, *self.indexes])]
        if self.recycle:
            parts.append("recycled logits")
        if self.draft_model is not None:
            parts.append(f"draft model {self.draft_model.name}")
        return ", ".join(parts)

    @contextmanager
    def connect(self, language_model: LanguageModel) -> Iterator[Drafter]:
        """Have a drafter for a model's vocabulary during the block.

        Raises:
            IndexerError: an index cannot be opened or was built for another tokenizer.
            VocabularyMismatchError: the draft model has another tokenizer.
        """
        models: list[Drafter] = []
        if self.draft_model is not None:
            models.append(load_draft_model(self.draft_model, language_model, self.indexes))
        retrieval = self._retrieval(language_model)
        try:
            if self.recycle or models:
                recycled = RecycledLogits() if self.recycle else None
                limits = draft_limits(language_model)
                with FusedDrafter([retrieval], limits, models=models, recycled=recycled) as fused:
                    yield fused
            else:
                yield retrieval
        finally:
            retrieval.shut_down()

    def _retrieval(
        self, language_model: LanguageModel
    ) -> EmbeddedDrafter | RemoteDrafter | ShardedDrafter:
        vocabulary = language_model.vocabulary
        if self.servers:
            return connect(
                self.servers,
                vocabulary_fingerprint=vocabulary.fingerprint,
                credentials=self.credentials,
            )
        phrases = self._listed(language_model, vocabulary.size)
        drafter = EmbeddedDrafter.open_indexes(self.indexes, vocabulary=vocabulary, phrases=phrases)
        drafter.warm()
        return drafter

    def _listed(self, language_model: LanguageModel, vocabulary_size: int) -> ListedPhrases | None:
        """Load the listed phrases and say on standard error what was loaded."""
        if not self.phrases:
            return None
        encode = partial(language_model.tokenizer.encode, add_special_tokens=False)
        phrases = ListedPhrases.load(self.phrases, encode, vocabulary_size)
        for line in phrases.summary():
            print(line, file=sys.stderr)  # noqa: T201  (for whoever starts the command)
        return phrases


def draft_limits(language_model: LanguageModel) -> DraftLimits:
    """Return which tokens a model and drafters of its tokenizer know."""
    embeddings = language_model.model.get_input_embeddings().get_parameter("weight")
    return DraftLimits(int(embeddings.shape[0]), language_model.vocabulary.size)


def draft_model_options(name: str | None, num_tokens: int | None) -> DraftModelOptions | None:
    """Return which model drafts, `None` where none is named.

    Raises:
        ContradictoryOptionsError: a vocabulary is trimmed for no model.
    """
    if name is not None:
        return DraftModelOptions(name, num_tokens)
    if num_tokens is not None:
        raise ContradictoryOptionsError("--draft-vocabulary needs a model to trim: --draft-model")
    return None


def assemble(
    language_model: LanguageModel,
    drafter: Drafter,
    accept: AcceptRule = accept_greedy,
    *,
    costs: CostStore | None = None,
) -> Decoder:
    """Build a decoder that knows what its model's passes cost.

    Args:
        language_model: the target.
        drafter: whose guesses it verifies.
        accept: which of them are kept.
        costs: where what was measured is kept for the next start; `None` to measure always.

    Warns where the model's generation_config asks for what the rule does not do.

    Raises:
        UnsupportedModelError: the model cannot be decoded here.
    """
    target = Target(language_model.model)
    unapplied = unapplied_settings(language_model.model, language_model.stop_ids, accept)
    if unapplied:
        stated = ", ".join(f"{name}={value}" for name, value in unapplied.items())
        warnings.warn(
            f"the model's generation_config sets {stated}, which is not applied: "
            "the output is that of model.generate without it",
            stacklevel=2,
        )
    return Decoder(
        target,
        drafter,
        MeasuredBudget(known_costs(target, language_model.model, costs)),
        accept,
        language_model.stop_ids,
        drafter_vocabulary=language_model.vocabulary.size,
    )


def pattern_of(language_model: LanguageModel, regex: str | None) -> Grammar | None:
    """Return what an output of a model shall match, `None` where it may be anything.

    Raises:
        InvalidConstraintError: the expression cannot be followed.
    """
    if regex is None:
        return None
    return Grammar.of_regex(regex, language_model.tokenizer, language_model.stop_ids)


def own_rule(
    language_model: LanguageModel, settings: SamplingSettings, pattern: Grammar | None = None
) -> AcceptRule:
    """Return the rule for some settings, completed by what the model's generation_config states.

    Args:
        language_model: whose generation_config and tokenizer count.
        settings: how tokens are chosen.
        pattern: what the whole output shall match.

    Raises:
        InvalidSettingsError: the generation_config states a value out of its range.
    """
    model, stop_ids = language_model.model, language_model.stop_ids
    stated = getattr(model, "generation_config", None)
    if stated is not None:
        settings = settings.completed(stated)
    return accept_rule(settings, stated_processors(model, stop_ids), pattern)
