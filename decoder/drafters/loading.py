"""Loading a draft model that fits a target."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from decoder.drafters.model_drafter import DraftingOptions, ModelDrafter
from decoder.errors import ContradictoryOptionsError
from decoder.models import LanguageModel, ModelOptions, Precision, PreparedModel, prepare_model
from indexer.reader import Index, Vocabulary
from retriever.drafter import TokenIds
from retriever.errors import VocabularyMismatchError
from retriever.ranking import frequent_tokens


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
