"""Constraints on the output: state machines that advance along a path.

llguidance, an optional extra, makes them from regular expressions and JSON schemas.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoder.errors import InvalidConstraintError
from decoder.sampling.forced_drafts import ForcedDrafts, Learned, Matchers
from decoder.sampling.forced_strings import byte_tokenizer
from decoder.sampling.verification import PassContext
from retriever.drafter import TokenIds

State = TypeVar("State")

_MOST_TENANTS: Final = 64
"""Tenants of which a grammar keeps how their outputs are spaced."""


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
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A `Constraint` whose states are matchers of llguidance; each is advanced as a copy.

    The whole output matches; a stop token is allowed where it may end. Bytes count, not tokens:
    a word may be cut into other tokens than the tokenizer would.
    """

    _initial: "LLMatcher" = field(repr=False)
    _matchers: Matchers | None = field(repr=False)
    _tokenizer: "LLTokenizer" = field(repr=False)
    _stop_ids: tuple[int, ...] = field(repr=False)
    _learned: dict[str, Learned] = field(repr=False, default_factory=dict)

    @classmethod
    def of(
        cls, grammar: str, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int] = ()
    ) -> "Grammar":
        """Constrain the output to what a grammar matches.

        Args:
            grammar: of `regex_grammar`, `schema_grammar`, `choice_grammar` or `lark_grammar`.
            tokenizer: the model's, a fast one.
            stop_ids: tokens that end a sequence; the tokenizer's own where there are none.

        Raises:
            InvalidConstraintError: it is too large, or the tokenizer is not fast.
        """
        wrapped = _wrapped(tokenizer, tuple(stop_ids))
        ends = tuple(stop_ids) or tuple(wrapped.eos_tokens)
        _library()
        initial, matchers = _matcher(grammar, wrapped), None
        with suppress(InvalidConstraintError):  # too large over bytes, it is masked all the same
            matchers = Matchers(initial, _matcher(grammar, byte_tokenizer()))
        return cls(initial, matchers, wrapped, ends)

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

    def drafts(self, tenant: str = "") -> ForcedDrafts | None:
        """Return what it forces in one output, beginning before the first token; None if unknown.

        How outputs are spaced is learned for all of a tenant's together.
        """
        if self._matchers is None:
            return None
        if tenant not in self._learned and len(self._learned) >= _MOST_TENANTS:
            del self._learned[next(iter(self._learned))]
        learned = self._learned.setdefault(tenant, Learned())
        return ForcedDrafts(self._matchers, self._tokenizer, self._stop_ids, learned)

    def start(self) -> "LLMatcher":
        """Return the state before the first generated token."""
        return self._initial

    def advance(self, state: "LLMatcher", token: int) -> "LLMatcher":
        """Return the state after one more token."""
        advanced = state.deep_copy()
        advanced.consume_token(token)
        return advanced

    def is_match(self, tokens: Sequence[int]) -> bool:
        """Return whether an output may end behind some tokens, which the constraint allowed."""
        state = self._initial.deep_copy()
        return bool(state.consume_tokens(list(tokens)) and state.is_accepting())

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
        """
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


def regex_grammar(pattern: str) -> str:
    """Return the grammar of a regular expression, in the syntax of Rust's regex.

    Raises:
        InvalidConstraintError: it is empty or cannot be read, or llguidance is missing.
    """
    if not pattern:
        raise InvalidConstraintError(
            "the pattern is empty, which nothing but an empty answer matches: say what an answer "
            "shall match, or ask for no pattern"
        )
    grammar = str(_library().LLMatcher.grammar_from_regex(pattern))
    _check(grammar, f"pattern {pattern!r}", pattern)
    return grammar


def schema_grammar(schema: Any) -> str:
    """Return the grammar of JSON that a schema describes.

    Raises:
        InvalidConstraintError: it cannot be read or followed, or llguidance is missing.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidConstraintError("a JSON schema is an object: this is none")
    try:
        grammar = str(_library().LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except (ValueError, RecursionError) as error:
        raise InvalidConstraintError(f"cannot follow the JSON schema: {error}") from error
    _check(grammar, "JSON schema")
    return grammar


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of some texts, one of which an output is.

    Raises:
        InvalidConstraintError: there is none, or one is empty, or llguidance is missing.
    """
    if not choices or not all(choices):
        raise InvalidConstraintError("a choice is a text that is not empty: give at least one")
    return lark_grammar("start: " + " | ".join(map(json.dumps, choices)))


def lark_grammar(grammar: str) -> str:
    """Return a grammar that is written in llguidance's variant of Lark, checked.

    Raises:
        InvalidConstraintError: it cannot be read, or llguidance is missing.
    """
    checked = str(_library().LLMatcher.grammar_from_lark(grammar))
    _check(checked, "grammar")
    return checked


def _check(grammar: str, name: str, pattern: str = "") -> None:
    message = _library().LLMatcher.validate_grammar(grammar)
    if message and not message.startswith("WARNING"):
        reason = _reason(message) + _position(message, pattern)
        raise InvalidConstraintError(f"cannot follow the {name}: {reason}")


def _reason(message: str) -> str:
    """Return the line with the error, of the many that llguidance gives."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error:")), lines[0])
    return reason.removeprefix("error:").strip()


def _position(message: str, pattern: str) -> str:
    """Return the position of the character that llguidance marks in a pattern, in words."""
    for line, below in pairwise(message.splitlines()):
        indent = line.removesuffix(pattern)
        if pattern and indent != line and not indent.strip() and set(below.strip()) == {"^"}:
            return f" (at character {below.index('^') - len(indent) + 1})"
    return ""


@lru_cache(4)  # it holds the tokenizer, which so cannot be a weak key
def _vocabulary(
    tokenizer: PreTrainedTokenizerFast, _size: int, stop_ids: tuple[int, ...]
) -> "LLTokenizer":
    """Return a vocabulary as llguidance has it, which takes a third of a second to make."""
    from llguidance.hf import from_tokenizer  # noqa: PLC0415  an optional extra

    return from_tokenizer(tokenizer, eos_token=list(stop_ids) or None)


def _wrapped(tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...]) -> "LLTokenizer":
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InvalidConstraintError(
            f"constraints need a fast tokenizer, and {type(tokenizer).__name__} is none"
        )
    return _vocabulary(tokenizer, len(tokenizer), stop_ids)


def _matcher(grammar: str, tokenizer: "LLTokenizer") -> "LLMatcher":
    matcher: LLMatcher = _library().LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise InvalidConstraintError(f"cannot follow the constraint: {matcher.get_error()}")
    return matcher


def _library() -> Any:
    try:
        import llguidance  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise InvalidConstraintError(
            "constraints need llguidance: run pip install 'foredraft[grammar]'"
        ) from error
    return llguidance
