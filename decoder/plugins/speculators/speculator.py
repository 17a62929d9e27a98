"""A head that reads draft trees, with its keys and values and the target's states.

The keys and values of committed tokens come from the target's own states. The keys and values of a
tree come from the head's outputs and are appended after them. Each node sees only its ancestors in
the tree. The keys and values of a tree are always dropped: accepted tokens are read again, with the
states that the target has computed by then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from decoder.drafters.draft_model import has_plain_head
from decoder.drafters.following import Verified
from decoder.drafters.readers import SequenceReader
from decoder.errors import OutOfMemoryError, UnsupportedModelError
from decoder.model.attention import hide
from decoder.model.cache import GrowingLayer
from decoder.model.products import products_of
from decoder.model.target import within_memory
from decoder.model.tree_rows import TreeRows
from decoder.model.user_model import multiplying
from decoder.plugins.speculators.eagle import Eagle3Head, EagleHead
from decoder.plugins.speculators.head_files import Head, HeadTarget, load_head
from decoder.plugins.speculators.mlp import MlpHead
from indexer.tokenizer import Vocabulary
from retriever.drafter import TokenIds
from retriever.errors import DrafterUnavailableError, VocabularyMismatchError
from retriever.sequences import TokenSequence
from retriever.tree import Source

_MOST_STATES: Final = 4096
"""Most of the target's states that are stored until the head reads them; the oldest are dropped
first. So the head reads at most this many tokens of a prompt. Three states of size 4,096 in half
precision take 96 MiB."""

_MOST_STATES_ON_CPU: Final = 64
"""The same limit on a CPU, where reading a prompt of 200 tokens takes as long as six drafts. A head
that reads only the last 16, 64 or 128 tokens drafts as well as a head that reads all tokens."""

_PIECE: Final = 512
"""Rows of a prompt in one pass of the head: enough to keep a processor busy, while their attention
scores take only megabytes."""


class Speculator:
    """A head that reads draft trees; see `TreeReader`.

    Args:
        head: the head. The speculator takes it over and moves it to the target's device and
            precision.
        model: the target.
        name: name in messages.
        kept: int32[n], the only tokens to draft, for heads with the target's vocabulary. A head
            with its own vocabulary drafts all tokens of that vocabulary.

    Attributes:
        name: name in messages.
        columns: int32[C], ascending, the token that each column of its logits stands for.
        max_depth: nodes deeper than this are not read; `None` for no limit.
        reads_paths: always false: to read a node, the head needs its parent's output.
        states: numbers of the target's states that it reads.
        source: label of its proposals.
        head: the head, after its move.
        max_length: length of the longest sequence that it drafts for; `None` for no limit.
        most_states: most tokens of a prompt that it reads; of a longer prompt it reads the last
            ones.
        most_rows: most tokens of a prompt that it reads in one pass.

    Raises:
        UnsupportedModelError: the head needs the target's output layer, but the target changes
            logits after that layer.
        VocabularyMismatchError: a token in `kept` lies outside the vocabulary.
    """

    def __init__(
        self,
        head: Head,
        model: PreTrainedModel,
        *,
        name: str = "the speculator",
        kept: TokenIds | None = None,
    ) -> None:
        embedding = model.get_input_embeddings().get_parameter("weight")
        self.head = head.to(embedding.device, embedding.dtype).eval()
        self.name = name
        self.reads_paths = False
        self.source = Source.MODEL
        self.states = frozenset(head.config.states)
        self.max_depth: int | None = None
        self.max_length: int | None = None
        on_cpu = embedding.device.type == "cpu"
        self.most_states = _MOST_STATES_ON_CPU if on_cpu else _MOST_STATES
        self.most_rows = _PIECE
        self.columns = _columns(head, int(embedding.shape[0]), kept)
        if isinstance(head, MlpHead):
            self.max_depth = head.config.num_depths - 1
            _cut_outputs(head, self.columns)
        else:
            self.max_length = int(head.config.layer.max_position_embeddings)
            head.rotary_emb = RotationTable(head.rotary_emb)
            head.lm_head = _output_layer(head, model, self.columns)
            head.embed_tokens = _embedding_of(head, embedding)

    def follow(self, sequence: TokenSequence) -> SequenceReader:
        """Return a new reading of a sequence; see `TreeReader.follow`."""
        if isinstance(self.head, MlpHead):
            return MlpReading(self.head, sequence)
        return EagleReading(self, self.head, sequence)


def load_speculator(
    path: Path,
    model: PreTrainedModel,
    *,
    vocabulary: Vocabulary | None = None,
    name: str | None = None,
    kept: TokenIds | None = None,
) -> Speculator:
    """Load a head for a target.

    Args:
        path: path of the head; see `load_head`.
        model: the target.
        vocabulary: vocabulary of the target's tokenizer, if known; no other tokens are drafted.
        name: name of the target in messages.
        kept: the only tokens to draft; see `Speculator`.

    Raises:
        HeadFileError: the head cannot be read, or has an unknown layout.
        HeadMismatchError: the head was made for another model.
        UnsupportedModelError: the target's states or output layer cannot be used.
        VocabularyMismatchError: the head was made for another tokenizer.
    """
    loaded = load_head(path, HeadTarget.of(model, name, vocabulary))
    if kept is None and vocabulary is not None:
        kept = np.arange(vocabulary.size, dtype=np.int32)
    return Speculator(loaded.head, model, name=f"the speculator {loaded.name}", kept=kept)


def _columns(head: Head, vocab_size: int, kept: TokenIds | None) -> TokenIds:
    """Return the tokens that a head can draft."""
    own = head.columns if isinstance(head, Eagle3Head) else None
    if own is not None:
        return own.cpu().numpy().astype(np.int32)
    if kept is None:
        return np.arange(vocab_size, dtype=np.int32)
    unique = np.unique(kept).astype(np.int32)
    if len(unique) == 0 or unique[0] < 0 or unique[-1] >= vocab_size:
        raise VocabularyMismatchError(
            f"the tokens to draft must be one or more of the model's {vocab_size}"
        )
    return unique


def _output_layer(head: EagleHead, model: PreTrainedModel, columns: TokenIds) -> nn.Linear:
    """Return the output layer for the tokens to draft: the head's own, or rows of the target's.

    Raises:
        UnsupportedModelError: the target changes logits after its output layer.
    """
    if head.lm_head is not None and isinstance(head, Eagle3Head) and head.config.is_cut:
        return head.lm_head
    if head.lm_head is not None:
        return _rows_of(head.lm_head, columns)
    if not has_plain_head(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} changes logits after its output layer, which this head would "
            "draft with: use a head with its own output layer, such as EAGLE-3"
        )
    layer: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not typed there
    return _rows_of(layer, columns)


def _cut_outputs(head: MlpHead, columns: TokenIds) -> None:
    cut: dict[int, nn.Linear] = {}
    for layer in head.head:
        if id(layer) not in cut:
            cut[id(layer)] = _rows_of(layer, columns)
    head.head = nn.ModuleList(cut[id(layer)] for layer in head.head)


def _rows_of(layer: Any, columns: TokenIds) -> nn.Linear:
    """Return an output layer for some tokens; it shares the weights if they are the first rows."""
    size = layer.weight.shape[1]
    made = nn.Linear(size, len(columns), bias=layer.bias is not None, device="meta")
    if columns[-1] == len(columns) - 1:
        rows: Any = slice(len(columns))
    else:
        rows = torch.from_numpy(columns.astype(np.int64)).to(layer.weight.device)
    made.weight = nn.Parameter(layer.weight.detach()[rows], requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach()[rows], requires_grad=False)
    return made


def _embedding_of(head: EagleHead, embedding: torch.Tensor) -> nn.Embedding:
    """Return the head's own embedding; the target's if both are equal or the head has none.

    Only the weights are used. Some models scale the output of their embedding, but published heads
    expect the unscaled rows.
    """
    own = head.embed_tokens
    if own is not None and not torch.equal(own.weight, embedding):
        return own
    shared = nn.Embedding(1, 1, device="meta")
    shared.weight = nn.Parameter(embedding.detach(), requires_grad=False)
    return shared


class RotationTable(nn.Module):
    """A table of a rotary embedding's cosines and sines, which are the same in every step.

    Args:
        rotation: the rotary embedding of transformers. If it depends on the length of the sequence,
            it is computed each time.
    """

    def __init__(self, rotation: Any) -> None:
        super().__init__()
        self._rotation = rotation
        self._is_fixed = rotation.rope_type not in {"dynamic", "longrope"}
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0

    def forward(
        self, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, each [1, rows, head size], in the precision of the states."""
        if not self._is_fixed or self._table is None:
            rotation: tuple[torch.Tensor, torch.Tensor] = self._rotation(states, positions)
            return rotation
        cosines, sines = self._table
        rows = positions[0]
        return cosines.index_select(1, rows), sines.index_select(1, rows)

    def reserve(self, length: int, states: torch.Tensor) -> None:
        """Extend the table to all positions below `length`."""
        if length > self._length and self._is_fixed:
            self._length = max(1 << length.bit_length(), _PIECE)
            positions = torch.arange(self._length, device=states.device)[None]
            self._table = self._rotation(states, positions)


class TrueStates:
    """The target's states of a sequence that a head has not read yet.

    Args:
        numbers: numbers of the states, in the order in which a row concatenates them.
        most: most positions that are stored; the oldest are dropped.

    Attributes:
        start: position of the first stored state.
        end: position after the last stored state, whose token has no state yet; 0 before the first
            pass.
    """

    def __init__(self, numbers: Sequence[int], most: int = _MOST_STATES) -> None:
        self._numbers = numbers
        self._most = most
        self._rows: list[torch.Tensor] = []
        self.start = self.end = 0

    def learn(self, verified: Verified, length: int) -> None:
        """Store the rows of the committed tokens of a pass.

        Args:
            verified: the pass.
            length: length of the sequence before the pass's path is committed.

        Raises:
            ValueError: the target does not record a state that the head reads.
        """
        if missing := set(self._numbers) - verified.states.keys():
            raise ValueError(
                f"the target does not record state {min(missing)}, which its drafter reads: "
                "create it with Target(model, states=states_of(drafter))"
            )
        is_prompt = len(verified.states[self._numbers[0]]) != 1 + len(verified.tree)
        states = [verified.states[number] for number in self._numbers]
        rows = self._last(states) if is_prompt else _committed(states, verified.path)
        start = length - len(rows) if is_prompt else length - 1
        if start != self.end:
            self._forget(start)
        self._rows.append(rows)
        self.end += len(rows)
        self._bound()

    def reach(self, sequence: TokenSequence) -> bool:
        """Return whether all states of a sequence are known, except the last token's."""
        return 0 < self.end == len(sequence) - 1

    def take(self) -> torch.Tensor:
        """Return [n, features], the states from `start` to `end`, and mark them as read."""
        rows = torch.cat(self._rows) if len(self._rows) > 1 else self._rows[0]
        self._rows, self.start = [], self.end
        return rows

    def _last(self, states: list[torch.Tensor]) -> torch.Tensor:
        """Return the last rows of the states, concatenated."""
        return torch.cat([state[-self._most :] for state in states], -1)

    def _forget(self, end: int) -> None:
        self._rows, self.start, self.end = [], end, end

    def _bound(self) -> None:
        """Drop the oldest rows above the limit."""
        while self.end - self.start - len(self._rows[0]) >= self._most:
            self.start += len(self._rows.pop(0))
        excess = self.end - self.start - self._most
        if excess > 0:
            self._rows[0] = self._rows[0][excess:].clone()
            self.start += excess


def _committed(states: list[torch.Tensor], path: NDArray[np.int64]) -> torch.Tensor:
    """Return the states of the tokens that a pass committed, concatenated."""
    joined = torch.cat(states, -1)
    rows = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), path + 1]))
    return joined.index_select(0, rows.to(joined.device))


class EagleReading:
    """An EAGLE head's reading of one sequence; see `SequenceReader`.

    Row i of the keys and values comes from the state at `first + i` and the token after it.

    Args:
        speculator: the speculator that reads.
        head: its head.
        sequence: the committed tokens.
    """

    def __init__(self, speculator: Speculator, head: EagleHead, sequence: TokenSequence) -> None:
        self._speculator = speculator
        self._head, self._products = head, products_of(head)
        self._sequence = sequence
        self._window = head.config.window
        self._states = TrueStates(head.config.states, speculator.most_states)
        self._first = self._end = 0
        self._cache: list[GrowingLayer] = []
        self._hidden = torch.empty(0)
        self._rows = TreeRows.of((), 0)
        self._forget()

    def learn(self, verified: Verified) -> None:
        """Store the target's states of the pass; see `SequenceReader.learn`."""
        self._states.learn(verified, len(self._sequence))

    @torch.inference_mode()
    def begin(self) -> torch.Tensor | None:
        """See `SequenceReader.begin`."""
        if not self._states.reach(self._sequence):
            return None
        self._check_length()
        with self._translated(), multiplying(self._products):
            self._drop_tree()
            self._catch_up()
            root = self._hidden[:1]
            return self._head.logits(root) if len(root) else None

    @torch.inference_mode()
    def read(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        """See `SequenceReader.read`."""
        self._rows = self._rows.extended(parents)
        before = self._hidden[[parent + 1 for parent in parents]]
        with self._translated(), multiplying(self._products):
            hidden = self._step(tokens, before, self._rows)
            self._hidden = torch.cat([self._hidden, hidden])
            return self._head.logits(hidden)

    def close(self) -> None:
        """See `SequenceReader.close`."""
        self._forget()

    def _forget(self) -> None:
        self._cache = [GrowingLayer() for _ in range(self._head.num_layers)]
        self._first = self._end = 0
        self._hidden = self._hidden[:0]
        self._drop_tree()

    def _drop_tree(self) -> None:
        for layer in self._cache:
            layer.truncate(self._end - self._first)
        self._hidden = self._hidden[:1]
        self._rows = TreeRows.of((), self._end)

    def _check_length(self) -> None:
        most = self._speculator.max_length
        if most is not None and self._states.end > most:
            raise DrafterUnavailableError(
                f"it drafts for sequences of at most {most} tokens, but this one has "
                f"{len(self._sequence)}"
            )

    def _catch_up(self) -> None:
        """Read the pairs whose states are new, in pieces; after a gap, start a new cache."""
        states = self._states
        if states.start != self._end:
            self._forget()
            self._first = self._end = states.start
        if states.start == states.end:
            return
        tokens = self._sequence.tokens[states.start + 1 : states.end + 1].tolist()
        projected = self._head.project(states.take())
        most = self._speculator.most_rows
        for begin in range(0, len(tokens), most):
            piece = tokens[begin : begin + most]
            rows = TreeRows.in_line(len(piece), self._end)
            read = self._step(piece, projected[begin : begin + most], rows)
            self._end += len(piece)
        self._hidden = read[-1:]
        self._rows = TreeRows.of((), self._end)

    def _step(self, tokens: list[int], hidden: torch.Tensor, rows: TreeRows) -> torch.Tensor:
        """Return [n, hidden size], the outputs for n rows after the keys and values.

        Args:
            tokens: tokens of the rows.
            hidden: [n, hidden size], the states that the tokens are paired with.
            rows: positions of the rows, and the keys that they see.
        """
        device = hidden.device
        embedding: Any = self._head.embed_tokens
        embedded = embedding(torch.tensor([tokens], device=device))
        rotation: Any = self._head.rotary_emb
        rotation.reserve(int(rows.positions.max()) + 1, embedded)
        positions = torch.from_numpy(rows.positions)[None].to(device)
        return self._head.step(
            embedded, hidden[None], positions, self._mask(rows, hidden), self._cache
        )[0]

    def _mask(self, rows: TreeRows, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return a mask, [1, 1, n, keys], to add to the scores; `None` if a single row sees all."""
        if rows.sees_all(self._first, self._window):
            return None
        mask = hidden.new_zeros(rows.num_read, rows.num_keys - self._first)
        hide(mask, rows, self._first, self._window)
        return mask[None, None]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate an out-of-memory error in the block and drop the cache.

        Raises:
            DrafterUnavailableError: memory ran out.
        """
        try:
            with within_memory(len(self._sequence)):
                yield
        except OutOfMemoryError as error:
            self._forget()
            raise DrafterUnavailableError("it ran out of memory for its draft") from error


class MlpReading:
    """An MLP speculator's reading of one sequence; see `SequenceReader`.

    It has no attention. It reads only the target's last state and the tokens after it.

    Args:
        head: head of the speculator.
        sequence: the committed tokens.
    """

    def __init__(self, head: MlpHead, sequence: TokenSequence) -> None:
        self._head, self._products = head, products_of(head)
        self._sequence = sequence
        self._states = TrueStates(head.config.states)
        self._drop_tree()

    def learn(self, verified: Verified) -> None:
        """Store the target's states of the pass; see `SequenceReader.learn`."""
        self._states.learn(verified, len(self._sequence))

    @torch.inference_mode()
    def begin(self) -> torch.Tensor | None:
        """See `SequenceReader.begin`."""
        if not self._states.reach(self._sequence):
            return None
        if self._states.start != self._states.end:
            self._root = self._head.project(self._states.take()[-1:])
        self._drop_tree()
        last = torch.from_numpy(self._sequence.tokens[-1:].astype(np.int64)).to(self._root.device)
        with multiplying(self._products):
            self._hidden = self._head.step(last, self._root, 0)
            return self._head.logits(self._hidden, 0)

    @torch.inference_mode()
    def read(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        """See `SequenceReader.read`; nodes of the same depth share a pass through the network."""
        rows = torch.tensor([parent + 1 for parent in parents])
        depths = np.array([self._depths[parent + 1] + 1 for parent in parents])
        ids = torch.tensor(tokens, device=self._hidden.device)
        hidden = self._hidden.new_empty(len(tokens), self._hidden.shape[1])
        logits: torch.Tensor | None = None
        for depth in np.unique(depths).tolist():
            among = torch.from_numpy(np.flatnonzero(depths == depth)).to(ids.device)
            with multiplying(self._products):
                reached = self._head.step(ids[among], self._hidden[rows[among]], depth)
                found = self._head.logits(reached, depth)
            if logits is None:
                logits = found.new_empty(len(tokens), found.shape[1])
            hidden[among], logits[among] = reached, found
        self._hidden = torch.cat([self._hidden, hidden])
        self._depths.extend(depths.tolist())
        if logits is None:
            raise ValueError("no nodes to read: pass at least one")
        return logits

    def close(self) -> None:
        """See `SequenceReader.close`."""
        self._states = TrueStates(self._head.config.states)
        self._drop_tree()

    def _drop_tree(self) -> None:
        self._depths = [0]
