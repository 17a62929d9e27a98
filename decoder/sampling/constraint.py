"""Constraints on the output: state machines that advance along a path."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from decoder.sampling.verification import PassContext
from retriever.drafter import TokenIds
from retriever.errors import InvalidConstraintError
from retriever.predict.grammar.grammars import CompiledGrammar, regex_grammar, schema_grammar

State = TypeVar("State")


class Constraint(Protocol[State]):
    """Decides which tokens may come next; begins where the prompt ends.

    States are values: advancing one does not change it, because a tree's paths share their
    beginnings and most of them are rejected.
    """

    def start(self) -> State:
        """Return the state before the first generated token."""
        ...

    def advance(self, state: State, token: int) -> State:
        """Return the state after one more token, which the state allows."""
        ...

    def allowed(self, state: State) -> torch.Tensor:
        """Return bool[n], whether each token may come next; those from n on may not."""
        ...


class ConstraintMemory(Generic[State]):
    """Keeps a constraint's state from pass to pass, so that it advances once for each token.

    Args:
        constraint: whose states these are.
    """

    def __init__(self, constraint: Constraint[State]) -> None:
        self.constraint = constraint
        self._known: TokenIds = np.empty(0, np.int32)
        self._state = constraint.start()

    def state(self, context: PassContext) -> State:
        """Return the state after all committed tokens."""
        generated = context.generated
        known = len(self._known)
        if known > len(generated) or not np.array_equal(generated[:known], self._known):
            self._state, known = self.constraint.start(), 0
        for token in generated[known:].tolist():
            self._state = self.constraint.advance(self._state, token)
        self._known = generated.copy()
        return self._state


def masked(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return [1, vocabulary], the logits with -inf for the tokens that are not allowed.

    Args:
        scores: [1, vocabulary].
        allowed: bool[n]; tokens from n on are not allowed.
    """
    size = scores.shape[-1]
    mask = torch.zeros(size, dtype=torch.bool, device=scores.device)
    mask[: len(allowed)] = allowed[:size].to(scores.device)
    return scores.masked_fill(~mask, float("-inf"))


if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar(CompiledGrammar):
    """A `Constraint` whose states are matchers of llguidance; each is advanced as a copy."""

    __slots__ = ()

    @classmethod
    def of_regex(
        cls, pattern: str, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int] = ()
    ) -> "Grammar":
        """Constrain the output to a regular expression; see `regex_grammar` and `of`."""
        return cls.of(regex_grammar(pattern), tokenizer, stop_ids)

    @classmethod
    def of_json_schema(
        cls,
        schema: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int] = (),
    ) -> "Grammar":
        """Constrain the output to JSON that a schema describes; see `schema_grammar` and `of`."""
        return cls.of(schema_grammar(schema), tokenizer, stop_ids)

    def start(self) -> "LLMatcher":
        """Return the state before the first generated token."""
        return self._initial

    def advance(self, state: "LLMatcher", token: int) -> "LLMatcher":
        """Return the state after one more token."""
        advanced = state.deep_copy()
        advanced.consume_token(token)
        return advanced

    def allowed(self, state: "LLMatcher") -> torch.Tensor:
        """Return bool[vocabulary], whether each token may come next; a stop token after the end."""
        if state.is_error():
            return torch.zeros(1, dtype=torch.bool)
        mask = bytearray(state.compute_logit_bias())
        return torch.frombuffer(mask, dtype=torch.uint8) > 0


class GrammarProcessor(LogitsProcessor):
    """A grammar for one call of `model.generate`, with drafts or without.

    `model.generate(…, logits_processor=[GrammarProcessor(grammar)])` masks what is forbidden; with
    `custom_generate=foredraft` what is forced is drafted, too, and the output is the same. The
    grammar begins behind the prompt of the call.

    Args:
        grammar: of the model's tokenizer.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._length = 0
        self._num_prompt = 0
        self._memories: list[ConstraintMemory[LLMatcher]] = []

    def __deepcopy__(self, _: dict[int, Any]) -> "GrammarProcessor":
        return GrammarProcessor(self.grammar)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for the tokens that are not allowed.

        Args:
            input_ids: int64[rows, n].
            scores: float32[rows, vocabulary].

        Raises:
            InvalidConstraintError: the grammar is of a larger vocabulary than the model's.
        """
        if self.grammar.num_tokens > scores.shape[-1]:
            raise InvalidConstraintError(
                f"the constraint was made with a tokenizer of {self.grammar.num_tokens} tokens, "
                f"and the model has {scores.shape[-1]}: make it with the model's tokenizer"
            )
        rows, length = input_ids.shape
        if length != self._length + 1 or rows != len(self._memories):
            self._num_prompt = length
            self._memories = [ConstraintMemory(self.grammar) for _ in range(rows)]
        self._length = length
        tokens = input_ids.to("cpu", torch.int32).numpy()
        processed = []
        for row, memory in enumerate(self._memories):
            state = memory.state(PassContext(row, tokens[row], self._num_prompt))
            own = scores[row : row + 1]
            is_over = state.is_stopped() or state.is_error()  # and others of the batch are not
            processed.append(own if is_over else masked(own, self.grammar.allowed(state)))
        return torch.cat(processed)
