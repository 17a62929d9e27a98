"""Forward passes over a sequence with a draft tree, for each kind of cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from decoder.errors import OutOfMemoryError, UncroppableCacheError
from decoder.model.cache import TreeCache
from decoder.model.states import States
from decoder.model.tree_rows import TreeRows
from decoder.model.user_model import UserModel
from decoder.sampling.verification import Choices, Selection
from retriever.drafter import TokenIds
from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A sequence's input to a pass: a prompt chunk, or the last token and a tree.

    Attributes:
        place: place of the sequence.
        tokens: int32[n], n at least 1: the prompt chunk, or the last token and the tree's tokens.
        tree: the tree after the first token, N = n - 1 nodes; `None` for a prompt chunk, which is
            committed when it is read.
        selection: how a captured pass samples tokens after the rows whose logits are needed; other
            passes ignore it.
    """

    place: int
    tokens: TokenIds
    tree: DraftTree | None = None
    selection: Selection | None = None

    @classmethod
    def of(cls, place: int, last_token: int, tree: DraftTree) -> "Reading":
        """Return a reading of a sequence's last token and the tree after it."""
        return cls(place, np.concatenate([np.array([last_token], np.int32), tree.token_ids]), tree)

    @property
    def num_logits(self) -> int:
        """Number of last tokens after which logits are needed."""
        return 1 if self.tree is None else len(self.tokens)

    @property
    def parents(self) -> NDArray[np.int64]:
        """Return int64[n], the parent row of each row; -1 for the first row."""
        if self.tree is None:
            return np.arange(-1, len(self.tokens) - 1)
        return np.concatenate([np.array([-1]), self.tree.parents + 1])

    def rows(self, past: int) -> TreeRows:
        """Return the reading's rows, after `past` tokens of the sequence."""
        if self.tree is None:
            return TreeRows.in_line(len(self.tokens), past)
        return TreeRows.behind_token(self.tree, past)


class Read(NamedTuple):
    """The result of a reading.

    Attributes:
        logits: [num_logits, vocabulary], the logits after the reading's last tokens.
        states: the tapped hidden states by number, each [n, hidden size].
        choices: the tokens chosen from the logits, if the pass itself chose them.
    """

    logits: torch.Tensor
    states: States
    choices: Choices | None = None


_SIGNS: Final = ("out of memory", "can't allocate memory", "DefaultCPUAllocator", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory; on CPUs torch raises RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(sign in str(error) for sign in _SIGNS)


class Passes(Protocol):
    """Runs passes of a model, and holds the state of one sequence."""

    def read(self, reading: Reading, past: int) -> Read:
        """Read an input after the `past` tokens in the state."""
        ...

    def truncate(self, length: int) -> None:
        """Keep only the first `length` tokens."""
        ...

    def keep(self, start: int, slots: NDArray[np.int64]) -> None:
        """Keep the first `start` tokens, followed by the tokens in `slots`, int64[n]."""
        ...

    def pretend(self, length: int, marked: NDArray[np.int64] | None = None) -> bool:
        """Fake a sequence of `length` tokens, after a first pass; return whether that is possible.

        Args:
            length: number of tokens.
            marked: int64[n], tokens that get values that stand out, to show which rows see them.
        """
        ...


class ChainCache:
    """The cache that transformers uses for a model, if that cache can drop its last tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._config = model.config
        self.truncate(0)

    @contextmanager
    def written(self) -> Iterator[DynamicCache]:
        """Provide the cache to a pass; a failed pass leaves layers of unequal length."""
        self._is_whole = False
        yield self._states
        self._is_whole = True

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens.

        Raises:
            OutOfMemoryError: a pass failed halfway.
            UncroppableCacheError: the model has recurrent state.
        """
        if length == 0:
            self._states = DynamicCache(config=self._config)
            self._is_recording = False
        elif not self._is_whole:
            raise OutOfMemoryError(
                "out of memory halfway through a pass, which the model's own cache cannot undo"
            )
        elif self._is_recording:
            # Crop even if no token is dropped, because that frees the states recorded since the
            # last crop.
            self._states.crop(length - self._states.get_seq_length())
        else:
            self._begin_recording()

    def _begin_recording(self) -> None:
        """Record the states that drafts push out, except during the prompt, to save memory."""
        if not self._states.is_croppable:
            raise UncroppableCacheError(
                f"the cache of {self._config.model_type} cannot give up rejected tokens"
            )
        self._states.activate_past_recording()  # type: ignore[no-untyped-call]  # not typed there
        self._is_recording = True


class CachedPasses:
    """Passes over keys and values, whose last tokens can be dropped.

    Args:
        model: the model to run.
        cache: cache of the sequence.
        takes_trees: whether to build masks for trees; otherwise drafts are chains.
    """

    def __init__(
        self, model: UserModel, cache: TreeCache | ChainCache, *, takes_trees: bool
    ) -> None:
        self._model = model
        self.cache = cache
        self._takes_trees = takes_trees

    def read(self, reading: Reading, past: int) -> Read:
        """Read an input; see `Passes`. The model itself builds the mask of a chain."""
        model, num_rows = self._model, len(reading.tokens)
        rows = None if reading.tree is None or num_rows == 1 else reading.rows(past)
        positions = np.arange(past, past + num_rows) if rows is None else rows.positions
        options: dict[str, Any] = {}
        if model.takes("position_ids"):
            options["position_ids"] = torch.from_numpy(positions)[None].to(model.device)
        if model.takes("logits_to_keep"):
            options["logits_to_keep"] = reading.num_logits
        with self.cache.written() as states:
            output = model.run(
                rows if self._takes_trees else None,
                states,
                input_ids=torch.from_numpy(reading.tokens)[None].long().to(model.device),
                **options,
            )
        return Read(output.logits[0, -reading.num_logits :], model.states)

    def truncate(self, length: int) -> None:
        """See `Passes`."""
        self.cache.truncate(length)

    def keep(self, start: int, slots: NDArray[np.int64]) -> None:
        """Keep a path; see `Passes`. Only paths of trees have non-consecutive slots."""
        if isinstance(self.cache, TreeCache):
            self.cache.keep(start, torch.from_numpy(slots).to(self._model.device))

    def pretend(self, length: int, marked: NDArray[np.int64] | None = None) -> bool:
        """See `Passes`."""
        if not isinstance(self.cache, TreeCache):
            return False
        self.cache.pretend(length)
        if marked is not None:
            self.cache.mark(torch.from_numpy(marked).to(self._model.device))
        return True


class PlainPasses:
    """Passes over state that cannot drop tokens, run as `model.generate` would run them.

    To drop tokens, the remaining tokens are read again.
    """

    def __init__(self, model: UserModel) -> None:
        self._model = model
        self._tokens: list[int] = []
        self._state: dict[str, Any] | None = None

    def read(self, reading: Reading, _past: int) -> Read:
        """See `Passes`."""
        model: Any = self._model.model
        self._tokens.extend(reading.tokens.tolist())
        is_first = self._state is None
        state = self._begin() if self._state is None else self._state
        self._state = None  # a failed pass leaves it half written
        inputs = model.prepare_inputs_for_generation(
            torch.tensor([self._tokens], device=model.device),
            next_sequence_length=None if is_first else len(reading.tokens),
            is_first_iteration=is_first,
            **state,
        )
        output = self._model.run_prepared(inputs)
        self._state = model._update_model_kwargs_for_generation(output, state)  # noqa: SLF001
        return Read(output.logits[0, -reading.num_logits :], self._model.states)

    def truncate(self, length: int) -> None:
        """See `Passes`."""
        if length < len(self._tokens):
            self._tokens = self._tokens[:length]
            self._state = None

    def keep(self, start: int, _: NDArray[np.int64]) -> None:
        """Keep the first tokens; see `Passes`. There are no drafts."""
        self.truncate(start)

    def pretend(self, length: int, marked: NDArray[np.int64] | None = None) -> bool:  # noqa: ARG002  it never can
        """See `Passes`."""
        return False

    def _begin(self) -> dict[str, Any]:
        """Return the model's initial state."""
        model: Any = self._model.model
        mask = torch.ones(1, len(self._tokens), dtype=torch.long, device=model.device)
        state: dict[str, Any] = {"use_cache": True, "attention_mask": mask}
        if self._model.takes("logits_to_keep"):
            state["logits_to_keep"] = 1
        if self._model.takes("position_ids"):  # else some models count from 0 in every pass
            tokens = torch.tensor([self._tokens], device=model.device)
            state["position_ids"] = model._prepare_position_ids_for_generation(tokens, state)  # noqa: SLF001
        config = GenerationConfig()  # type: ignore[no-untyped-call]  # not typed there
        mode = GenerationMode.GREEDY_SEARCH
        model._prepare_cache_for_generation(config, state, mode, 1, 0)  # noqa: SLF001
        return state


def within_depth(tree: DraftTree, max_depth: int) -> DraftTree:
    """Return the tree without nodes deeper than `max_depth`.

    Parents are less deep than their children, so the remaining nodes form a valid tree.
    """
    if len(tree) <= max_depth:  # no path can be longer
        return tree
    kept = tree.depths() <= max_depth
    if kept.all():
        return tree
    return tree.among(kept)
