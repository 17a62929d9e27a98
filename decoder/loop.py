"""The decoding loop: draft, cut to budget, verify in one pass, accept, commit."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from decoder.budget import Budget
from decoder.errors import DecoderBusyError, InvalidPromptError
from decoder.layout import within_depth
from decoder.session import DraftSession
from decoder.statistics import Statistics
from decoder.target import Target
from decoder.verification import AcceptRule, accept_greedy
from retriever.drafter import Drafter, TokenIds
from retriever.tree import DraftTree

DEFAULT_MAX_NEW_TOKENS = 256


class Decoder:
    """Decodes one sequence at a time with a target model and a drafter.

    Args:
        target: the model whose output it is.
        drafter: whose guesses are verified; `NoDrafter` makes it plain decoding.
        budget: how much of a draft is verified.
        accept: which drafted tokens are kept: greedily or by sampling.
        stop_ids: tokens that end a sequence; the one that did is part of the output.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        budget: Budget,
        accept: AcceptRule = accept_greedy,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.budget = budget
        self.accept = accept
        self.stop_ids = frozenset(stop_ids)
        self._is_busy = False

    def generate(
        self,
        prompt: Sequence[int] | TokenIds,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        *,
        remember: bool = True,
    ) -> "Generation":
        """Prepare a sequence; iterating over the result decodes it.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: most tokens to generate; the model's own limit also ends it.
            remember: whether the drafter may use the output for later sequences.

        Raises:
            InvalidPromptError: the prompt is empty, holds tokens outside the vocabulary, or
                leaves no room below the model's limit.
        """
        tokens = _checked_prompt(prompt, self.target)
        limit = self.target.max_length
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(tokens))
        return Generation(self, tokens, room, remember=remember)

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Hold the target, whose cache is that of one sequence, for the block's time.

        Raises:
            DecoderBusyError: another sequence holds it.
        """
        if self._is_busy:
            raise DecoderBusyError("another sequence is being decoded: finish or close it first")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False


class Generation:
    """One sequence as it is decoded: each iteration gives the tokens of one pass.

    Leaving the iteration early, by an error or by closing it, ends the drafter's session too.

    Attributes:
        statistics: what was done so far.
    """

    def __init__(
        self, decoder: Decoder, prompt: TokenIds, max_new_tokens: int, *, remember: bool
    ) -> None:
        self._target = decoder.target
        self._budget = decoder.budget
        self._accept = decoder.accept
        self._decoder = decoder
        self._prompt = prompt
        self._remember = remember
        self._remaining = max_new_tokens
        self.statistics = Statistics()

    def __iter__(self) -> Iterator[list[int]]:
        with self._decoder.reserved(), self._drafting():
            step = self.begin
            while self._remaining > 0:
                with self.statistics.charging("total_s"):
                    tokens = step()
                yield tokens
                step = self.step

    def begin(self) -> list[int]:
        """Read the prompt and commit the first token."""
        tree = DraftTree.empty()
        with self.statistics.charging("target_s"):
            path, next_token = self._accept(tree, self._target.prefill(self._prompt))
        return self._emit(tree, path, next_token)

    def step(self) -> list[int]:
        """Commit the next tokens; always at least one."""
        tree = self._draft()
        with self.statistics.charging("target_s"):
            logits = self._target.verify(self._last_token, tree)
            path, next_token = self._accept(tree, logits)
            self._target.commit(path)
        self._budget.learn(tree, path)
        return self._emit(tree, path, next_token)

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        """Keep a session with the drafter open for the block's time."""
        size = self._target.vocabulary_size
        with self.statistics.charging("draft_s"), self.statistics.charging("total_s"):
            self._session = DraftSession(
                self._decoder.drafter, self._prompt, size, remember=self._remember
            )
        try:
            yield
        finally:
            with self.statistics.charging("draft_s"), self.statistics.charging("total_s"):
                self._session.close()
            self.statistics.num_failures = self._session.num_failures

    def _draft(self) -> DraftTree:
        """Return the part of a draft that pays and that there is room for."""
        max_depth = self._remaining - 1
        if max_depth == 0 or self._budget.max_nodes == 0:
            return DraftTree.empty()
        with self.statistics.charging("draft_s"):
            tree = self._session.draft(self._budget.max_nodes)
        return self._budget.cut(within_depth(tree, max_depth))

    def _emit(self, tree: DraftTree, path: NDArray[np.int64], next_token: int) -> list[int]:
        """Take what was accepted up to the limit or the first stop token."""
        tokens = [*tree.token_ids[path].tolist(), next_token][: self._remaining]
        stops = (at for at, token in enumerate(tokens) if token in self._decoder.stop_ids)
        stop = next(stops, None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        self._remaining = 0 if stop is not None else self._remaining - len(tokens)
        self._last_token = tokens[-1]
        self._session.extend(tokens)
        self.statistics.record(tree, path[: len(tokens)], len(tokens))
        return tokens


def _checked_prompt(prompt: Sequence[int] | TokenIds, target: Target) -> TokenIds:
    tokens = np.asarray(prompt, np.int64)
    if len(tokens) == 0:
        raise InvalidPromptError("the prompt is empty: give at least one token")
    if tokens.min() < 0 or tokens.max() >= target.vocabulary_size:
        raise InvalidPromptError(
            f"the prompt holds tokens outside the model's vocabulary of {target.vocabulary_size}"
        )
    if target.max_length is not None and len(tokens) >= target.max_length:
        raise InvalidPromptError(
            f"the prompt has {len(tokens)} tokens, and the model's limit is {target.max_length} "
            "for prompt and output together: shorten it"
        )
    return tokens.astype(np.int32)
