"""A draft model that extends draft trees, optionally with logits for frequent tokens only.

A pass reads either new tokens of a sequence or nodes of the draft tree after it. `ModelReading`
caches the keys and values of drafted nodes, so that accepted nodes are not read again.

A trimmed output layer computes logits only for the frequent part of the vocabulary. A small model
spends most of its time in its output layer, and most tokens that it drafts are frequent (FR-Spec,
Zhao et al., 2025, arXiv:2502.14856). The output does not change, because the target verifies every
draft.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from logging import getLogger
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from decoder.drafters.following import Verified
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
from retriever.errors import DrafterUnavailableError, VocabularyMismatchError
from retriever.sequences import TokenSequence
from retriever.sessions.bindings import shared_vocabulary
from retriever.tree import ROOT, Source

_log = getLogger(__name__)

_ROUNDING: Final = 16
"""Largest allowed difference between the same logits computed in two ways, in units of the dtype's
epsilon."""

_PROBE_TOKENS: Final = 4
"""Tokens in the pass that compares the two ways: a few rows are enough to show a difference, and
cost little."""

_HIDDEN_CHANGES: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Model settings that change logits after the output layer; the comparison may be too small to show
their effect."""


_MAX_CACHES: Final = 4
"""Most sequences whose keys and values are cached. The least recently used sequence is evicted, and
read again when it next needs a draft."""


def trimmed_head(
    model: PreTrainedModel, kept: TokenIds
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return an output layer that computes only the logits of the tokens `kept`, int32[n].

    It maps hidden states [rows, hidden size] to logits [rows, n]. Returns `None` and logs a warning
    if the model's own output layer is not plain; see `has_plain_head`.
    """
    if not has_plain_head(model):
        _log.warning(
            "%s changes logits after its head: it drafts with its whole vocabulary",
            type(model).__name__,
        )
        return None
    head = _head(model)
    rows = torch.from_numpy(kept.astype(np.int64)).to(head.weight.device)
    bias = None if head.bias is None else head.bias.detach()[rows]
    return partial(functional.linear, weight=head.weight.detach()[rows], bias=bias)


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether the model's logits are just its last hidden states times one matrix."""
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
    """Refuse a draft model that is spread over several processes or devices.

    Raises:
        UnsupportedModelError: the message says how to load the model.
    """
    refuse_shared(model, "No drafts come from a")
    if is_spread(model):
        raise UnsupportedModelError(
            f"the draft model, {type(model).__name__}, lies on several devices: load it on one, "
            "such as with device_map={'': 0}"
        )


class DraftModel:
    """A causal language model that expands drafts; it stores no state of sequences.

    Args:
        model: a decoder-only transformers model with sdpa or eager attention. Each pass runs the
            model's modules in their current state.
        vocabulary_size: token ids below this size mean the same to this model and the target. By
            default, it is the model's number of embeddings, which may be padded.
        kept: int32[n], the only tokens to draft; no other logits are computed. If it is not given,
            or the model's output layer is not plain, all tokens are drafted.

    Attributes:
        vocabulary_size: token ids below this size may be read and drafted.
        max_length: most tokens of a sequence; `None` if the model's config sets no limit.
        columns: int32[C], the token id of each column of the logits.

    Raises:
        UncroppableCacheError: rejected tokens cannot be removed from the model's state.
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
        """Return an untrimmed cache for one sequence; masks apply sliding windows."""
        return TreeCache([None] * self._num_layers)

    @torch.no_grad()
    def read(
        self, cache: TreeCache, tokens: TokenIds, start: int, rows: TreeRows | None = None
    ) -> torch.Tensor:
        """Read the next tokens of a sequence, or the last nodes of a tree after it.

        Args:
            cache: the sequence's cache, which holds everything before these tokens.
            tokens: int32[n], ids of the tokens to read, n at least 1.
            start: number of the sequence's tokens that the cache holds.
            rows: rows of the tree, of which the last n are read; `None` to read the sequence
                itself.

        Returns:
            [n, C], the logits after each node; for tokens of the sequence [1, C], the logits after
            the last token.
        """
        num_logits = 1 if rows is None else len(tokens)
        if len(tokens) == 1 and rows is None:  # without rows no mask applies a window
            rows = TreeRows.in_line(1, start)
        positions = np.arange(start, start + len(tokens)) if rows is None else rows.positions
        device = self._user.device
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(tokens.astype(np.int64))[None].to(device),
            "position_ids": torch.from_numpy(positions)[None].to(device),
        }
        if self._head is not None:
            states = self._user.run_base(rows, cache, **inputs).last_hidden_state
            return self._head(states[0, -num_logits:])
        if self._user.takes("logits_to_keep"):
            inputs["logits_to_keep"] = num_logits
        logits: torch.Tensor = self._user.run(rows, cache, **inputs).logits
        return logits[0, -num_logits:, : self.vocabulary_size]


def _layers(model: PreTrainedModel) -> tuple[tuple[str, int | None], ...]:
    """Return the type and the sliding window of every layer."""
    compatibility = compatibility_of(model)
    if compatibility.capability is not Capability.TREES or compatibility.layers is None:
        raise UncroppableCacheError(
            f"{type(model).__name__} cannot be a draft model, because it cannot expand trees: "
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
            f"embeddings, but the target's vocabulary has {vocabulary_size} tokens: "
            "draft with a model that has the same tokenizer"
        )
    return vocabulary_size


def _checked_kept(kept: TokenIds, vocabulary_size: int) -> TokenIds:
    unique = np.unique(kept).astype(np.int32)
    if len(unique) == 0 or unique[0] < 0 or unique[-1] >= vocabulary_size:
        raise VocabularyMismatchError(
            f"a trimmed vocabulary must hold at least one token id, all below {vocabulary_size}"
        )
    return unique


class ModelReader:
    """A `TreeReader` with a draft model, which reads whole trees in one pass.

    Args:
        model: the draft model, with the target's vocabulary.
        max_caches: most sequences whose keys and values are cached.
    """

    max_depth: int | None = None
    reads_paths = True
    states = frozenset[int]()
    source = Source.MODEL

    def __init__(self, model: DraftModel, max_caches: int = _MAX_CACHES) -> None:
        self.model = model
        self.name = f"draft model {model.name}"
        self.columns = model.columns
        self._max_caches = max_caches
        self._cached: OrderedDict[ModelReading, None] = OrderedDict()

    def follow(self, sequence: TokenSequence) -> "ModelReading":
        """Return the draft model's state for a sequence; see `TreeReader`."""
        return ModelReading(self, sequence)

    def keep(self, reading: "ModelReading") -> None:
        """Mark a sequence's cache as used; beyond the limit, evict the least recently used."""
        self._cached[reading] = None
        self._cached.move_to_end(reading)
        if len(self._cached) > self._max_caches:
            next(iter(self._cached)).close()

    def forget(self, reading: "ModelReading") -> None:
        """Record that a sequence's keys and values were dropped."""
        self._cached.pop(reading, None)


class ModelReading:
    """A draft model's state for one sequence and its draft tree; see `SequenceReader`.

    Accepted nodes are not read again.

    Args:
        reader: the draft model's reader, which limits the number of caches.
        sequence: the sequence, which its owner extends.
    """

    _rows: TreeRows

    def __init__(self, reader: ModelReader, sequence: TokenSequence) -> None:
        self._reader = reader
        self._model = reader.model
        self._sequence = sequence
        self._num_checked = 0
        self.close()

    @torch.no_grad()
    def begin(self) -> torch.Tensor | None:
        """Read the new tokens, except those cached as draft nodes; see `SequenceReader.begin`."""
        tokens = self._sequence.tokens
        self._check_room(len(tokens))
        self._check_known(tokens[self._num_checked :])
        self._num_checked = len(tokens)
        if len(tokens) == 0:
            return None
        self._reader.keep(self)
        self._keep_branch(tokens)
        logits = self._model.read(self._cache, tokens[self._length :], self._length)
        self._begin_tree(len(tokens))
        return logits

    def read(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        """Read draft nodes after the sequence; see `SequenceReader.read`."""
        rows = self._rows.extended(parents)
        self._check_room(rows.past + 1 + int(rows.depths.max()))
        logits = self._model.read(self._cache, np.array(tokens, np.int32), rows.past, rows)
        self._rows = rows
        self._edges.extend(zip(parents, tokens, strict=True))
        return logits

    def learn(self, verified: Verified) -> None:
        """Learn nothing: a draft model reads only tokens."""

    def close(self) -> None:
        """Drop the keys and values; see `SequenceReader.close`."""
        self._reader.forget(self)
        self._cache = self._model.new_cache()
        self._begin_tree(0)

    def _begin_tree(self, length: int) -> None:
        """Begin an empty tree after `length` cached tokens of the sequence."""
        self._length = length
        self._rows = TreeRows.of((), length)
        self._edges: list[tuple[int, int]] = []  # each row's parent row and token

    def _keep_branch(self, tokens: TokenIds) -> None:
        """Cut the cache to the sequence's prefix and the tree branch that the sequence took."""
        path = self._followed(tokens[self._length : -1])
        length = min(self._length, len(tokens) - 1)
        if path:
            device = self._cache.growing_layers[0].device
            self._cache.keep(length, torch.tensor(path, device=device) + length)
        else:
            self._cache.truncate(length)
        self._length = length + len(path)

    def _followed(self, tokens: TokenIds) -> list[int]:
        """Return the tree rows whose tokens match the sequence's new tokens."""
        rows = {edge: row for row, edge in enumerate(self._edges)}
        path: list[int] = []
        row = ROOT
        for token in tokens.tolist():
            found = rows.get((row, token))
            if found is None:
                break
            path.append(row := found)
        return path

    def _check_known(self, tokens: TokenIds) -> None:
        if len(tokens) and int(tokens.max()) >= self._model.vocabulary_size:
            raise DrafterUnavailableError(f"it does not know token {int(tokens.max())}")

    def _check_room(self, length: int) -> None:
        limit = self._model.max_length
        if limit is not None and length > limit:
            raise DrafterUnavailableError(
                f"it reads sequences of at most {limit} tokens, their drafts included"
            )


def frequent_tokens(indexes: Sequence[Index], size: int) -> TokenIds:
    """Return the most frequent tokens of open indexes.

    A draft model that computes logits only for these tokens is faster and loses few drafts
    (FR-Spec: Zhao et al., 2025, arXiv:2502.14856). Counts are rounded as in phrase tables, by at
    most 6% for single tokens. Of equally frequent tokens, those with the lowest ids are taken.

    Args:
        indexes: open indexes with the same vocabulary.
        size: most tokens to return.

    Returns:
        int32[n], token ids in ascending order; fewer than `size` if fewer tokens occur.

    Raises:
        InvalidRequestError: the indexes have different vocabularies.
    """
    shared = shared_vocabulary(indexes, None)
    if shared is None:
        return np.empty(0, np.int32)
    counts = np.zeros(shared.size)
    for index in indexes:
        counts += COUNT_VALUES[index.phrases.counts[0]]
    order = np.argsort(-counts, kind="stable")[: min(size, np.count_nonzero(counts))]
    return np.sort(order).astype(np.int32)
