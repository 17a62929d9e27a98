"""A draft model's forward passes: a sequence read on, or nodes of a tree behind it."""

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from decoder.drafters.trimmed_head import trimmed_head
from decoder.errors import UncroppableCacheError
from decoder.target.adapted import adapted
from decoder.target.cache import TreeCache
from decoder.target.compatibility import Capability, compatibility_of, position_limit
from decoder.target.layout import TreeLayout, additive_mask
from retriever.drafter import TokenIds
from retriever.errors import VocabularyMismatchError
from retriever.tree import DraftTree


class DraftModel:
    """A causal language model that reads and expands drafts, whatever sequence they belong to.

    Args:
        model: a decoder-only model of transformers with sdpa or eager attention. It is put
            into evaluation mode.
        vocabulary_size: token ids below it mean the same to this model and to the target; the
            model's own number of embeddings if not given, which may be padded beyond that.
        kept: int32[n], the only tokens to draft, by a head that computes no others; all if not
            given, or where the head is not plain.

    Attributes:
        vocabulary_size: token ids below it may be read and drafted.
        max_length: most tokens of a sequence, `None` where the model states no limit.
        columns: int32[C], the token that each column of the logits stands for.

    Raises:
        UncroppableCacheError: rejected tokens cannot be taken out of the model's state.
        UnsupportedModelError: the model cannot expand trees for another reason.
        VocabularyMismatchError: the model has fewer embeddings than the vocabulary has tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocabulary_size: int | None = None,
        kept: TokenIds | None = None,
    ) -> None:
        layers = _layers(model)
        self._num_layers = len(layers)
        self._windows = dict(layers)
        model, _ = adapted(model, Capability.TREES, pack=True)
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.max_length = position_limit(model.config)
        self.vocabulary_size = _checked_size(model, vocabulary_size)
        self.columns = np.arange(self.vocabulary_size, dtype=np.int32)
        self._head = None
        if kept is not None:
            kept = _checked_kept(kept, self.vocabulary_size)
            self._head = trimmed_head(model, kept)
        if kept is not None and self._head is not None:
            self.columns = kept

    @property
    def name(self) -> str:
        """What the model is called in messages."""
        return str(self._model.config.name_or_path or type(self._model).__name__)

    def new_cache(self) -> TreeCache:
        """Return a cache of one sequence; windows are left to the masks, as branches lie in it."""
        return TreeCache([None] * self._num_layers)

    def read(self, cache: TreeCache, tokens: TokenIds, start: int) -> torch.Tensor:
        """Read a sequence on, behind the `start` tokens of it that the cache holds.

        Args:
            cache: of the sequence.
            tokens: int32[n], at least one.
            start: position of the first.

        Returns:
            [1, C], the logits after the last one.
        """
        if len(tokens) == 1:  # a single row gets no mask from the model, but may have a window
            alone = TreeLayout.of(DraftTree.empty())
            return self.expand(cache, tokens, alone, start)
        positions = np.arange(start, start + len(tokens))
        return self._forward(cache, tokens, positions, None, num_logits=1)

    def expand(
        self, cache: TreeCache, tokens: TokenIds, layout: TreeLayout, past: int
    ) -> torch.Tensor:
        """Read the last nodes of a tree whose other nodes lie in the cache already.

        Args:
            cache: of the sequence, with `past` tokens and the earlier nodes behind them.
            tokens: int32[n], of the last nodes.
            layout: of all nodes W, these among them; depths from 0 for those right behind the
                sequence.
            past: tokens of the sequence.

        Returns:
            [n, C], the logits after each of the nodes.
        """
        device = torch.device(self._model.device)
        visible = torch.from_numpy(layout.visible).to(device)
        depths = torch.from_numpy(layout.depths).to(device)
        dtype = self._model.dtype
        masks = {
            layer_type: additive_mask(visible, depths, past, window, dtype)[:, :, -len(tokens) :]
            for layer_type, window in self._windows.items()
        }
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
        positions = layout.depths[-len(tokens) :] + past
        return self._forward(cache, tokens, positions, mask, num_logits=len(tokens))

    @torch.inference_mode()
    def _forward(
        self,
        cache: TreeCache,
        tokens: TokenIds,
        positions: NDArray[np.int64],
        mask: Any,
        num_logits: int,
    ) -> torch.Tensor:
        device = torch.device(self._model.device)
        arguments = {
            "input_ids": torch.from_numpy(tokens.astype(np.int64))[None].to(device),
            "attention_mask": mask,
            "position_ids": torch.from_numpy(positions)[None].to(device),
            "past_key_values": cache,
            "use_cache": True,
        }
        if self._head is not None:
            states = self._head.base(**arguments).last_hidden_state
            return self._head.logits(states[0, -num_logits:])
        if self._keeps_logits:
            arguments["logits_to_keep"] = num_logits
        logits: torch.Tensor = self._model(**arguments).logits
        return logits[0, -num_logits:, : self.vocabulary_size]


def _layers(model: PreTrainedModel) -> tuple[tuple[str, int | None], ...]:
    """Return type and window of every layer."""
    compatibility = compatibility_of(model)
    if compatibility.capability is not Capability.TREES or compatibility.layers is None:
        raise UncroppableCacheError(
            f"{type(model).__name__} cannot be a draft model, as it cannot expand trees: "
            f"name another one ({compatibility.reason})"
        )
    return compatibility.layers


def _checked_size(model: PreTrainedModel, vocabulary_size: int | None) -> int:
    rows = int(model.get_input_embeddings().get_parameter("weight").shape[0])
    if vocabulary_size is None:
        return rows
    if vocabulary_size > rows:
        raise VocabularyMismatchError(
            f"the draft model {model.config.name_or_path or type(model).__name__} has {rows} "
            f"embeddings, and the target's vocabulary {vocabulary_size} tokens: "
            "draft with a model of the same tokenizer"
        )
    return vocabulary_size


def _checked_kept(kept: TokenIds, vocabulary_size: int) -> TokenIds:
    unique = np.unique(kept).astype(np.int32)
    if len(unique) == 0 or unique[0] < 0 or unique[-1] >= vocabulary_size:
        raise VocabularyMismatchError(
            f"the tokens that a draft model keeps must be some of its {vocabulary_size}"
        )
    return unique
