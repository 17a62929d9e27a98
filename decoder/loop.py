"""The decoding loop: draft, cut to budget, verify in one pass, accept, commit."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.budget.budget import Budget, PassOutcome
from decoder.drafters.following import Verified, follow
from decoder.errors import (
    DecoderBusyError,
    GenerationStartedError,
    InvalidSettingsError,
    OutOfMemoryError,
)
from decoder.model.passes import within_depth
from decoder.model.target import Target
from decoder.observation import Clock, ObservedPass, Observer, Statistics, Watch
from decoder.sampling.verification import AcceptRule, PassContext, accept_greedy
from decoder.stopping import StopRule, first_stop
from retriever.drafter import Drafter, TokenIds
from retriever.errors import RetrieverError
from retriever.follower import DraftLimits, Followers
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree

DEFAULT_MAX_NEW_TOKENS = 256
"""A paragraph or two: short enough that a forgotten limit does not run for long."""


class Decoder:
    """Decodes one sequence at a time with a target model and a drafter.

    Args:
        target: the model that decides the output.
        drafter: proposes the drafts that are verified; `NoDrafter` makes it plain decoding.
        budget: how much of a draft is verified.
        accept: which drafted tokens are kept: greedily or by sampling.
        stop_ids: tokens that end a sequence; the one that did is part of the output.
        drafter_vocabulary: size of the vocabulary that the drafter knows, where the model's is
            larger; a token beyond it ends the drafts for its sequence.

    Attributes:
        followers: of the drafter; decoders that share them share its back-off.
    """

    def __init__(  # noqa: PLR0913  the last three are options
        self,
        target: Target,
        drafter: Drafter,
        budget: Budget,
        accept: AcceptRule = accept_greedy,
        stop_ids: Iterable[int] = (),
        *,
        drafter_vocabulary: int | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.budget = budget
        self.accept = accept
        self.stop_ids = frozenset(stop_ids)
        limits = DraftLimits(target.vocabulary_size, drafter_vocabulary)
        self.followers = Followers(drafter, limits)
        self._is_busy = False
        self._numbers = count()

    def generate(
        self,
        prompt: Sequence[int] | TokenIds,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        *,
        remember: bool = True,
        stop_rule: StopRule | None = None,
        observer: Observer | None = None,
    ) -> "Generation":
        """Prepare a sequence; iterating over the result decodes it.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: most tokens to generate; the model's own limit also ends it.
            remember: whether the drafter may use the output for later sequences.
            stop_rule: may end the sequence before that.
            observer: called with every pass, after its tokens are given out.

        Raises:
            InvalidPromptError: the prompt is empty or no token ids of the vocabulary, or leaves
                no room below the model's limit.
            InvalidSettingsError: `max_new_tokens` is negative.
        """
        if max_new_tokens < 0:
            raise InvalidSettingsError(f"max_new_tokens must be 0 or more, not {max_new_tokens}")
        tokens = self.target.checked_prompt(prompt)
        room = self.target.room(len(tokens), max_new_tokens)
        sequence = TokenSequence(tokens, remember=remember)
        return Generation(self, sequence, next(self._numbers), room, Watch(stop_rule, observer))

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Hold the target during the block; its cache serves one sequence.

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
    """One sequence, decoded once: each iteration gives the tokens of one pass.

    Leaving the iteration early, by an error or by closing it, ends the drafter's session too.

    Attributes:
        statistics: counts and times so far.
    """

    def __init__(
        self,
        decoder: Decoder,
        sequence: TokenSequence,
        number: int,
        max_new_tokens: int,
        watch: Watch,
    ) -> None:
        self._target = decoder.target
        self._budget = decoder.budget
        self._accept = decoder.accept
        self._decoder = decoder
        self._sequence = sequence
        self._last_token = int(sequence.tokens[-1])
        self._number = number
        self._remaining = max_new_tokens
        self._watch = watch
        self._drafted = self._tree = DraftTree.empty()
        self._has_started = False
        self.statistics = Statistics()

    def __iter__(self) -> Iterator[list[int]]:
        if self._has_started:
            raise GenerationStartedError(
                "a generation is decoded once: call Decoder.generate for another one"
            )
        self._has_started = True
        return self._steps()

    def _steps(self) -> Iterator[list[int]]:
        with self._decoder.reserved(), self._drafting():
            clock = Clock(self.statistics)
            step = self._begin
            while self._remaining > 0:
                with self.statistics.charging("total_s"):
                    tokens = step()
                yield tokens
                if self._watch.observer is not None:
                    self._watch.observer(self._seen(tokens, clock))
                step = self._step

    def _begin(self) -> list[int]:
        """Read the prompt and commit the first token."""
        tree = DraftTree.empty()
        with self.statistics.charging("target_s"), self.statistics.charging("prompt_s"):
            logits = self._target.prefill(self._sequence.prompt)
            path, next_token = self._accept(tree, logits, self._pass_context())
        self._learn(self._verified(tree, logits, path, next_token))
        return self._emit(tree, path, next_token)

    def _step(self) -> list[int]:
        """Commit the next tokens; always at least one."""
        tree = self._draft()
        before_s = self.statistics.target_s
        with self.statistics.charging("target_s"):
            tree, logits = self._verify(tree)
            path, next_token = self._accept(tree, logits, self._pass_context())
            self._target.commit(path)
        context, pass_s = len(self._sequence), self.statistics.target_s - before_s
        self._budget.learn(PassOutcome(tree, path, next_token, context, pass_s))
        self._learn(self._verified(tree, logits, path, next_token))
        return self._emit(tree, path, next_token)

    def _verify(self, tree: DraftTree) -> tuple[DraftTree, torch.Tensor]:
        """Verify a tree; while memory runs out, half of it."""
        while len(tree):
            with suppress(OutOfMemoryError):
                return tree, self._target.verify(self._last_token, tree)
            tree = tree.prefix(len(tree) // 2)
            self._budget.halve()
        return tree, self._target.verify(self._last_token, tree)

    def _pass_context(self) -> PassContext:
        return PassContext(self._number, self._sequence.tokens, self._sequence.num_prompt)

    def _verified(
        self, tree: DraftTree, logits: torch.Tensor, path: NDArray[np.int64], next_token: int
    ) -> Verified:
        states = self._target.states
        return Verified(self._last_token, tree, logits, path, next_token, states)

    def _learn(self, verified: Verified) -> None:
        with self.statistics.charging("draft_s"):
            self._drafter.learn(verified)

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        """Keep a session with the drafter open during the block."""
        with self.statistics.charging("draft_s"), self.statistics.charging("total_s"):
            self._drafter = follow(self._decoder.followers, self._sequence)
        try:
            yield
        except Exception:
            with suppress(RetrieverError):  # the first error is raised
                self._end_session()
            raise
        finally:
            self._end_session()

    def _end_session(self) -> None:
        with self.statistics.charging("draft_s"), self.statistics.charging("total_s"):
            self._drafter.close()
        self.statistics.num_failures = self._drafter.num_failures

    def _draft(self) -> DraftTree:
        """Return the nodes of a draft that pay and fit."""
        self._drafted = DraftTree.empty()
        max_depth, context = self._remaining - 1, len(self._sequence)
        max_nodes = min(self._budget.ask(context), self._target.max_nodes) if max_depth else 0
        if max_nodes == 0:
            return DraftTree.empty()
        before_s = self.statistics.draft_s
        with self.statistics.charging("draft_s"):
            tree = self._drafter.draft(max_nodes)
        self._drafted = self._target.fitting(within_depth(tree, max_depth))
        draft_s = self.statistics.draft_s - before_s
        return self._budget.cut(self._drafted, context, draft_s)

    def _emit(self, tree: DraftTree, path: NDArray[np.int64], next_token: int) -> list[int]:
        """Commit the accepted tokens up to the limit or the first stop."""
        tokens = [*tree.token_ids[path].tolist(), next_token][: self._remaining]
        end = first_stop(tokens, self._decoder.stop_ids, self._watch.stop_rule)
        tokens = tokens[:end]
        self._remaining = 0 if end is not None else self._remaining - len(tokens)
        self._sequence.extend(tokens)
        self._last_token = tokens[-1]
        self._tree, self._path = tree, path[: len(tokens)]
        self.statistics.record(tree, self._path, len(tokens))
        return tokens

    def _seen(self, tokens: list[int], clock: Clock) -> ObservedPass:
        return ObservedPass(self._drafted, self._tree, self._path, tokens, clock.lap())
