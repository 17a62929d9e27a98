"""Grammars of outputs, made from JSON schemas, tools, regular expressions, choices and Lark.

llguidance, an optional extra, parses them and tracks their state.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self

from retriever.drafter import OutputConstraint
from retriever.errors import InvalidConstraintError
from retriever.predict.grammar.forced_drafts import ForcedDrafts, Learned, Matchers
from retriever.predict.grammar.forced_kernels import warm
from retriever.predict.grammar.forced_strings import byte_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

    from indexer.tokenizer import CoreTokenizer

_MOST_TENANTS: Final = 64
"""Most tenants for which a grammar stores what it learned from outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar over a model's tokens, with drafts of the text that it forces.

    The whole output matches the grammar; a stop token is allowed where the output may end. The
    grammar checks bytes, not tokens: a word may be split differently than by the tokenizer.

    Attributes:
        num_tokens: size of the tokenizer's vocabulary, without added tokens.
    """

    num_tokens: int
    _initial: "LLMatcher" = field(repr=False)
    _matchers: Matchers | None = field(repr=False)
    _tokenizer: "LLTokenizer" = field(repr=False)
    _stop_ids: tuple[int, ...] = field(repr=False)
    _learned: dict[str, Learned] = field(repr=False, default_factory=dict)

    @classmethod
    def of(
        cls,
        grammar: str,
        tokenizer: "PreTrainedTokenizerBase | CoreTokenizer",
        stop_ids: Sequence[int] = (),
    ) -> Self:
        """Compile a grammar that outputs must match.

        Args:
            grammar: result of `regex_grammar`, `schema_grammar`, `choice_grammar`, `tools_grammar`
                or `lark_grammar`.
            tokenizer: the model's tokenizer; it must be a fast one.
            stop_ids: tokens that end a sequence; if empty, the tokenizer's own.

        Raises:
            InvalidConstraintError: the grammar is too large, or the tokenizer is not fast.
        """
        _library()
        warm()
        wrapped = _wrapped(tokenizer, tuple(stop_ids))
        ends = tuple(stop_ids) or tuple(wrapped.eos_tokens)
        initial, matchers = _matcher(grammar, wrapped), None
        with suppress(InvalidConstraintError):  # too large over bytes: mask only, without drafts
            matchers = Matchers(initial, _matcher(grammar, byte_tokenizer()))
        num_tokens = _backend(tokenizer).get_vocab_size(with_added_tokens=False)
        return cls(num_tokens, initial, matchers, wrapped, ends)

    def drafts(self, tenant: str = "") -> ForcedDrafts | None:
        """Return the forced drafts of one output, from its first token; None if unavailable.

        All outputs of a tenant share what is learned from them.
        """
        if self._matchers is None:
            return None
        if tenant not in self._learned and len(self._learned) >= _MOST_TENANTS:
            del self._learned[next(iter(self._learned))]
        learned = self._learned.setdefault(tenant, Learned())
        return ForcedDrafts(self._matchers, self._tokenizer, self._stop_ids, learned)

    def is_match(self, tokens: Sequence[int]) -> bool:
        """Return whether an output may end after some tokens, which the grammar allowed."""
        state = self._initial.deep_copy()
        return bool(state.consume_tokens(list(tokens)) and state.is_accepting())


def regex_grammar(pattern: str) -> str:
    """Return the grammar of a regular expression, in the syntax of Rust's regex.

    Raises:
        InvalidConstraintError: it is empty or cannot be parsed, or llguidance is missing.
    """
    if not pattern:
        raise InvalidConstraintError(
            "the pattern is empty, so only an empty answer matches it: give a pattern for the "
            "answer, or leave the pattern out"
        )
    grammar = str(_library().LLMatcher.grammar_from_regex(pattern))
    _check(grammar, f"pattern {pattern!r}", pattern)
    return grammar


def schema_grammar(schema: Any) -> str:
    """Return the grammar of the JSON that a schema describes.

    Raises:
        InvalidConstraintError: the schema is malformed or unsupported, or llguidance is missing.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidConstraintError("a JSON schema must be an object: this value is not one")
    try:
        grammar = str(_library().LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except (ValueError, RecursionError) as error:
        raise InvalidConstraintError(f"cannot follow the JSON schema: {error}") from error
    _check(grammar, "JSON schema")
    return grammar


def choice_grammar(choices: Sequence[str]) -> str:
    """Return a grammar that matches one of the given texts.

    Raises:
        InvalidConstraintError: no text is given, one is empty, or llguidance is missing.
    """
    if not choices or not all(choices):
        raise InvalidConstraintError("choices are texts that are not empty: give at least one")
    return lark_grammar("start: " + " | ".join(map(json.dumps, choices)))


def lark_grammar(grammar: str) -> str:
    """Return a grammar written in llguidance's variant of Lark, after checking it.

    Raises:
        InvalidConstraintError: the grammar cannot be parsed, or llguidance is missing.
    """
    checked = str(_library().LLMatcher.grammar_from_lark(grammar))
    _check(checked, "grammar")
    return checked


def tools_grammar(tools: Any) -> str:
    """Return the grammar of a call to one of the given tools; see `tools_schema`."""
    return schema_grammar(tools_schema(tools))


def tools_schema(tools: Any) -> dict[str, Any]:
    """Return the JSON schema of a call to a given tool: `{"name": …, "arguments": {…}}`.

    Args:
        tools: list of tools as in OpenAI's API and most chat templates. Each is an object with
            `name` and `parameters` (a JSON schema), or has these two under `function`.

    Raises:
        InvalidConstraintError: the list is empty, or a tool has no name.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise InvalidConstraintError("tools must be a list of objects: give at least one")
    return {"anyOf": [_call_of(tool) for tool in tools]}


def _call_of(tool: Any) -> dict[str, Any]:
    stated = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(stated, Mapping) or not isinstance(stated.get("name"), str):
        raise InvalidConstraintError(
            'a tool must be an object with "name" and "parameters", or have both under "function"'
        )
    parameters = stated.get("parameters")
    arguments = {"type": "object"} if parameters is None else parameters
    return {
        "type": "object",
        "properties": {"name": {"const": stated["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def grammar_of(constraint: OutputConstraint) -> str:
    """Return the grammar of a constraint.

    Raises:
        InvalidConstraintError: it is malformed or unsupported, or llguidance is missing.
    """
    if constraint.json_schema is not None:
        try:
            schema = json.loads(constraint.json_schema)
        except (ValueError, RecursionError) as error:
            raise InvalidConstraintError(f"the JSON schema is not JSON: {error}") from error
        return schema_grammar(schema)
    if constraint.regular_expression is not None:
        return regex_grammar(constraint.regular_expression)
    return choice_grammar(constraint.choices)


def _check(grammar: str, name: str, pattern: str = "") -> None:
    message = _library().LLMatcher.validate_grammar(grammar)
    if message and not message.startswith("WARNING"):
        reason = _reason(message) + _position(message, pattern)
        raise InvalidConstraintError(f"cannot follow the {name}: {reason}")


def _reason(message: str) -> str:
    """Return the line that states the error, from llguidance's long message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error:")), lines[0])
    return reason.removeprefix("error:").strip()


def _position(message: str, pattern: str) -> str:
    """Return, in words, the position of the character that llguidance marks in a pattern."""
    for line, below in pairwise(message.splitlines()):
        indent = line.removesuffix(pattern)
        if pattern and indent != line and not indent.strip() and set(below.strip()) == {"^"}:
            return f" (at character {below.index('^') - len(indent) + 1})"
    return ""


@lru_cache(4)  # not a weak dictionary: the value holds the key, the tokenizer
def _vocabulary(backend: Any, _size: int, ends: tuple[int, ...]) -> "LLTokenizer":
    """Return a vocabulary in llguidance's form; building one takes a third of a second."""
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    made: LLTokenizer = _library().LLTokenizer(backend.to_str(), eos_token=list(ends) or None)
    return made


def _backend(tokenizer: "PreTrainedTokenizerBase | CoreTokenizer") -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidConstraintError(
            f"constraints need a fast tokenizer, and {type(tokenizer).__name__} is not one"
        )
    return backend


def _wrapped(
    tokenizer: "PreTrainedTokenizerBase | CoreTokenizer", stop_ids: tuple[int, ...]
) -> "LLTokenizer":
    backend = _backend(tokenizer)
    end = backend.token_to_id(str(tokenizer.special_tokens_map.get("eos_token")))
    ends = stop_ids or (() if end is None else (end,))
    return _vocabulary(backend, backend.get_vocab_size(), ends)


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
