"""The target model, which verifies a draft tree in one forward pass."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from logging import getLogger
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from decoder.errors import (
    InvalidPromptError,
    ModelChangedError,
    OutOfMemoryError,
    UnsupportedModelError,
    WeightsNotLoadedError,
)
from decoder.model.cache import DEFAULT_PREFIX_BYTES, Prefix, PrefixStore, TreeCache, num_shared
from decoder.model.capability_check import (
    FOUND_HERE,
    CannotCheckError,
    ModelVerdict,
    Verdicts,
    agree,
    find_verdict,
    num_trials,
)
from decoder.model.compatibility import (
    Capability,
    Compatibility,
    chain_of,
    common_window,
    compatibility_of,
    num_embeddings,
    position_limit,
    reduced,
    takes_masks,
    tell_once,
)
from decoder.model.graphs import (
    MOST_ROWS,
    CapturedPasses,
    CaptureMaker,
    Kept,
    Masking,
    Windows,
    capture_on,
)
from decoder.model.packed import PackedPasses
from decoder.model.passes import (
    CachedPasses,
    ChainCache,
    Passes,
    PlainPasses,
    Read,
    Reading,
    is_out_of_memory,
)
from decoder.model.products import LeastWeights
from decoder.model.ranks import led, ranks_of, refuse_shared
from decoder.model.stamp import ModelWatch, Structure, num_said, undisturbed, weights_of
from decoder.model.states import States
from decoder.model.user_model import UserModel, has_code_of_others, is_spread, noting_windows
from decoder.sampling.verification import Drawing
from indexer.errors import reason_of
from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree

_log = getLogger(__name__)
_NO_TOKENS: Final = np.empty(0, np.int32)


@contextmanager
def within_memory(num_tokens: int) -> Iterator[None]:
    """Translate out-of-memory errors during the block, and add the context length.

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
        InvalidPromptError: the prompt is text, is not one row, or holds values that are not
            integers.
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
        num_tokens: number of prompt tokens.
        max_length: most tokens of a sequence; `None` for no limit.

    Raises:
        InvalidPromptError: the prompt is empty, or reaches the limit.
    """
    if num_tokens == 0:
        raise InvalidPromptError("the prompt is empty: give at least one token")
    if max_length is not None and num_tokens >= max_length:
        raise InvalidPromptError(
            f"the prompt has {num_tokens} tokens, and the model's limit is "
            f"{max_length} for prompt and output together: shorten it"
        )


class Target:
    """A causal language model with a cache that has a place for each sequence.

    Each pass runs the model's own modules, with their hooks, adapters and modes, in their current
    state. During passes, grouped-query attention runs without repeated keys. On a CPU, linear
    layers use packed copies of weights, each while its weight is unchanged. `renew` adapts to
    changes of the model at the start of a generation.

    On CUDA, passes that verify a draft are captured as CUDA graphs, one for each of a few shapes.

    Args:
        model: a decoder-only transformers model.
        pack: whether to pack weights on a CPU, or the least size of layers to pack; the copies take
            `packed_bytes`.
        capture: function that returns a `Capture` for passes of fixed shapes; `None` for CUDA
            graphs on CUDA, and no capturing elsewhere.
        states: numbers of the hidden states to record in every pass, see `decoder.model.states`;
            without any there is no overhead.
        prefix_bytes: bytes of memory for keys and values of finished sequences, in addition to
            those still in places; 0 for none.
        reuse_prefixes: whether a generation may reuse keys and values of an earlier generation, if
            no change of the model was detected since. Not all changes can be detected (for example
            in the internal state of your own hooks or layers), so set this only if the model is
            changed in ordinary ways.
        verdicts: store of verdicts on what models verify; by default in memory, while the model
            exists. `None` to trust the model's configuration without a check.

    Attributes:
        states: hidden states of the last pass by number, each [rows, hidden size], a row for every
            token that the pass read.
        capability: which drafts the model can verify; if it cannot verify trees, this is logged
            once.
        reason: why the model cannot verify trees; empty if it can.
        max_nodes: most nodes of a draft to verify; halved if memory runs out.
        vocabulary_size: number of token embeddings; the model accepts token ids below it.
        max_length: most tokens of a sequence; `None` if the model's config sets no limit; see
            `decoder.model.compatibility.position_limit`.
        ranks: the group of processes that share the model; `None` if the model is in one process.

    Raises:
        UncroppableCacheError: the model is not decoder-only.
        UnsupportedModelError: the target cannot run the model for another reason, or a check showed
            that its logits differ from those of `model.generate`.
    """

    def __init__(  # noqa: PLR0913  all but the first are options
        self,
        model: PreTrainedModel,
        *,
        pack: bool | LeastWeights = True,
        capture: CaptureMaker | None = None,
        states: Iterable[int] = (),
        prefix_bytes: int = DEFAULT_PREFIX_BYTES,
        reuse_prefixes: bool = False,
        verdicts: Verdicts | None = FOUND_HERE,
    ) -> None:
        self.ranks = ranks_of(model)
        # Processes might differ in their available memory.
        self._prefixes = PrefixStore(prefix_bytes if self.ranks is None else 0)
        self._reuses = reuse_prefixes
        self._pack, self._capture, self._tapped = pack, capture, tuple(states)
        self._verdicts = verdicts
        if self._tapped:
            refuse_shared(model, "No head can draft from the states of a")
        self._model = model
        self._packed: PackedPasses | None = None
        self._watch: ModelWatch | None = None
        self._is_remade = False
        self._num_said = num_said()
        self._settle()

    def _settle(self) -> None:
        """Find out what the model can verify with its current structure.

        Raises: see the class.
        """
        model = self._model
        self._structure = Structure.of(model)
        self._weights = weights_of(model)
        _check_placing(model)
        promised = compatibility_of(model)
        self.max_length = position_limit(model.config)
        self.vocabulary_size = num_embeddings(model)
        self._begin(promised)
        self._user.audit()  # other users may have packed weights before
        if self._verdicts is not None:
            self._check(model, promised, self._verdicts)
        if self.capability is promised.capability is Capability.CHAINS:
            self._captured = self._made_captured(Masking.OWN)
            self._check_captured_chains()
        tell_once(model, self.capability, self.reason)

    def _begin(self, compatibility: Compatibility) -> None:
        """Set up passes for the drafts that the model can verify."""
        self.capability, self.reason = compatibility.capability, compatibility.reason
        self._windows = dict(compatibility.layers or ())
        window = common_window(self._windows)
        self._user = UserModel(self._model, pack=self._pack, tapped=self._tapped, window=window)
        self._renew_cache(compatibility)
        self.max_nodes = 0 if self.capability is Capability.PLAIN else sys.maxsize

    @led
    def renew(self) -> bool:
        """Adapt to the model's current state before a generation.

        Copies of weights that changed unnoticed are dropped. If modules, hooks, modes, the
        configuration or shapes changed, the model's capability is determined again.

        Returns:
            Whether the target was set up again, so that limits, costs, vocabulary and capability
            may differ.

        Raises: see the class.
        """
        is_other = not Structure.of(self._model).is_of(self._structure)
        if is_other:
            refuse_shared(self._model, "Nothing may be changed in a")
            self._prefixes.clear()
            self._settle()
        else:
            weights = weights_of(self._model)
            is_changed = self._user.audit() or weights != self._weights or not self._reuses
            self._weights = weights
            if is_changed:
                self.forget()
        self._watch, self._is_remade, self._num_said = ModelWatch(self._model), False, num_said()
        return is_other

    def release(self) -> None:
        """Release the references to the model's modules that are held during a generation."""
        self._watch = None

    def has_changed(self) -> bool:
        """Return whether callbacks changed the model since the last pass.

        If so, the pass's results after the last chosen token are outdated.
        """
        if self._watch is None:
            return False
        self._is_remade |= self._watch.has_other_modules()
        self._is_remade |= self._watch.has_other_weights()  # for example with another dtype
        is_other = self._watch.has_other_settings() or self._is_remade
        return is_other or self._num_said != num_said()

    def _is_another_model(self) -> bool:
        """Return whether the model changed within a generation; if it did, adapt to the change.

        Raises:
            ModelChangedError: the keys and values so far cannot be used with the changed model.
        """
        if self._watch is not None and (self._is_remade or self._watch.has_other_modules()):
            self._is_remade = False
            now = Structure.of(self._model)
            if not now.is_of(self._structure):
                self._remake(now)
                return True
        if self._captured is None or not self._captured.has_other_model():
            return False
        self._captured = self._made_captured(self._captured.masking)
        return True

    def _remake(self, now: Structure) -> None:
        """Continue with changed modules if these verify as much as before.

        Raises:
            ModelChangedError: the modules verify less, or their dtype or device is different.
        """
        before, self._structure = self._structure, now
        if before.placed != now.placed:
            raise ModelChangedError(
                "the model was cast, moved or resized in the middle of a generation, which does "
                "not match what was read so far: end the generation first"
            )
        options = {"pack": self._pack, "states": self._tapped, "verdicts": self._verdicts}
        try:
            found = Target(self._model, **options)  # type: ignore[arg-type]  # as given to this one
        except UnsupportedModelError as error:
            raise ModelChangedError(
                f"the model was changed in the middle of a generation: {error}"
            ) from error
        if found.capability < self.capability:
            raise ModelChangedError(
                "the model was changed in the middle of a generation, and now verifies "
                f"only {found.capability.name.lower()} ({found.reason}): end the generation first"
            )
        self._user.look()
        masking = None if self._captured is None else self._captured.masking
        if self._packed is not None and not self._user.attends_by_groups():
            self._packed = None  # each sequence is read separately
            masking = None if masking is None else Masking.DENSE
        self._captured = None if masking is None else self._made_captured(masking)

    def _renew_cache(self, compatibility: Compatibility) -> None:
        """Start with an empty cache that has no allocated memory."""
        self._places = _Places(partial(_passes, self._user, compatibility))
        self._packed = self._places.packed(self._user, self._windows)
        masking = Masking.DENSE if self._packed is None else Masking.SPLIT
        takes_trees = self.capability is Capability.TREES
        self._captured = self._made_captured(masking) if takes_trees else None
        self._committed = [0]
        self._held: list[list[int]] = [[]]
        self._latest: list[TokenIds] = [_NO_TOKENS]
        self.states: States = {}
        self._is_packing_checked = False

    def _made_captured(self, masking: Masking) -> CapturedPasses | None:
        """Return captured passes of fixed shapes; `None` if passes are not captured."""
        capture, cache = self._capture or capture_on(self.device), self._places.cache
        if capture is None or cache is None or is_spread(self._model):
            return None
        has_masks = masking is Masking.OWN or takes_masks(self._windows)
        if not has_masks or has_code_of_others(self._model):
            return None
        return CapturedPasses(self._user, cache, self._windows, capture, masking, self.max_length)

    def _check(self, model: PreTrainedModel, promised: Compatibility, verdicts: Verdicts) -> None:
        """Reduce the capability to what the model was found to verify.

        Raises:
            UnsupportedModelError: not even plain passes give the model's logits.
        """
        verdict = self._agreed(verdicts.verdict_on(model))
        if verdict is None:
            verdict = self._agreed(self._found(model, promised))
            if verdict is None:
                return
            if self._is_as_it_was(model):  # else the model changed during the check
                verdicts.keep_verdict(model, verdict)
        if verdict.capability is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be decoded here: {verdict.reason}"
            )
        capability = min(verdict.capability, promised.capability)
        if capability is not self.capability:
            self._begin(reduced(promised, capability, verdict.reason))
        self.reason = verdict.reason or promised.reason

    def _is_as_it_was(self, model: PreTrainedModel) -> bool:
        """Return whether the model is unchanged since the check began."""
        return Structure.of(model).is_of(self._structure) and weights_of(model) == self._weights

    def _agreed(self, verdict: ModelVerdict | None) -> ModelVerdict | None:
        """Return the verdict; processes that share a model use the first process's verdict."""
        return verdict if self.ranks is None else self.ranks.decided(lambda: verdict, self)

    @torch.no_grad()
    def _found(self, model: PreTrainedModel, promised: Compatibility) -> ModelVerdict | None:
        """Return the verdict from test passes; `None` if the model cannot be checked."""

        def made(capability: Capability) -> "Target":
            if capability is not self.capability:
                self._begin(reduced(promised, capability, ""))
            return self

        try:
            with torch.random.fork_rng(devices=[]):
                return find_verdict(model, promised.capability, made)
        except (CannotCheckError, OutOfMemoryError) as error:
            _log.info("the configuration of %s is trusted: %s", type(model).__name__, error)
            self._begin(promised)
            return None
        finally:
            self._renew_cache(reduced(promised, self.capability, ""))

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self._user.device

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights, in addition to the model's own weights."""
        return self._user.packed_bytes

    @property
    def packs_weights(self) -> bool:
        """Whether passes use packed weights as soon as these exist."""
        return self._user.packs

    @property
    def pads_passes(self) -> bool:
        """Whether passes are captured; their rows are then padded to the next power of two.

        Captured passes also sample tokens after their rows if a reading has a selection.
        """
        return self._captured is not None and self._captured.is_padding

    @property
    def most_rows(self) -> int | None:
        """Number of rows of the widest captured pass; `None` if passes are not captured."""
        return MOST_ROWS if self.pads_passes else None

    @property
    def packs(self) -> bool:
        """Whether readings of several places share a pass; otherwise each has its own pass."""
        return self._packed is not None

    def checked_prompt(self, prompt: Sequence[int] | TokenIds) -> TokenIds:
        """Return a prompt as int32[n], n at least 1.

        Raises:
            InvalidPromptError: the prompt is empty, holds invalid token ids, or reaches the model's
                length limit.
        """
        tokens = prompt_tokens(prompt)
        check_prompt_length(len(tokens), self.max_length)
        if tokens.min() < 0 or tokens.max() >= self.vocabulary_size:
            raise InvalidPromptError(
                f"the prompt holds tokens outside the model's vocabulary of {self.vocabulary_size}"
            )
        return tokens.astype(np.int32)

    def room(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return how many of `max_new_tokens` the length limit allows after `num_tokens`."""
        if self.max_length is None:
            return max_new_tokens
        return min(max_new_tokens, self.max_length - num_tokens)

    def fitting(self, tree: DraftTree) -> DraftTree:
        """Return the part of a draft that the model can verify: a tree, one chain, or nothing."""
        if self.capability is Capability.CHAINS:
            tree = chain_of(tree)
        return tree.prefix(self.max_nodes)

    @led
    def make_places(self, count: int) -> None:
        """Ensure at least `count` places; the first place exists from the start."""
        self._places.make(count)
        for _ in range(count - len(self._committed)):
            self._committed.append(0)
            self._held.append([])
            self._latest.append(_NO_TOKENS)
        if count > 1 and self._packed is not None and not self._is_packing_checked:
            self._is_packing_checked = True
            self._check_packing(self._packed)

    @led
    def prepare(self, num_tokens: int, num_places: int = 1, num_rows: int = MOST_ROWS) -> None:
        """Allocate memory and capture passes in advance, so that neither delays a sequence later.

        Call this before the first sequence. Larger workloads work too: memory and passes are added
        when they are needed.

        Args:
            num_tokens: most tokens of a sequence, prompt and output together.
            num_places: most sequences decoded at the same time.
            num_rows: most rows of a pass, that is, tokens of drafts and prompt chunks.

        Raises:
            OutOfMemoryError: there is not enough memory.
        """
        self.make_places(num_places)
        cache = self._places.cache
        if cache is None:
            return
        num_tokens = self.room(0, num_tokens)
        if cache.capacity == 0:
            self.prefill(np.zeros(1, np.int32))  # layers allocate buffers with the first states
            self.reset()
        with within_memory(num_tokens), torch.no_grad():
            cache.reserve(num_tokens + num_rows)
            if self._captured is not None:
                self._captured.prepare(num_tokens, num_rows)

    @torch.no_grad()
    def prepare_drawing(self, drawing: Drawing, num_rows: int = MOST_ROWS) -> None:
        """Capture a drawing for sequences that use it; call this after `prepare`.

        Args:
            drawing: the drawing of the sequences' accept rule; see `SelectingRule`.
            num_rows: most rows of a pass.
        """
        if self._captured is not None:
            self._captured.prepare_drawing(drawing, num_rows)

    def _check_packing(self, packed: PackedPasses) -> None:
        """Check shared passes; if they give different logits, read each sequence separately."""
        forked, single = (3, (ROOT, ROOT, 0)), (4, (ROOT,))
        with noting_windows() as noted:
            self._drawn(0, [forked])
        if noted and noted != set(self._windows.values()):
            self._packed = None
            _log.warning(
                "%s reads one sequence at a time: the windows of its prompts differ from its "
                "configuration",
                type(self._model).__name__,
            )
        elif not self._is_alike(partial(self._read_together, packed), forked, single):
            self._packed = None
            _log.warning(
                "%s reads one sequence at a time: passes for several give different logits",
                type(self._model).__name__,
            )
        elif not self._is_alike(self._read_captured, forked, single):
            self._captured = None
            _log.warning(
                "passes of %s run without captured graphs, and take longer: for several sequences "
                "captured graphs give different logits",
                type(self._model).__name__,
            )

    def _check_captured_chains(self) -> None:
        """Run chains eagerly if captured passes with the model's own masks give different logits.

        Two lengths are checked, because a value that is read from the host instead of the device
        would keep the value for the first length.
        """
        for length in (3, 6):
            if self._captured is None:
                return
            if not self._is_alike(self._read_captured, (length, (ROOT, 0))):
                self._captured = None
                _log.warning(
                    "chains of %s run without captured graphs, which give different logits",
                    type(self._model).__name__,
                )

    @torch.no_grad()
    def _is_alike(
        self,
        read: Callable[[Sequence[Reading]], list[Read] | None],
        *sequences: tuple[int, Sequence[int]],
    ) -> bool:
        """Return whether a way to read several sequences gives the logits of separate passes.

        It also returns true if `read` is not applicable. As in `find_verdict`, one choice of tokens
        for which the logits agree is enough.

        Args:
            read: function that reads all sequences in one pass; it returns `None` if not
                applicable.
            sequences: for each sequence, the number of tokens before the last token, and the
                parents of the tree's nodes.
        """
        trials = range(num_trials(self._model.dtype))
        is_alike = any(self._reads_alike(read, self._drawn(at, sequences)) for at in trials)
        for place in range(len(sequences)):
            self.reset(place)
        return is_alike

    def _drawn(self, seed: int, sequences: Sequence[tuple[int, Sequence[int]]]) -> list[Reading]:
        """Read random tokens in each place; return readings of further, distinct tokens."""
        rng = np.random.default_rng(seed)
        readings = []
        for place, (length, parents) in enumerate(sequences):
            count = length + 1 + len(parents)
            tokens = rng.choice(self.vocabulary_size, count, replace=count > self.vocabulary_size)
            self.prefill(tokens[:length].astype(np.int32), place)
            nodes, even = tokens[length + 1 :].tolist(), [0.5] * len(parents)
            tree = DraftTree.checked(nodes, list(parents), even, [0] * len(parents))
            readings.append(Reading.of(place, int(tokens[length]), tree))
        return readings

    def _reads_alike(
        self,
        read: Callable[[Sequence[Reading]], list[Read] | None],
        readings: Sequence[Reading],
    ) -> bool:
        alone = [self._read_alone(reading).logits for reading in readings]
        for reading in readings:
            self.rewind(reading.place)
        try:
            found = read(readings)
        except Exception as error:  # noqa: BLE001  each model raises its own errors
            _log.debug("a pass for two sequences fails: %s", error)
            return False
        return found is None or all(
            agree(each.logits, own) for each, own in zip(found, alone, strict=True)
        )

    @led
    def prefill(self, prompt: TokenIds, place: int = 0) -> torch.Tensor:
        """Drop the sequence of a place, and read a new prompt.

        Args:
            prompt: int32[n], the prompt's token ids, n at least 1.
            place: place of the sequence.

        Returns:
            [1, vocabulary], the logits after the prompt's last token.

        Raises:
            OutOfMemoryError: there is not enough memory for the prompt.
        """
        self.reset(place)
        read = self._read_alone(Reading(place, prompt))
        self.states = read.states
        return read.logits

    @led
    def verify(self, last_token: int, tree: DraftTree, place: int = 0) -> torch.Tensor:
        """Run the last committed token and a tree after it through the model in one pass.

        Uncommitted tokens of an earlier call are dropped first.

        Args:
            last_token: id of the sequence's last token, which the model has not read yet.
            tree: the draft tree after this token, as returned by `fitting`; its tokens must be
                within the vocabulary.
            place: place of the sequence.

        Returns:
            [1 + N, vocabulary], the logits after the last token and after each node.

        Raises:
            OutOfMemoryError: there is not enough memory for the pass. `max_nodes` is set to half of
                the tree's nodes; committed tokens stay.
        """
        [read] = self.read([Reading.of(place, last_token, tree)])
        self.states = read.states
        return read.logits

    @led
    def read(self, readings: Sequence[Reading]) -> list[Read]:
        """Read the inputs of several sequences, in one pass if the target packs.

        Uncommitted tokens of earlier calls are dropped first.

        Args:
            readings: readings of distinct places, in the order of the places.

        Raises:
            OutOfMemoryError: there is not enough memory for the pass. `max_nodes` is set to half of
                the largest tree's nodes; committed tokens stay, and prompt chunks are not
                committed.
        """
        if self._num_said != num_said():
            self._num_said = num_said()
            self._user.audit()
        if self._captured is not None and self._captured.has_moved_weights():
            self._captured = self._made_captured(self._captured.masking)
        try:
            read = self._launched(readings)
            if self._is_another_model():  # checked while the device computes
                read = self._launched(readings)
            if read is None:
                return self._read_eagerly(readings)
        except OutOfMemoryError:
            most = max(0 if each.tree is None else len(each.tree) for each in readings)
            if most:  # else only a prompt or a plain pass was read
                self.max_nodes = min(most // 2, self.max_nodes)
            raise
        for reading in readings:
            self._note(reading)
        return read

    def _launched(self, readings: Sequence[Reading]) -> list[Read] | None:
        """Run a captured pass after the committed tokens; `None` if there is no such pass."""
        for reading in readings:
            self.rewind(reading.place)
        return self._read_captured(readings)

    def _read_eagerly(self, readings: Sequence[Reading]) -> list[Read]:
        if len(readings) == 1 or self._packed is None or not self._packed.is_ready:
            return [self._read_alone(reading) for reading in readings]
        return self._read_together(self._packed, readings)

    @led
    @torch.no_grad()
    def rewind(self, place: int = 0) -> None:
        """Drop the tokens of a place that were verified but not committed."""
        self._places.at(place).truncate(self._committed[place])

    def commit(self, path: NDArray[np.int64], place: int = 0) -> None:
        """Commit the last token and a path of the verified tree; drop all other nodes.

        Args:
            path: int64[k], the accepted nodes, from a child of the root down; it may be empty.
            place: place of the sequence.
        """
        self.commit_all([(place, path)])

    @led
    @torch.no_grad()
    def commit_all(self, paths: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
        """Commit for several sequences; on CUDA this takes as many launches as for one sequence.

        Args:
            paths: distinct places, each with the path of its sequence; see `commit`.
        """
        moved = []
        for place, path in paths:
            start = self._committed[place] + 1
            end = self._committed[place] = start + len(path)
            latest = self._latest[place]
            self._held[place] += [int(latest[0]), *latest[path + 1].tolist()]
            in_place = _num_in_place(path)
            if in_place == len(path):
                self._places.at(place).truncate(end)
            else:
                moved.append(Kept(place, start + in_place, path[in_place:] + start))
        if moved and (self._captured is None or not self._captured.move(moved)):
            for each in moved:
                self._places.at(each.place).keep(each.start, each.slots)

    @led
    def pretend(self, num_tokens: int, place: int = 0) -> None:
        """Fake a sequence of `num_tokens` tokens without reading them, to time passes."""
        self.prefill(np.zeros(1, np.int32), place)
        if self._places.at(place).pretend(num_tokens):
            self._committed[place] = num_tokens
            self._held[place].clear()  # these states belong to no tokens
        else:
            self.prefill(np.zeros(num_tokens, np.int32), place)

    @led
    def pretend_marked(self, num_tokens: int, marked: NDArray[np.int64]) -> bool:
        """Make a fake sequence whose tokens `marked` stand out; return whether that is possible."""
        self.prefill(np.zeros(1, np.int32))
        if not self._places.at(0).pretend(num_tokens, marked):
            return False
        self._committed[0] = num_tokens
        self._held[0].clear()
        return True

    @led
    @torch.no_grad()
    def drop(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` committed tokens of the first place."""
        self._committed[0] -= num_tokens
        del self._held[0][self._committed[0] :]
        self._places.at(0).truncate(self._committed[0])

    @led
    @torch.no_grad()
    def reset(self, place: int = 0) -> None:
        """Drop the sequence of a place."""
        self._places.at(place).truncate(0)
        self._committed[place] = 0
        self._held[place].clear()

    @led
    def forget(self) -> None:
        """Drop all sequences, including finished ones, so that none is reused."""
        self._prefixes.clear()
        for place in range(len(self._committed)):
            self.reset(place)

    def best_place(self, tokens: TokenIds, places: Sequence[int]) -> int:
        """Return the place, of several, that holds the longest prefix of a sequence."""
        return max(places, key=lambda place: (self._num_shared(tokens, place), -place))

    @led
    @torch.no_grad()
    def resume(self, tokens: TokenIds, place: int) -> int:
        """Begin a sequence with the keys and values of a prefix that was read earlier.

        The place's old contents are stored elsewhere, within `prefix_bytes`.

        Args:
            tokens: int32[n], all tokens of the sequence.
            place: place of the sequence.

        Returns:
            How many of the sequence's first tokens need not be read, fewer than n.
        """
        cache = self._places.cache
        if cache is None or cache.bytes_per_token == 0:
            self.reset(place)
            return 0
        most = len(tokens) - 1
        own = self._num_shared(tokens, place)
        found = self._prefixes.best(tokens, own)
        self._keep(cache, place, own)
        if found is not None:
            prefix, kept = found
            with suppress(OutOfMemoryError), within_memory(kept):
                cache.at(place).put_back(prefix.states, min(kept, most))
                own = kept
                self._held[place] = prefix.tokens[:kept].tolist()
        shared = self._committed[place] = min(own, most)
        del self._held[place][shared:]
        self._places.at(place).truncate(shared)
        return shared

    @property
    def hands_over(self) -> bool:
        """Whether `adopt` and `held` work: the model has only keys and values, in one process."""
        return self._places.cache is not None and self.ranks is None

    @torch.no_grad()
    def adopt(self, prefix: Prefix, place: int) -> int:
        """Begin a sequence with given keys and values of a prefix.

        Args:
            prefix: a prefix that is shorter than the sequence, with its keys and values.
            place: place of the sequence.

        Returns:
            How many tokens need not be read; 0 if the target does not support this (see
            `hands_over`).

        Raises:
            OutOfMemoryError: there is not enough memory.
        """
        cache, length = self._places.cache, len(prefix.tokens)
        self.reset(place)
        if cache is None:
            return 0
        with within_memory(length):
            cache.at(place).put_back(prefix.states, length)
        self._committed[place], self._held[place] = length, prefix.tokens.tolist()
        return length

    @torch.no_grad()
    def held(self, place: int) -> Prefix | None:
        """Return copies of a place's keys and values; `None` unless `hands_over` is true.

        Raises:
            OutOfMemoryError: there is not enough memory.
        """
        cache, tokens = self._places.cache, np.array(self._held[place], np.int32)
        if cache is None or not self.hands_over:
            return None
        with within_memory(len(tokens)):
            return Prefix(tokens, cache.at(place).held(len(tokens)))

    def _num_shared(self, tokens: TokenIds, place: int) -> int:
        return num_shared(np.array(self._held[place], np.int32), tokens)

    def _keep(self, cache: TreeCache, place: int, shared: int) -> None:
        """Store a place's contents for later sequences, unless the next one shares most of them."""
        held = self._held[place]
        if self._prefixes.wants(len(held), len(held) - shared, cache.bytes_per_token):
            with suppress(OutOfMemoryError), within_memory(len(held)):
                states = cache.at(place).held(len(held))
                self._prefixes.put(Prefix(np.array(held, np.int32), states))

    @torch.no_grad()
    def _read_captured(self, readings: Sequence[Reading]) -> list[Read] | None:
        """Run a captured pass over several sequences; `None` if there is no such pass."""
        if self._captured is None or (len(readings) > 1 and self._packed is None):
            return None
        with within_memory(self._longest(readings)):
            return self._captured.read(readings)

    @torch.no_grad()
    def _read_alone(self, reading: Reading) -> Read:
        """Read one sequence's input in a separate pass."""
        past = self._committed[reading.place]
        with within_memory(past + len(reading.tokens)):
            read = self._places.at(reading.place).read(reading, past)
        self._note(reading)
        return read

    @torch.no_grad()
    def _read_together(self, packed: PackedPasses, readings: Sequence[Reading]) -> list[Read]:
        """Read several sequences' inputs in one pass."""
        with within_memory(self._longest(readings)):
            read = packed.read(readings)
        for reading in readings:
            self._note(reading)
        return read

    def _longest(self, readings: Sequence[Reading]) -> int:
        """Return the number of tokens of the longest sequence in a pass."""
        return max(self._committed[each.place] + len(each.tokens) for each in readings)

    def _note(self, reading: Reading) -> None:
        """Record a reading; prompt chunks count as committed."""
        self._latest[reading.place] = reading.tokens
        if reading.tree is None:
            self._committed[reading.place] += len(reading.tokens)
            self._held[reading.place] += reading.tokens.tolist()


def _check_placing(model: PreTrainedModel) -> None:
    """Refuse a model whose first weights, which determine the inputs' device, are on no device.

    Raises:
        UnsupportedModelError: the first weights are loaded only while they are used.
        WeightsNotLoadedError: some weights are not loaded, and nothing will load them.
    """
    weights = undisturbed(lambda: list(model.named_parameters()))
    missing = next((name for name, each in weights if each.is_meta), None)
    if missing is None:
        return
    has_hooks = has_code_of_others(model)  # hooks may load offloaded weights
    if has_hooks and weights[0][1].is_meta:
        raise UnsupportedModelError(
            f"the first weights of {type(model).__name__} are on no device until they are used: "
            "load it with a device_map that does not offload the embeddings to disk or CPU"
        )
    if not has_hooks:
        raise WeightsNotLoadedError(
            f"{missing} of {type(model).__name__} is on the meta device, which holds no values: "
            "load it"
        )


class _Places:
    """The caches of all sequences: places of one cache, or a separate cache for each sequence.

    Args:
        new_passes: function that returns passes with an empty cache.

    Attributes:
        cache: the shared cache, if any.
    """

    def __init__(self, new_passes: Callable[[], Passes]) -> None:
        self._new_passes = new_passes
        self._passes = [new_passes()]
        first = self._passes[0]
        cache = first.cache if isinstance(first, CachedPasses) else None
        self.cache = cache if isinstance(cache, TreeCache) else None

    def at(self, place: int) -> Passes:
        """Return the passes for the sequence in a place."""
        if self.cache is None:
            return self._passes[place]
        self.cache.at(place)
        return self._passes[0]

    def make(self, count: int) -> None:
        """Ensure at least `count` places."""
        if self.cache is not None:
            self.cache.make_places(count)
        else:
            self._passes.extend(self._new_passes() for _ in range(count - len(self._passes)))

    def packed(self, model: UserModel, windows: Windows) -> PackedPasses | None:
        """Return passes over several places; `None` if the model does not support such passes."""
        if self.cache is None or not model.attends_by_groups() or not takes_masks(windows):
            return None
        return PackedPasses(model, self.cache, windows)


def _passes(model: UserModel, compatibility: Compatibility) -> Passes:
    takes_trees = compatibility.capability is Capability.TREES
    if compatibility.layers is not None:
        cache = TreeCache([window for _, window in compatibility.layers])
        return CachedPasses(model, cache, takes_trees=takes_trees)
    if compatibility.capability is Capability.CHAINS:
        return CachedPasses(model, ChainCache(model.model), takes_trees=False)
    return PlainPasses(model)


def _num_in_place(path: NDArray[np.int64]) -> int:
    """Return how many of a path's first nodes are already in their final slots."""
    moved = np.flatnonzero(path != np.arange(len(path)))
    return int(moved[0]) if len(moved) else len(path)
