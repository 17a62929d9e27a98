"""Drafts of forced text: a database of a single sequence that is nearly certain.

We remove from a retrieved tree the nodes that the grammar forbids. We add forced strings
(`forced_strings`) at the root and after the likeliest leaves. The model's own tokenizer splits
these strings into tokens. Only the last token of a string may be split wrongly, because the text
after it is unknown.

Trees never change an output: whatever is drafted, the target model chooses among the tokens that
the grammar allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.predict.grammar.forced_kernels import merge_forced, order_paths
from retriever.predict.grammar.forced_strings import MARKS, Forced, ForcedStrings, Habits, Way
from retriever.tree import ROOT, DraftTree, Source

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_RECENT: Final = 6
"""Number of tokens before a forced string that affect how the start of the string is tokenized."""

_MOST_LEAVES: Final = 2
"""Most leaves of a tree after which we look for forced strings."""

_LEAST_LEAF: Final = 0.05
"""Least probability of such a leaf."""

_MOST_CUTS: Final = 1024
"""Most tokenized strings stored per tenant: less than half a megabyte."""

_REFUSED: Final = bytes([1]) * 1024
"""Marks of forbidden nodes; a tree has at most this many."""

_MOST_IDLE: Final = 16
"""Most idle matchers stored for future outputs of a grammar."""


class Matchers:
    """A grammar's initial states, over the model's tokens and over single bytes.

    A matcher builds its automaton as it runs: the mask of a new state over bytes takes 72 us, that
    of a known state 6 us. So we reset and reuse the matchers of finished outputs.

    Args:
        tokens: matcher over the model's tokens; it is not changed.
        letters: matcher over single bytes; it is not changed.
    """

    def __init__(self, tokens: "LLMatcher", letters: "LLMatcher") -> None:
        self._new = tokens, letters
        self._idle: list[tuple[LLMatcher, LLMatcher]] = []

    def lend(self) -> "tuple[LLMatcher, LLMatcher]":
        """Return the two matchers for one output."""
        try:
            return self._idle.pop()
        except IndexError:
            tokens, letters = self._new
            return tokens.deep_copy(), letters.deep_copy()

    def take_back(self, tokens: "LLMatcher", letters: "LLMatcher") -> None:
        """Store both matchers for another output, unless they hit a limit of the library."""
        if len(self._idle) < _MOST_IDLE and not (tokens.is_error() or letters.is_error()):
            tokens.reset()
            letters.reset()
            self._idle.append((tokens, letters))


_GUESSED: Final = 1
_LAST: Final = 2
"""The kind of a forced token is a sum of these flags; its probability depends on its kind."""

_FIRST_TRUST: Final = ((9.7, 0.3), (8.0, 2.0), (6.0, 4.0), (5.0, 5.0))
"""Initial counts by kind: tokens that came true, and tokens that did not."""


class _Cut(NamedTuple):
    """A string's tokens, their kinds, and the index of the token with the choice (-1: none)."""

    tokens: list[int]
    kinds: list[int]
    chosen_at: int


@dataclass(slots=True)
class Learned:
    """What was learned from earlier outputs of a grammar, for future drafts.

    Attributes:
        habits: the style of the outputs.
        cuts: tokens of forced strings, by the string and the tokens before; tokenizing takes time.
        trust: for each kind, how often forced tokens came true, and how often they did not.
        forbidden: recent share of drafted nodes that the grammar forbade.
    """

    habits: Habits = field(default_factory=Habits)
    cuts: dict[tuple[object, ...], _Cut] = field(default_factory=dict)
    trust: list[tuple[float, float]] = field(default_factory=lambda: list(_FIRST_TRUST))
    forbidden: float = 0.5

    def probabilities(self) -> list[float]:
        """Return, for each kind, a forced token's probability if the tokens before it came true."""
        return [came / (came + missed) for came, missed in self.trust]

    def count(self, kind: int, *, came: bool) -> None:
        """Count whether a token came true; old counts decay, because outputs differ in spacing."""
        before, missed = self.trust[kind]
        self.trust[kind] = before * 0.95 + came, missed * 0.95 + (not came)


class _String(NamedTuple):
    """A drafted string: the node before it, the path to that node, and its own tokens."""

    node: int
    path: tuple[int, ...]
    cut: _Cut
    way: Way | None


class ForcedDrafts:
    """Drafts of the text that a grammar forces in one sequence.

    Args:
        matchers: matchers of the grammar.
        tokenizer: the model's tokenizer.
        stop_ids: tokens that end the output.
        learned: statistics shared by all outputs of a grammar.
    """

    def __init__(
        self,
        matchers: Matchers,
        tokenizer: "LLTokenizer",
        stop_ids: Sequence[int],
        learned: Learned,
    ) -> None:
        self._tokens, self._letters = matchers.lend()
        finalize(self, matchers.take_back, self._tokens, self._letters).atexit = False
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        self._end = stop_ids[0] if stop_ids else None
        self._learned = learned
        self._drafted: list[_String] = []
        self._begin()

    def nodes_to_ask(self, max_nodes: int) -> int:
        """Return how many nodes to request, so that the grammar allows about `max_nodes`."""
        return max_nodes + int(max_nodes * self._learned.forbidden)

    def improved(self, tree: DraftTree, generated: TokenIds, max_nodes: int) -> DraftTree:
        """Return the tree without forbidden nodes and with the forced strings added.

        This also learns from the tokens that were committed since the previous draft.

        Args:
            tree: the drafted tree; it may have more than `max_nodes` nodes.
            generated: int32[n], the output so far.
            max_nodes: most nodes of the result.
        """
        self._follow(generated)
        if self._tokens.is_error() or not self._strings.is_known:
            return tree.prefix(max_nodes)  # the library hit a limit: its state is not valid
        if self._tokens.is_stopped():
            return DraftTree.empty()
        if not self._draft(ROOT, (), b"", self._strings.next()):
            self._drafted = []
            self._draft(ROOT, (), b"", self._strings.next(is_new=True))
        forbidden = self._forbidden(tree) if len(tree) else np.empty(0, np.int32)
        if not self._drafted and not forbidden.any():
            return tree.prefix(max_nodes)
        return self._merged(tree, forbidden, max_nodes)

    def _learn(self, came: Sequence[int]) -> None:
        """Learn from the tokens that were committed since the previous draft."""
        learned = self._learned
        for _, path, (tokens, kinds, chosen_at), way in self._drafted:
            if path and tuple(came[: len(path)]) != path:
                continue
            behind = zip(tokens, kinds, came[len(path) :], strict=False)
            for place, (token, kind, actual) in enumerate(behind):
                if place == chosen_at and way is not None:
                    learned.habits.learn_way(way, came=token == actual)
                elif place > chosen_at:
                    learned.count(kind, came=token == actual)
                if token != actual:
                    break
        self._drafted = []

    def _begin(self) -> None:
        self._strings = ForcedStrings(self._letters, self._learned.habits)
        self._recent: list[int] = []
        self._num_known = 0

    def _follow(self, generated: TokenIds) -> None:
        """Advance the matchers to the end of the output."""
        known = self._num_known
        before = generated[max(known - _RECENT, 0) : known].tolist()
        if known > len(generated) or before != self._recent:
            self._tokens.reset()
            self._letters.reset()
            self._begin()
            self._drafted, known = [], 0
        new = generated[known:].tolist()
        if not new:
            self._drafted = []
            return
        self._learn(new)
        self._tokens.consume_tokens(new)
        texts = new if self._stop_ids.isdisjoint(new) else new[:-1]
        self._strings.follow(self._tokenizer.decode_bytes(texts))
        self._recent = (self._recent + new)[-_RECENT:]
        self._num_known = known + len(new)

    def _forbidden(self, tree: DraftTree) -> NDArray[np.int32]:
        """Return int32[n], 1 for the nodes that the grammar forbids.

        On the way, this also drafts the strings that are forced after some leaves.
        """
        size = len(tree)
        order, paths = np.empty(size, np.int32), np.empty((2, size + 1), np.int32)
        count = order_paths(tree.parents, order, paths)
        tokens = tree.token_ids[order].tolist()
        begins, depths = paths[:, : count + 1].tolist()
        validate, has_ends = self._tokens.validate_tokens, not self._stop_ids.isdisjoint(tokens)
        refused, path, cut = bytearray(size), list[int](), size
        leaves: list[tuple[int, list[int]]] = []
        for begin, end, depth in zip(begins, begins[1:], depths, strict=False):
            if depth > cut:  # after a forbidden node
                refused[begin:end] = _REFUSED[: end - begin]
                continue
            path[depth:] = tokens[begin:end]
            num_allowed = validate(path)
            if has_ends and num_allowed < len(path) and path[num_allowed] in self._stop_ids:
                num_allowed += self._may_end(path[:num_allowed])
            cut, last = size, begin + num_allowed - depth
            if last < end:
                cut = num_allowed
                refused[last:end] = _REFUSED[: end - last]
            if last > begin:
                leaves.append((last - 1, path[:num_allowed]))
        self._draft_behind(tree, [(int(order[last]), path) for last, path in leaves])
        forbidden = np.zeros(size, np.int32)
        num_forbidden = refused.count(1)
        if num_forbidden:
            forbidden[order] = np.frombuffer(refused, np.uint8)
        learned = self._learned
        learned.forbidden += 0.1 * (num_forbidden / size - learned.forbidden)
        return forbidden

    def _draft_behind(self, tree: DraftTree, leaves: list[tuple[int, list[int]]]) -> None:
        """Draft what is forced after the likeliest leaves; each comes with the path to it."""
        for node, path in sorted(leaves)[:_MOST_LEAVES]:
            if tree.probabilities[node] >= _LEAST_LEAF and path[-1] not in self._stop_ids:
                text = self._tokenizer.decode_bytes(path)
                self._draft(node, tuple(path), text, self._strings.behind(text))

    def _may_end(self, path: list[int]) -> bool:
        """Return whether the output may end after some allowed tokens."""
        if not path:
            return bool(self._tokens.is_accepting())
        self._tokens.consume_tokens(path)
        may_end = bool(self._tokens.is_accepting())
        self._tokens.rollback(len(path))
        return may_end

    def _draft(
        self, node: int, path: tuple[int, ...], text: bytes, strings: Sequence[Forced]
    ) -> bool:
        """Draft strings after a node, split into tokens by the tokenizer.

        Args:
            node: a node of the tree, or `ROOT`.
            path: tokens on the path to the node.
            text: bytes of the path.
            strings: strings that are forced there.

        Returns:
            Whether the grammar allows all strings; forbidden strings are omitted.
        """
        are_allowed = True
        if not strings:
            return are_allowed
        behind_word = (text or self._strings.place.tail)[-1:].isalnum()
        recent = (*self._recent, *path)[-_RECENT:]
        for string in strings:
            # Tokenizers split words from punctuation: the word before a mark does not matter.
            before = () if behind_word and string.text[:1] in MARKS else recent
            cut = self._cut(before, recent, string)
            whole = [*path, *cut.tokens]
            num_allowed = self._tokens.validate_tokens(whole)
            if num_allowed < len(whole) - string.ends:
                are_allowed = False
            else:
                self._drafted.append(_String(node, path, cut, string.way))
        return are_allowed

    def _cut(self, key: tuple[int, ...], recent: tuple[int, ...], string: Forced) -> _Cut:
        """Return the string's tokens after `recent`, or without `recent` if the two do not join."""
        cuts, whole = self._learned.cuts, (key, *string[:3], string.chosen_from)
        found = cuts.get(whole)
        if found is None:
            if len(cuts) >= _MOST_CUTS:
                cuts.clear()
            found = cuts[whole] = self._cut_behind(list(recent), string)
        return found

    def _cut_behind(self, before: list[int], string: Forced) -> _Cut:
        tokens = self._tokens_behind(before, string.text) if string.text else []
        lengths = [len(self._tokenizer.decode_bytes([token])) for token in tokens]
        ends = list(accumulate(lengths))
        kinds = [_GUESSED * (end > string.guessed_from) for end in ends]
        if string.ends and self._end is not None:
            tokens, kinds = [*tokens, self._end], [*kinds, 0]
        elif kinds:
            kinds[-1] += _LAST
        chosen_at = -1
        if string.way is not None:
            chosen_at = next(at for at, end in enumerate(ends) if end > string.chosen_from)
        return _Cut(tokens, kinds, chosen_at)

    def _tokens_behind(self, before: list[int], text: bytes) -> list[int]:
        tokenizer = self._tokenizer
        if before and not any(map(tokenizer.is_special_token, before)):
            whole = tokenizer.tokenize_bytes(tokenizer.decode_bytes(before) + text)
            if whole[: len(before)] == before and len(whole) > len(before):
                return list(whole[len(before) :])
        return list(tokenizer.tokenize_bytes(text))

    def _merged(self, tree: DraftTree, forbidden: NDArray[np.int32], max_nodes: int) -> DraftTree:
        """Return at most `max_nodes` nodes: the tree's allowed nodes and the drafted strings."""
        probabilities = self._learned.probabilities()
        tokens, shares, strings = list[int](), list[float](), list[tuple[int, int, int]]()
        for node, _, (own, kinds, chosen_at), way in self._drafted:
            begin = len(tokens)
            tokens += own
            shares += [probabilities[kind] for kind in kinds]
            if way is not None:
                shares[begin + chosen_at] *= way.share
            strings.append((node, len(tokens), chosen_at))
        size, most = len(tree), len(tree) + len(tokens)
        nodes, estimates = np.empty((4, most), np.int32), np.empty((2, most), np.float32)
        sources = np.empty(most, np.uint8)
        nodes[0, :size], nodes[1, :size], nodes[2, :size] = tree.token_ids, tree.parents, forbidden
        estimates[0, :size], sources[:size] = tree.probabilities, tree.sources
        made, made_shares = np.empty((2, most), np.int32), np.empty(most, np.float32)
        made_sources = np.empty(most, np.uint8)
        count = merge_forced(
            nodes,
            estimates,
            sources,
            size,
            np.array(strings, np.int32).reshape(-1, 3),
            np.array(tokens, np.int32),
            np.array(shares, np.float32),
            int(Source.GRAMMAR),
            made,
            made_shares,
            made_sources,
        )
        count = min(count, max_nodes)
        return DraftTree(
            made[0, :count], made[1, :count], made_shares[:count], made_sources[:count]
        )
