"""Constraints on the output: state machines that advance token by token along a path."""

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
    """Decides which tokens may come next; it starts after the prompt.

    States are immutable: advancing returns a new state, because a tree's paths share prefixes and
    most paths are rejected.
    """

    def start(self) -> State:
        """Return the state before the first generated token."""
        ...

    def advance(self, state: State, token: int) -> State:
        """Return the state after one more token, which must be allowed."""
        ...

    def allowed(self, state: State) -> torch.Tensor:
        """Return bool[n], whether each token may come next; tokens from n on may not."""
        ...


class ConstraintMemory(Generic[State]):
    """Caches a constraint's state between passes, so that it advances once for each token.

    Args:
        constraint: the constraint whose state is cached.
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
    """Return [1, vocabulary], the logits with -inf for tokens that are not allowed.

    Args:
        scores: [1, vocabulary], the logits.
        allowed: bool[n], whether each token is allowed; tokens from n on are not.
    """
    size = scores.shape[-1]
    mask = torch.zeros(size, dtype=torch.bool, device=scores.device)
    mask[: len(allowed)] = allowed[:size].to(scores.device)
    return scores.masked_fill(~mask, float("-inf"))


if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar(CompiledGrammar):
    """A `Constraint` whose states are llguidance matchers, copied before they advance."""

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
        """Constrain the output to JSON that matches a schema; see `schema_grammar` and `of`."""
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
        """Return bool[vocabulary], the allowed next tokens; after the end, only stop tokens."""
        if state.is_error():
            return torch.zeros(1, dtype=torch.bool)
        mask = bytearray(state.compute_logit_bias())
        return torch.frombuffer(mask, dtype=torch.uint8) > 0


class GrammarProcessor(LogitsProcessor):
    """Applies a grammar in one call of `model.generate`, with drafts or without.

    `model.generate(…, logits_processor=[GrammarProcessor(grammar)])` masks forbidden tokens. With
    `custom_generate=foredraft`, forced tokens are also drafted, and the output is the same. The
    grammar starts after the prompt of the call.

    Args:
        grammar: a grammar made with the model's tokenizer.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._length = 0
        self._num_prompt = 0
        self._memories: list[ConstraintMemory[LLMatcher]] = []

    def __deepcopy__(self, _: dict[int, Any]) -> "GrammarProcessor":
        return GrammarProcessor(self.grammar)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits with -inf for tokens that are not allowed.

        Args:
            input_ids: int64[rows, n], prompt and output so far.
            scores: float32[rows, vocabulary], the logits.

        Raises:
            InvalidConstraintError: the grammar's vocabulary is larger than the model's.
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
            is_over = state.is_stopped() or state.is_error()  # but other rows are not
            processed.append(own if is_over else masked(own, self.grammar.allowed(state)))
        return torch.cat(processed)
