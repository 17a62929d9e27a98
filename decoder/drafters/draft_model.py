"""A draft model's forward passes, its cache of branches, and a head cut to frequent tokens.

A pass either reads new tokens of a sequence or expands nodes of a tree behind it. `BranchCache`
keeps the keys and values of drafted nodes, so that those that come true are not read again.

The trimmed head computes logits for the frequent part of the vocabulary only: most of a small
model's time goes into its head, and most tokens that it drafts are frequent (FR-Spec, Zhao et al.,
2025, arXiv:2502.14856). The output does not change, because the target verifies every draft.
"""

from collections.abc import Sequence
from logging import getLogger
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import PreTrainedModel

from decoder.errors import UncroppableCacheError, UnsupportedModelError
from decoder.model.cache import TreeCache
from decoder.model.compatibility import (
    Capability,
    common_window,
    compatibility_of,
    num_embeddings,
    position_limit,
)
from decoder.model.ranks import refuse_shared
from decoder.model.tree_rows import TreeRows
from decoder.model.user_model import UserModel, is_spread
from indexer.reader import COUNT_VALUES, Index
from retriever.drafter import TokenIds
from retriever.errors import VocabularyMismatchError
from retriever.sessions.bindings import shared_vocabulary
from retriever.tree import ROOT

_log = getLogger(__name__)

_ROUNDING: Final = 16
"""In units of the dtype's precision: by how much two ways to the same logits may differ."""

_PROBE_TOKENS: Final = 4
"""Tokens of the pass that compares both ways: a few rows show a difference, and cost little."""

_HIDDEN_CHANGES: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings that change logits behind the head, which a probe may be too small to show."""


class TrimmedHead:
    """A model without its head, and the rows of the head for some tokens.

    Args:
        model: whose head is plain, see `has_plain_head`.
        kept: int32[n], the tokens.
    """

    def __init__(self, model: PreTrainedModel, kept: TokenIds) -> None:
        head = _head(model)
        rows = torch.from_numpy(kept.astype(np.int64)).to(head.weight.device)
        self._weight = head.weight.detach()[rows]
        self._bias = None if head.bias is None else head.bias.detach()[rows]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return [rows, n], the logits of the kept tokens after states [rows, hidden size]."""
        return functional.linear(states, self._weight, self._bias)


def trimmed_head(model: PreTrainedModel, kept: TokenIds) -> TrimmedHead | None:
    """Return a model's head for some tokens; `None`, with a warning, where it is not plain."""
    if has_plain_head(model):
        return TrimmedHead(model, kept)
    _log.warning(
        "%s changes logits behind its head: it drafts with its whole vocabulary",
        type(model).__name__,
    )
    return None


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether logits are the last hidden states times one matrix, and nothing more."""
    head = _head(model)
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) not in {None, 1.0} for name in _HIDDEN_CHANGES):
        return False
    probe = torch.arange(_PROBE_TOKENS, device=torch.device(model.device))[None]
    states = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
    if states.shape[-1] != head.in_features:
        return False
    plain, actual = head(states), model(input_ids=probe, use_cache=False).logits
    slack = _ROUNDING * torch.finfo(actual.dtype).eps * float(actual.abs().max())
    return plain.shape == actual.shape and bool(torch.allclose(plain, actual, rtol=0, atol=slack))


def _head(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not typed there


def _check_placing(model: PreTrainedModel) -> None:
    """Refuse a draft model that does not lie in one process, on one device.

    Raises:
        UnsupportedModelError: the message says how to load it.
    """
    refuse_shared(model, "No drafts come from a")
    if is_spread(model):
        raise UnsupportedModelError(
            f"the draft model, {type(model).__name__}, lies on several devices: load it on one, "
            "such as with device_map={'': 0}"
        )


class DraftModel:
    """A causal language model that reads sequences and expands drafts; holds no sequence itself.

    Args:
        model: a decoder-only model of transformers with sdpa or eager attention. Its modules run
            as they are at each pass.
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
        _check_placing(model)
        layers = _layers(model)
        self._num_layers = len(layers)
        self._model = model
        self._user = UserModel(model, window=common_window(dict(layers)))
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
        """The model's name in messages."""
        return str(self._model.config.name_or_path or type(self._model).__name__)

    def new_cache(self) -> TreeCache:
        """Return a cache of one sequence without windows: masks apply those, branches included."""
        return TreeCache([None] * self._num_layers)

    def read(self, cache: TreeCache, tokens: TokenIds, start: int) -> torch.Tensor:
        """Read the next tokens of a sequence, of which the cache holds the first `start`.

        Args:
            cache: of the sequence.
            tokens: int32[n], at least one.
            start: position of the first.

        Returns:
            [1, C], the logits after the last one.
        """
        if len(tokens) == 1:  # a single row gets no mask from the model, but may have a window
            return self.expand(cache, tokens, TreeRows.in_line(1, start))
        positions = np.arange(start, start + len(tokens))
        return self._forward(cache, tokens, positions, None, num_logits=1)

    def expand(self, cache: TreeCache, tokens: TokenIds, rows: TreeRows) -> torch.Tensor:
        """Read the last nodes of a tree whose other nodes lie in the cache already.

        Args:
            cache: of the sequence, with its tokens and the earlier nodes behind them.
            tokens: int32[n], of the last nodes.
            rows: of the tree, n of them read.

        Returns:
            [n, C], the logits after each of the nodes.
        """
        return self._forward(cache, tokens, rows.positions, rows, num_logits=len(tokens))

    @torch.no_grad()
    def _forward(
        self,
        cache: TreeCache,
        tokens: TokenIds,
        positions: NDArray[np.int64],
        rows: TreeRows | None,
        num_logits: int,
    ) -> torch.Tensor:
        device = self._user.device
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(tokens.astype(np.int64))[None].to(device),
            "position_ids": torch.from_numpy(positions)[None].to(device),
        }
        if self._head is not None:
            states = self._user.run_base(rows, cache, **inputs).last_hidden_state
            return self._head.logits(states[0, -num_logits:])
        if self._user.takes("logits_to_keep"):
            inputs["logits_to_keep"] = num_logits
        logits: torch.Tensor = self._user.run(rows, cache, **inputs).logits
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
    rows = num_embeddings(model)
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


class BranchCache:
    """The draft model's cache of one sequence: drafted nodes that came true are not read again.

    Args:
        model: whose keys and values these are.
    """

    _rows: TreeRows

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._cache = model.new_cache()
        self._length = 0
        self._drop_branches()

    @torch.no_grad()
    def catch_up(self, tokens: TokenIds) -> torch.Tensor:
        """Read the tokens of a sequence that the cache lacks.

        Keeps the branch that the sequence took and drops all others.

        Args:
            tokens: int32[n], the whole sequence, at least one token; it begins with what was
                given the last time.

        Returns:
            [1, C], the logits after its last token.
        """
        kept = self._followed(tokens[self._length : -1])
        self._keep(kept, min(self._length, len(tokens) - 1))
        logits = self._model.read(self._cache, tokens[self._length :], self._length)
        self._length = len(tokens)
        self._drop_branches()
        return logits

    def expand(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        """Read nodes behind the sequence in one pass.

        Args:
            tokens: of n nodes.
            parents: their parents, numbered in the order in which they were read since the last
                `catch_up`, or `ROOT`; some may be among the n nodes, each before its children.

        Returns:
            [n, C], the logits after each node.
        """
        rows = self._rows.extended(parents)
        logits = self._model.expand(self._cache, np.array(tokens, np.int32), rows)
        self._rows = rows
        self._parents.extend(parents)
        self._tokens.extend(tokens)
        return logits

    def _drop_branches(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._rows = TreeRows.of((), self._length)

    def _followed(self, tokens: TokenIds) -> list[int]:
        """Return the rows of the branch that new tokens of the sequence match."""
        rows = {edge: row for row, edge in enumerate(zip(self._parents, self._tokens, strict=True))}
        path: list[int] = []
        row = ROOT
        for token in tokens.tolist():
            found = rows.get((row, token))
            if found is None:
                break
            path.append(row := found)
        return path

    def _keep(self, path: list[int], length: int) -> None:
        """Keep the first `length` tokens, followed by the rows of a path."""
        if path:
            device = self._cache.growing_layers[0].device
            self._cache.keep(length, torch.tensor(path, device=device) + length)
        else:
            self._cache.truncate(length)
        self._length = length + len(path)


def frequent_tokens(indexes: Sequence[Index], size: int) -> TokenIds:
    """Return the most frequent tokens of open indexes.

    A draft model that computes these alone drafts faster and hardly less (FR-Spec: Zhao et al.,
    2025, arXiv:2502.14856). Counts are rounded as in phrase tables, of single tokens by 6% at most;
    of equally frequent tokens the lowest ids are taken.

    Args:
        indexes: of one vocabulary.
        size: how many tokens.

    Returns:
        int32[n], rising; fewer than `size` where fewer occur.

    Raises:
        InvalidRequestError: the indexes are of several vocabularies.
    """
    shared = shared_vocabulary(indexes, None)
    if shared is None:
        return np.empty(0, np.int32)
    counts = np.zeros(shared.size)
    for index in indexes:
        counts += COUNT_VALUES[index.phrases.counts[0]]
    order = np.argsort(-counts, kind="stable")[: min(size, np.count_nonzero(counts))]
    return np.sort(order).astype(np.int32)
