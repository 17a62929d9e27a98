"""The target model: it verifies a draft tree in one forward pass."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from decoder.errors import InvalidPromptError, OutOfMemoryError, UnsupportedModelError
from decoder.model.adapted import LeastWeights, adapted, is_patched, own_passes
from decoder.model.cache import TreeCache, num_seen
from decoder.model.capability_check import (
    FOUND_HERE,
    CannotCheckError,
    Verdict,
    Verdicts,
    find_verdict,
)
from decoder.model.compatibility import (
    Capability,
    Compatibility,
    chain_of,
    compatibility_of,
    position_limit,
    reduced,
    tell_once,
)
from decoder.model.graphs import CaptureMaker, GraphPasses, capture_on
from decoder.model.passes import (
    CachedPasses,
    ChainCache,
    Masks,
    Passes,
    PlainPasses,
    TreeLayout,
    additive_mask,
    is_out_of_memory,
)
from decoder.model.states import States, StateTap
from indexer.errors import reason_of
from retriever.drafter import TokenIds
from retriever.tree import DraftTree

_log = getLogger(__name__)


@contextmanager
def within_memory(num_tokens: int) -> Iterator[None]:
    """Translate a lack of memory in the block, with the length of the context.

    Raises:
        OutOfMemoryError: an allocation failed.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"out of memory at {num_tokens} tokens of context: {reason_of(error)}"
        ) from error


def prompt_tokens(prompt: Sequence[int] | TokenIds) -> NDArray[np.int64]:
    """Return a prompt's token ids as int64[n].

    Raises:
        InvalidPromptError: it is text, not one row, or holds values that are not integers.
    """
    if isinstance(prompt, str | bytes):
        raise InvalidPromptError("the prompt is text: give its token ids, as a tokenizer does")
    try:
        tokens = np.asarray(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidPromptError("the prompt is not one row of token ids") from error
    if tokens.ndim != 1:
        raise InvalidPromptError(
            f"the prompt is not one row of token ids, but of shape {tokens.shape}"
        )
    if tokens.size and tokens.dtype.kind not in "iu":
        raise InvalidPromptError(f"the prompt holds {tokens.dtype} and not whole token ids")
    return tokens.astype(np.int64)


def check_prompt_length(num_tokens: int, max_length: int | None) -> None:
    """Refuse prompts that the model cannot continue.

    Args:
        num_tokens: of the prompt.
        max_length: most tokens of a sequence, `None` where there is no limit.

    Raises:
        InvalidPromptError: it is empty, or leaves no room below the limit.
    """
    if num_tokens == 0:
        raise InvalidPromptError("the prompt is empty: give at least one token")
    if max_length is not None and num_tokens >= max_length:
        raise InvalidPromptError(
            f"the prompt has {num_tokens} tokens, and the model's limit is "
            f"{max_length} for prompt and output together: shorten it"
        )


class Target:
    """A causal language model with the cache of one sequence.

    Passes run through a copy of the model's modules that shares its weights, so the model itself
    stays as it is. In the copy, grouped heads attend without repeated keys, and on a CPU linear
    layers multiply by packed weights: those are read here once, and later changes of the model's
    weights are not seen.

    On CUDA, passes that verify a draft are captured as graphs, one for each shape of a few.

    Args:
        model: a decoder-only model of transformers.
        pack: whether to keep packed weights on a CPU, or of which layers; they take
            `packed_bytes`.
        capture: how passes of fixed shapes are captured; `None` for CUDA graphs on CUDA, and
            elsewhere passes as wide as their draft.
        states: numbers of the states to keep of every pass, see `decoder.model.states`; a target
            that is asked for none pays nothing.
        verdicts: where the verdict on what the model verifies is kept, by default for as long as
            the model is there; `None` to believe its configuration without a check.

    Attributes:
        states: of the last pass, by number: [rows, hidden size], a row for every token that the
            pass read.
        capability: which drafts the model can verify; logged once where it is not trees.
        reason: why it is not trees; empty where it is.
        max_nodes: most nodes of a draft that it verifies; halved where memory runs out.
        packed_bytes: memory that packed weights take besides the model's own.
        vocabulary_size: token ids below it can be fed to the model.
        max_length: most tokens of a sequence, `None` where the model states no limit; see
            `decoder.model.compatibility.position_limit`.

    Raises:
        UncroppableCacheError: the model is not decoder-only.
        UnsupportedModelError: the model cannot be decoded here for another reason; or it was
            decoded to see, and the logits are not those of `model.generate`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pack: bool | LeastWeights = True,
        capture: CaptureMaker | None = None,
        states: Iterable[int] = (),
        verdicts: Verdicts | None = FOUND_HERE,
    ) -> None:
        self._pack, self._capture, self._tapped = pack, capture, tuple(states)
        promised = compatibility_of(model)
        self.max_length = position_limit(model.config)
        self._begin(model, promised)
        if verdicts is not None:
            self._check(model, promised, verdicts)
        tell_once(model, self.capability, self.reason)
        self.vocabulary_size = int(model.get_input_embeddings().get_parameter("weight").shape[0])

    def _begin(self, model: PreTrainedModel, compatibility: Compatibility) -> None:
        """Begin with passes for the drafts that a model can verify."""
        self.capability, self.reason = compatibility.capability, compatibility.reason
        self._windows = dict(compatibility.layers or ())
        self._model, self.packed_bytes = adapted(model, self.capability, pack=self._pack)
        self._tap = StateTap(self._model, self._tapped) if self._tapped else None
        self._renew(compatibility)
        self.states: States = {}
        self._committed = 0
        self.max_nodes = 0 if self.capability is Capability.PLAIN else sys.maxsize

    def _renew(self, compatibility: Compatibility) -> None:
        """Begin with an empty cache that holds no memory yet."""
        capture = self._capture or capture_on(self.device)
        self._passes = _passes(self._model, compatibility, capture, self._tap)

    def _check(self, model: PreTrainedModel, promised: Compatibility, verdicts: Verdicts) -> None:
        """Fall back to what the model was found to verify.

        Raises:
            UnsupportedModelError: not even plain passes are the model's own.
        """
        verdict = verdicts.verdict_on(model)
        if verdict is None:
            verdict = self._found(model, promised)
            if verdict is None:
                return
            verdicts.keep_verdict(model, verdict)
        if verdict.capability is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be decoded here: {verdict.reason}"
            )
        if verdict.capability is not self.capability:
            self._begin(model, reduced(promised, verdict.capability, verdict.reason))
        self.reason = verdict.reason or promised.reason

    @torch.no_grad()
    def _found(self, model: PreTrainedModel, promised: Compatibility) -> Verdict | None:
        """Return what passes show, `None` where there is nothing to compare them with."""

        def made(capability: Capability) -> "Target":
            if capability is not self.capability:
                self._begin(model, reduced(promised, capability, ""))
            return self

        try:
            return find_verdict(own_passes(model), promised.capability, made)
        except (CannotCheckError, OutOfMemoryError) as error:
            _log.info("%s is taken by its configuration: %s", type(model).__name__, error)
            self._begin(model, promised)
            return None
        finally:
            self._committed, self.states = 0, {}
            self._renew(reduced(promised, self.capability, ""))

    @property
    def device(self) -> torch.device:
        """Where logits lie."""
        return torch.device(self._model.device)

    @property
    def pads_passes(self) -> bool:
        """Whether passes cost what the next power of two of rows costs."""
        return isinstance(self._passes, GraphPasses) and self._passes.is_padding

    def checked_prompt(self, prompt: Sequence[int] | TokenIds) -> TokenIds:
        """Return a prompt as int32[n], n at least one.

        Raises:
            InvalidPromptError: it is empty, holds values that are not token ids of the
                vocabulary, or leaves no room below the model's limit.
        """
        tokens = prompt_tokens(prompt)
        check_prompt_length(len(tokens), self.max_length)
        if tokens.min() < 0 or tokens.max() >= self.vocabulary_size:
            raise InvalidPromptError(
                f"the prompt holds tokens outside the model's vocabulary of {self.vocabulary_size}"
            )
        return tokens.astype(np.int32)

    def room(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return how many of `max_new_tokens` the model's limit allows behind `num_tokens`."""
        if self.max_length is None:
            return max_new_tokens
        return min(max_new_tokens, self.max_length - num_tokens)

    def fitting(self, tree: DraftTree) -> DraftTree:
        """Return the part of a draft that the model can verify: the tree, one chain, or nothing."""
        if self.capability is Capability.CHAINS:
            tree = chain_of(tree)
        return tree.prefix(self.max_nodes)

    def prefill(self, prompt: TokenIds) -> torch.Tensor:
        """Forget the sequence so far and read a new one.

        Args:
            prompt: int32[n], at least one token.

        Returns:
            [1, vocabulary], the logits after its last token.

        Raises:
            OutOfMemoryError: there is no room for the prompt.
        """
        self.reset()
        logits = self._read(prompt, None, np.arange(len(prompt)), num_logits=1)
        self._committed = len(prompt)
        return logits

    def verify(self, last_token: int, tree: DraftTree) -> torch.Tensor:
        """Run the last committed token and a tree behind it through the model, in one pass.

        Uncommitted tokens of an earlier call are dropped first.

        Args:
            last_token: the sequence's last token, which the model has not seen yet.
            tree: continuations of it, as `fitting` returns them; its tokens lie within the
                vocabulary.

        Returns:
            [1 + N, vocabulary], the logits after the last token and after each node.

        Raises:
            OutOfMemoryError: there is no room for the pass. `max_nodes` becomes half of the
                nodes tried; committed tokens stay.
        """
        self.rewind()
        layout = TreeLayout.of(tree)
        tokens = np.concatenate([np.array([last_token], np.int32), tree.token_ids])
        positions = layout.depths + self._committed
        try:
            return self._read(tokens, layout, positions, num_logits=len(tokens))
        except OutOfMemoryError:
            self.max_nodes = len(tree) // 2
            raise

    @torch.inference_mode()
    def rewind(self) -> None:
        """Drop tokens that were verified and not committed."""
        self._passes.truncate(self._committed)

    @torch.inference_mode()
    def commit(self, path: NDArray[np.int64]) -> None:
        """Keep the last token and a path of the verified tree, and nothing else of it.

        Args:
            path: int64[k], nodes from a child of the root downwards; it may be empty.
        """
        start = self._committed + 1
        self._committed = start + len(path)
        in_place = _num_in_place(path)
        if in_place == len(path):
            self._passes.truncate(self._committed)
        else:
            self._passes.keep(start + in_place, path[in_place:] + start)

    def pretend(self, num_tokens: int) -> None:
        """Make up a sequence of so many tokens without reading them, to time passes behind it."""
        self.prefill(np.zeros(1, np.int32))
        if self._passes.pretend(num_tokens):
            self._committed = num_tokens
        else:
            self.prefill(np.zeros(num_tokens, np.int32))

    def pretend_marked(self, num_tokens: int, marked: NDArray[np.int64]) -> bool:
        """Make up a sequence whose tokens `marked` stand out; return whether that is possible."""
        self.prefill(np.zeros(1, np.int32))
        if not self._passes.pretend(num_tokens, marked):
            return False
        self._committed = num_tokens
        return True

    @torch.inference_mode()
    def drop(self, num_tokens: int) -> None:
        """Take the last committed tokens back."""
        self._committed -= num_tokens
        self._passes.truncate(self._committed)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget the sequence."""
        self._passes.truncate(0)
        self._committed = 0

    def _masks(self, layout: TreeLayout) -> Masks:
        if len(layout.depths) == 1 or self.capability is not Capability.TREES:
            return None  # one row is causal by itself, and models make a chain's mask themselves
        visible = torch.from_numpy(layout.visible).to(self.device)
        depths = torch.from_numpy(layout.depths).to(self.device)
        masks = {
            layer_type: additive_mask(
                visible, depths, num_seen(self._committed, window), window, self._model.dtype
            )
            for layer_type, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.inference_mode()
    def _read(
        self,
        tokens: TokenIds,
        layout: TreeLayout | None,
        positions: NDArray[np.int64],
        num_logits: int,
    ) -> torch.Tensor:
        """Return [num_logits, vocabulary], the logits after the last tokens given."""
        with within_memory(self._committed + len(tokens)):
            masks = None if layout is None else self._masks(layout)
            logits, self.states = self._passes.read(tokens, masks, positions, num_logits)
            return logits


def _passes(
    model: PreTrainedModel,
    compatibility: Compatibility,
    capture: CaptureMaker | None,
    tap: StateTap | None,
) -> Passes:
    if compatibility.layers is not None:
        cache = TreeCache([window for _, window in compatibility.layers])
        takes_trees = compatibility.capability is Capability.TREES
        if capture is None or not takes_trees or is_patched(model):
            return CachedPasses(model, cache, tap)
        return GraphPasses(model, cache, dict(compatibility.layers), capture, tap)
    if compatibility.capability is Capability.CHAINS:
        return CachedPasses(model, ChainCache(model), tap)
    return PlainPasses(model, tap)


def _num_in_place(path: NDArray[np.int64]) -> int:
    """Return how many nodes of a path lie in the slots that they are to be kept in."""
    moved = np.flatnonzero(path != np.arange(len(path)))
    return int(moved[0]) if len(moved) else len(path)
